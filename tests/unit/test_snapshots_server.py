"""The snapshot server: strangers, malformed requests, and the addresses at which it listens."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ls_strategy.errors import CheckpointError
from ls_strategy.extras import requests
from ls_strategy.extras.snapshots.memory import Memory
from ls_strategy.extras.snapshots.nodes import Nodes
from ls_strategy.extras.snapshots.server import Peer, Server, one_address
from tests.limits import wall
from tests.unit.test_snapshots import A, serving, together, write


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "node0", "run")


@pytest.fixture
def other(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "node1", "run")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.wide
def test_connections_without_the_secret_take_few_descriptors(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    """The number is bounded as they come, not only when their time is over."""
    monkeypatch.setattr(requests, "_STRANGER_S", 600.0, raising=False)
    server = Server(memory, "secret")
    before = descriptors()
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        Peer(["127.0.0.1"], server.port, "secret").hello()  # a node is served nevertheless
        deadline = time.monotonic() + wall(8)
        while (served := descriptors() - before - len(strangers)) > 64 + 2:
            assert time.monotonic() < deadline, f"{served} descriptors"
            time.sleep(0.05)
    finally:
        for stranger in strangers:
            stranger.close()
        server.close()


@pytest.mark.wide
def test_a_connection_that_sends_a_letter_now_and_then_is_closed(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requests, "_STRANGER_S", 1.0)
    with serving(memory) as peer, socket.create_connection(("127.0.0.1", peer._port), timeout=20) as stranger:
        end = time.monotonic() + wall(15)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                stranger.sendall(b" ")
                time.sleep(0.05)
        assert time.monotonic() < end
        peer.hello()


WRONG: dict[str, dict[str, Any]] = {
    "no name": {"name": None},
    "name list": {"name": ["x"]},
    "file null": {"file": None},
    "file a number": {"file": 0},
    "offset negative": {"offset": -1},
    "offset text": {"offset": "0"},
    "length negative": {"length": -1},
    "length absurd": {"length": 1 << 70},
    "length true": {"length": True},
    "what null": {"what": None},
    "what list": {"what": ["read"]},
}


@pytest.mark.sample(11)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("what", ["read", "put"])
def test_a_malformed_request_is_answered_by_an_error(what: str, wrong: dict[str, Any], memory: Memory):
    write(memory, A, {"f": b"data"})
    request = {"what": what, "name": A, "file": "f", "offset": 0, "length": 4, "secret": "secret"}
    if what == "put" and "offset" in wrong:
        pytest.skip("put has no offset")
    with serving(memory) as peer, socket.create_connection(("127.0.0.1", peer._port), timeout=20) as raw:
        raw.sendall(json.dumps({**request, **wrong}).encode() + b"\n")
        assert "error" in json.loads(raw.makefile("rb").readline())
        assert (memory.path(A) / "f").read_bytes() == b"data"


def test_what_does_not_fit_or_does_not_come_leaves_nothing(memory: Memory):
    write(memory, A, {"f": b"data"})
    request = {"what": "put", "name": A, "file": "g", "secret": "secret"}
    with serving(memory) as peer:
        for length, text in ((1 << 49, "do not fit"), (100, "the connection ended")):
            with socket.create_connection(("127.0.0.1", peer._port), timeout=20) as raw:
                raw.sendall(json.dumps({**request, "length": length}).encode() + b"\nfew bytes")
                raw.shutdown(socket.SHUT_WR)
                assert text in json.loads(raw.makefile("rb").readline())["error"]
    assert sorted(path.name for path in memory.path(A).iterdir()) == ["f"]


def listening() -> set[str]:
    """Addresses of IPv4 at which this process listens, with their ports, as the kernel knows them."""
    own = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {each[1] for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in own}


def test_one_node_listens_nowhere(memory: Memory):
    before = listening()
    nodes = together(2, lambda rank, exchange: Nodes(memory, rank, "127.0.0.1", exchange, lambda work: work()))
    try:
        assert listening() == before
        assert nodes[0].buddy is None
        assert len(nodes[0].all) == 1
    finally:
        for each in nodes:
            each.close()


def test_nodes_listen_at_the_address_where_they_are_reached(memory: Memory, other: Memory):
    before = listening()
    memories = [memory, other]
    nodes = together(2, lambda rank, exchange: Nodes(memories[rank], rank, "127.0.0.1", exchange, lambda work: work()))
    try:
        new = listening() - before
        assert len(new) == 2
        assert all(each.startswith("0100007F:") for each in new)  # 127.0.0.1
    finally:
        for each in nodes:
            each.close()


def test_the_address_of_a_node_is_that_of_the_way_to_another_one(monkeypatch: pytest.MonkeyPatch):
    ways = {"10.0.0.2": ["10.0.0.1"], "node2": []}
    monkeypatch.setattr("ls_strategy.extras.snapshots.server._towards", lambda address: ways.get(address, []))
    main, second = ["127.0.1.1", "main"], ["10.0.0.2", "node2"]
    assert one_address(second, [main, second]) == "10.0.0.2"
    assert one_address(main, [main, second]) == "10.0.0.1"  # its own name leads to itself
    assert one_address(["main"], [["main"], ["node2"]]) == ""  # not known: all interfaces
    assert one_address(["127.0.0.1"], [["127.0.0.1"]] * 2) == "127.0.0.1"
    assert one_address(["::1"], [["::1"]] * 2) == "::1"


def test_nodes_that_are_not_reached_at_the_likeliest_address_listen_at_all(
    memory: Memory, other: Memory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ls_strategy.extras.snapshots.nodes.one_address", lambda *_: "127.0.0.2")
    real = Peer.hello

    def hello(peer: Peer) -> None:
        if peer._addresses == ["127.0.0.2"]:
            raise CheckpointError("no way")
        real(peer)

    monkeypatch.setattr(Peer, "hello", hello)
    memories = [memory, other]
    nodes = together(2, lambda rank, exchange: Nodes(memories[rank], rank, "127.0.0.1", exchange, lambda work: work()))
    try:
        for each in nodes:
            assert each.buddy is not None
            each.buddy.hello()
    finally:
        for each in nodes:
            each.close()


def test_a_connection_that_says_nothing_is_closed(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requests, "_STRANGER_S", 0.2)
    with serving(memory) as peer:
        stranger = socket.create_connection(("127.0.0.1", peer._port), timeout=60)
        assert stranger.recv(1) == b""
        stranger.close()
        peer.hello()
