"""The hub's server over raw TCP: what a rank that is broken, or is none, can do to the others."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ls_strategy.extras.islands.hub import Hub
from ls_strategy.extras.islands.server import HubServer

SECRET = "a secret of more than sixteen characters"


@contextlib.contextmanager
def serving(islands: int, patience_s: float = 30.0) -> Iterator[int]:
    """Yields the port."""
    server = HubServer(Hub(islands, patience_s), host="127.0.0.1", port=0, secret=SECRET)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server.port
    finally:
        server.close()
        thread.join()


class Raw:
    """A connection that sends what it likes."""

    def __init__(self, port: int, island: int = 0, *, rank: int = 0, ranks: int = 1) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.file = self.socket.makefile("rb")
        self.who = {"island": island, "rank": rank, "ranks": ranks}
        self.lines: list[bytes] = []

    def send(self, what: str, data: bytes = b"", /, **entries: Any) -> None:
        line = {"secret": SECRET, "what": what, **self.who, "length": len(data), **entries}
        self.write(json.dumps({k: v for k, v in line.items() if v is not ...}).encode() + b"\n" + data)

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> dict[str, Any]:
        """The answer; empty if the connection ends."""
        while True:
            try:
                line = self.file.readline()
            except ConnectionResetError:
                return {}
            self.lines.append(line)
            answer = json.loads(line or b"{}")
            if answer.get("what") != "wait":
                return answer

    def join(self, **entries: Any) -> None:
        self.send("join", **{"fingerprint": {"every": 5}, "run": None, "round": 0, "again": False, **entries})

    def exchange(self, data: bytes = b"", /, **entries: Any) -> None:
        line = {"round": 0, "run": None, "ends": False, "steps": 1, "fingerprint": {"trains": "a"}}
        self.send("exchange", data, **{**line, **entries})

    def is_closed(self) -> bool:
        """Whether the hub ends the connection, perhaps after an error."""
        answer = self.answer()
        return not answer or ("error" in answer and not self.answer())


def joined(port: int, islands: int) -> list[Raw]:
    """Islands of one rank that are in."""
    there = []
    for island in range(islands):
        there.append(Raw(port, island))
        there[-1].join()
    assert there[0].answer()["joiners"] == list(range(1, islands))
    there[0].send("state", b"weights", round=0, buffers=0)
    assert there[0].answer() == {}
    for each in there[1:]:
        answer = each.answer()
        assert each.file.read(answer["lengths"][0]) == b"weights"
    return there


def test_answers_have_neither_the_secret_nor_what_others_have_asked() -> None:
    with serving(2) as port:
        first, second = joined(port, 2)
        for each, data in ((first, b"of 0"), (second, b"of 1")):
            each.exchange(data, note="only mine")
        for each in (first, second):
            assert each.answer() == {
                "what": "done",
                "islands": [[0, 1], [1, 1]],
                "joiners": [],
                "lengths": [4],
            }
            assert not any(word in b"".join(each.lines) for word in (SECRET.encode(), b"only mine", b"trains"))


def test_only_the_connection_of_a_rank_exchanges_for_it() -> None:
    with serving(2) as port:
        first, second = joined(port, 2)
        for what in ("exchange", "state"):
            stranger = Raw(port, 1)
            stranger.exchange(b"forged") if what == "exchange" else stranger.send(what, b"forged", round=0, buffers=0)
            assert stranger.is_closed()
        other = Raw(port, 1)
        other.send("hello", protocol=2)
        assert other.answer() == {"protocol": 2}
        first.exchange(b"forged", island=1)
        assert first.is_closed()
        second.exchange(b"mine")
        assert second.answer()["islands"] == [[1, 1]]


WRONG: dict[str, dict[str, Any]] = {
    "no round": {"round": ...},
    "no steps": {"steps": ...},
    "no fingerprint": {"fingerprint": ...},
    "no ends": {"ends": ...},
    "no ranks": {"ranks": ...},
    "no rank": {"rank": ...},
    "no length": {"length": ...},
    "no island": {"island": ...},
    "steps text": {"steps": "1"},
    "steps negative": {"steps": -1},
    "steps true": {"steps": True},
    "steps endless": {"steps": 10**300},
    "fingerprint list": {"fingerprint": []},
    "fingerprint nested": {"fingerprint": {"trains": {"a": 1}}},
    "ends number": {"ends": 1},
    "ranks 0": {"ranks": 0},
    "ranks 2": {"ranks": 2},
    "rank list": {"rank": [0]},
    "island text": {"island": "1"},
    "island negative": {"island": -1},
    "length negative": {"length": -1},
    "length text": {"length": "4"},
    "length float": {"length": 4.0},
    "length null": {"length": None},
    "length absurd": {"length": 1 << 62},
    "length endless": {"length": 10**300},
    "run list": {"run": ["a"]},
    "what": {"what": "shutdown"},
    "what list": {"what": ["join"]},
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_request_that_is_malformed_ends_its_own_connection_only(wrong: dict[str, Any]) -> None:
    with serving(2) as port:
        first, second = joined(port, 2)
        first.exchange(b"of 0")
        second.exchange(b"of 1", **wrong)
        assert second.is_closed()
        assert first.answer()["islands"] == [[0, 1]]
        first.exchange(round=1)
        assert first.answer()["islands"] == [[0, 1]]


@pytest.mark.parametrize(
    "line",
    [b"[]", b"1", b"null", b"{", b"[" * 60_000, b"\xff\xfe", b"\x00" * 70_000, b'{"secret": ["x"]}'],
    ids=["list", "number", "null", "torn", "deep", "no text", "long", "secret is a list"],
)
def test_a_line_that_is_no_request_ends_its_own_connection_only(line: bytes) -> None:
    with serving(1) as port:
        first = Raw(port)
        first.join()
        first.answer()
        stranger = Raw(port)
        with contextlib.suppress(ConnectionError):
            stranger.write(line + b"\n")
        assert stranger.is_closed()
        first.exchange(b"x")
        assert first.answer()["what"] == "done"


def test_a_join_that_is_malformed_does_not_spoil_the_run() -> None:
    with serving(2) as port:
        for wrong in ({"fingerprint": None}, {"round": "0"}, {"again": ...}, {"run": 5}, {"ranks": 10**9}):
            broken = Raw(port, 1)
            broken.join(**wrong)
            assert broken.is_closed()
        joined(port, 2)


@pytest.mark.wide
def test_ranks_of_an_island_that_count_differently_are_refused() -> None:
    with serving(1, patience_s=1.0) as port:
        one, two = Raw(port, ranks=2), Raw(port, rank=1, ranks=3)
        one.join()
        assert one.socket.getsockname()
        two.join()
        answers = [one.answer(), two.answer()]
        assert all("error" in answer for answer in answers)


def test_a_connection_has_one_seat() -> None:
    with serving(2) as port:
        _, second = joined(port, 2)
        second.join(island=0)
        assert second.is_closed()


@pytest.mark.wide
def test_hundreds_of_islands_fit_into_an_answer() -> None:
    islands = 300  # each is a thread of the server
    with serving(islands, patience_s=60.0) as port:
        there = joined(port, islands)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda each: each.exchange(b"x" * 10, steps=10**15), there))
            for each in there:
                answer = each.answer()
                assert answer["islands"] == [[i, 10**15] for i in range(islands)]
                assert len(each.file.read(sum(answer["lengths"]))) == 10 * (islands - 1)
        longest = {"what": "done", "islands": [[1023, 1 << 53]] * 1024, "lengths": [1 << 40] * 1023}
        assert len(json.dumps({**longest, "joiners": [1023] * 1024})) < 64 * 1024


def test_memory_is_not_taken_before_bytes_arrive() -> None:
    with serving(1) as port:
        only = Raw(port)
        only.join()
        only.answer()
        tracemalloc.start()
        try:
            only.exchange(b"a little", length=1 << 36)
            only.socket.shutdown(socket.SHUT_WR)
            assert only.is_closed()
            assert tracemalloc.get_traced_memory()[1] < 1 << 26
        finally:
            tracemalloc.stop()


@pytest.mark.wide
def test_a_rank_that_says_nothing_is_lost_and_one_that_trains_slowly_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from ls_strategy.extras.islands import client, server

    monkeypatch.setattr(server._Handler, "timeout", 1.0)
    monkeypatch.setattr(client, "ALIVE_S", 0.2)
    with serving(2) as port:
        silent = Raw(port, 1)
        slow = client.HubClient(("127.0.0.1", port), SECRET, {"island": 0, "rank": 0, "ranks": 1}, 20.0)
        slow.connect()
        line = {"fingerprint": {"every": 5}, "run": None, "round": 0, "again": False}
        silent.join()
        assert slow.ask("join", line)[0]["joiners"] == [1]
        slow.ask("state", {"round": 0, "buffers": 0}, b"")
        assert silent.answer()["what"] == "fetch"
        assert silent.is_closed()  # after a second without a line
        threading.Event().wait(2.0)  # a long step
        exchange = {"run": None, "round": 0, "ends": False, "steps": 1, "fingerprint": {}}
        assert slow.ask("exchange", exchange)[0]["islands"] == [[0, 1]]
        slow.close()
