"""A hub that is stopped, in a process of its own, as a rank sees it; and one that only waits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ls_strategy import ConfigError, StateError
from ls_strategy.extras.islands import client as client_module
from ls_strategy.extras.islands import link
from ls_strategy.extras.islands.client import HubClient
from ls_strategy.extras.islands.link import HubSilentError
from tests.processes import Program

PROGRAM = """
import sys
from ls_strategy.extras.islands import server
from ls_strategy.extras.islands.hub import Hub
server.ALIVE_S = 0.2
made = server.HubServer(Hub(int(sys.argv[1]), 60.0), host="127.0.0.1", port=0, secret="")
print(made.port, flush=True)
made.serve()
"""
JOIN = {"fingerprint": {}, "run": None, "round": 0, "again": False}
EXCHANGE = {"run": None, "round": 0, "ends": False, "steps": 1, "fingerprint": {}}


@contextlib.contextmanager
def hub(islands: int) -> Iterator[tuple[Program, int]]:
    with Program(PROGRAM, str(islands)) as process:
        yield process, int(process.stdout.readline())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ALIVE_S", 0.2)
    monkeypatch.setattr(link, "_UNUSUAL_S", 1.0)
    monkeypatch.setattr(client_module, "_LEAST_SILENCE_S", 0.0)


class Rank:
    """The only rank of an island."""

    def __init__(self, port: int, island: int, patience_s: float) -> None:
        self.said: list[str] = []
        who = {"island": island, "rank": 0, "ranks": 1}
        self.client = HubClient(("127.0.0.1", port), "", who, patience_s, self.said.append)

    def join(self) -> None:
        self.client.connect()
        if self.client.ask("join", JOIN)[0].get("joiners"):
            self.client.ask("state", {"round": 0, "buffers": 0})


@contextlib.contextmanager
def two(patience_s: float) -> Iterator[tuple[Program, int, list[Rank], ThreadPoolExecutor]]:
    """A hub and two islands that are in."""
    with hub(2) as (process, port), ThreadPoolExecutor(2) as pool:
        ranks = [Rank(port, island, patience_s) for island in (0, 1)]
        list(pool.map(Rank.join, ranks))
        try:
            yield process, port, ranks, pool
        finally:
            for rank in ranks:
                rank.client.close()


@pytest.mark.wide
def test_a_hub_that_is_stopped_is_reported_by_its_address_and_then_lost() -> None:
    with two(2.0) as (process, port, (first, _), pool):
        asked = pool.submit(first.client.ask, "exchange", EXCHANGE, b"x")
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(HubSilentError, match="it has said nothing for"):
            asked.result(timeout=20)
        assert 1.0 < time.monotonic() - began < 12.0
        assert len(first.said) == 1
        assert f"the hub at 127.0.0.1:{port} has said nothing for" in first.said[0]
        with pytest.raises(StateError, match=f"the hub at 127.0.0.1:{port} does not answer.*Continue or end"):
            first.client.connect()  # the kernel still accepts
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.wide
def test_a_hub_that_goes_on_in_time_loses_nothing() -> None:
    with two(30.0) as (process, _, (first, second), pool):
        asked = pool.submit(first.client.ask, "exchange", EXCHANGE, b"x")
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGSTOP)
        while not first.said:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
        assert second.client.ask("exchange", EXCHANGE, b"y")[1] == [b"x"]
        assert asked.result(timeout=20)[1] == [b"y"]


@pytest.mark.wide
def test_a_hub_that_waits_for_an_island_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_UNUSUAL_S", 4.0)  # on a busy machine, its process can stand still for a second
    with two(4.5) as (_, _, (first, second), pool):
        asked = pool.submit(first.client.ask, "exchange", EXCHANGE, b"x")
        time.sleep(5.0)  # longer than it may be silent
        assert not asked.done()
        second.client.ask("exchange", EXCHANGE, b"y")
        assert asked.result(timeout=20)[1] == [b"y"]
        assert not first.said


@pytest.mark.wide
def test_a_hub_that_is_stopped_while_it_receives_is_noticed() -> None:
    with two(2.0) as (process, _, (first, _), pool):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(HubSilentError):
            pool.submit(first.client.ask, "exchange", EXCHANGE, bytes(1 << 26)).result(timeout=20)
        assert len(first.said) == 1
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.wide
def test_many_bytes_may_take_longer_than_the_silence_that_is_allowed() -> None:
    """The limit counts from piece to piece."""
    with two(1.5) as (_, _, (first, second), pool):
        assert first.client._link is not None
        real = first.client._link._socket

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def send(self, data: memoryview) -> int:
                time.sleep(0.1)
                return real.send(data[: 1 << 16])

        first.client._link._socket = Slow()  # type: ignore[assignment]
        data = bytes(40 << 16)
        asked = pool.submit(first.client.ask, "exchange", EXCHANGE, data)
        assert second.client.ask("exchange", EXCHANGE, b"y")[1] == [data]
        assert asked.result(timeout=20)[1] == [b"y"]


def test_what_is_no_hub_is_an_error_with_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(ConfigError, match="what listens there is no hub"):
            Rank(port, 0, 5.0).client.connect()
        other.shutdown(socket.SHUT_RDWR)
