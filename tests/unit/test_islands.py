"""The hub's decisions, its server and client, and the formats of what islands send."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from ls_strategy import ConfigError, DiLoCo, StateError
from ls_strategy.extras.cli import main
from ls_strategy.extras.islands import buffers, messages, wire
from ls_strategy.extras.islands import hub as hub_module
from ls_strategy.extras.islands.client import HubClient, parse_address
from ls_strategy.extras.islands.decided import Reply
from ls_strategy.extras.islands.fingerprint import disagreement
from ls_strategy.extras.islands.hub import Hub
from ls_strategy.extras.islands.link import HubLostError
from ls_strategy.extras.islands.server import HubServer
from ls_strategy.testing import free_port


class Rank:
    """A rank of an island, which asks the hub in a thread."""

    made: ClassVar[list[Rank]] = []

    def __init__(self, hub: Hub, island: int, rank: int, ranks: int) -> None:
        self.hub, self.who = hub, {"island": island, "rank": rank, "ranks": ranks}
        self.is_lost, self.waits = False, 0
        self.run: str | None = None
        self._thread = ThreadPoolExecutor(1)
        self.made.append(self)

    def ended(self) -> bool:
        return self.is_lost

    def still_waiting(self) -> None:
        self.waits += 1

    def join(self, run: str | None = None, round: int = 0, *, again: bool = False, **fingerprint: Any) -> Future[Reply]:
        line = {**self.who, "fingerprint": fingerprint, "run": run, "round": round, "again": again}
        return self._thread.submit(self.hub.join, self, messages.join(line))

    def exchange(
        self, round: int, data: bytes, *, ends: bool = False, steps: int = 1, run: str | None = None, **fingerprint: Any
    ) -> Future[Reply]:
        run = run or self.run
        line = {**self.who, "round": round, "run": run, "ends": ends, "steps": steps, "fingerprint": fingerprint}
        return self._thread.submit(self.hub.exchange, self, messages.exchange(line), data)

    def verdict(self, round: int, refused: list[int]) -> Future[Reply]:
        line = {**self.who, "round": round, "refused": refused}
        return self._thread.submit(self.hub.verdict, self, messages.verdict(line))

    def state(self, round: int, data: bytes) -> Future[Reply]:
        line = {**self.who, "round": round, "buffers": 0}
        return self._thread.submit(self.hub.state, self, messages.state(line), data)

    def lose(self) -> None:
        self.is_lost = True
        self.hub.gone(self)


@pytest.fixture(autouse=True)
def _everyone_leaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hub_module, "_LOOK_EVERY_S", 0.05)  # else a limit is noticed up to a second later
    yield
    for rank in Rank.made:
        rank.lose()
    for rank in Rank.made:
        rank._thread.shutdown()
    Rank.made.clear()


def island(hub: Hub, number: int, ranks: int = 1) -> list[Rank]:
    return [Rank(hub, number, rank, ranks) for rank in range(ranks)]


def get(future: Future[Reply], within_s: float = 10.0) -> Reply:
    return future.result(timeout=within_s)


def started(ranks: int = 1, islands: int = 2, patience_s: float = 30.0) -> tuple[Hub, list[list[Rank]]]:
    """A hub and islands that have joined; the first one has given its state to the others."""
    hub = Hub(islands, patience_s)
    there = [island(hub, number, ranks) for number in range(islands)]
    joins = [[rank.join() for rank in each] for each in there]
    for future in joins[0]:
        assert get(future).line["joiners"] == list(range(1, islands))
    for rank in there[0]:
        get(rank.state(0, b"state %d" % rank.who["rank"]))
    for each in joins[1:]:
        assert [get(future).parts for future in each] == [[b"state %d" % rank] for rank in range(ranks)]
    return hub, there


def test_a_rank_gets_the_bytes_of_the_same_rank_of_the_other_islands_in_their_order():
    _, there = started(ranks=2, islands=3)
    asked = [[rank.exchange(0, b"%d%d" % (i, r)) for r, rank in enumerate(each)] for i, each in enumerate(there)]
    for i, each in enumerate(asked):
        for r, future in enumerate(each):
            reply = get(future)
            assert reply.line["what"] == "done"
            assert reply.parts == [b"%d%d" % (other, r) for other in range(3) if other != i]
            assert [number for number, _ in reply.line["islands"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("patience_s", "ranks"), [(30.0, 2), pytest.param(1.0, 1, marks=pytest.mark.wide)], ids=["lost", "silent"]
)
def test_an_island_that_is_lost_or_says_nothing_is_not_waited_for_and_told_so(patience_s: float, ranks: int):
    _, (first, second) = started(ranks=ranks, patience_s=patience_s)
    began = time.monotonic()
    asked = [rank.exchange(0, b"x") for rank in first]
    half = second[0].exchange(0, b"y") if ranks > 1 else None
    if half is not None:
        second[1].lose()
    reply = get(asked[0])
    assert ([number for number, _ in reply.line["islands"]], reply.parts) == ([0], [])
    assert half is not None or 0.9 < time.monotonic() - began < 5.0
    assert get(half or second[0].exchange(0, b"y")).line["what"] == "missed"


def test_what_all_ranks_of_an_island_have_sent_counts_even_if_it_is_lost_then():
    _, (first, second) = started()
    sent = second[0].exchange(0, b"y")
    while not second[0].hub._arrived:
        time.sleep(0.01)
    second[0].lose()
    assert get(first[0].exchange(0, b"x")).parts == [b"y"]
    get(sent)


def test_an_island_that_comes_back_gets_the_state_after_the_next_round():
    hub, (first, second) = started(ranks=2)
    for rank in second:
        rank.lose()
    again = island(hub, 1, 2)
    joins = [rank.join() for rank in again]
    while len(hub._joining.get(1, {})) < 2:
        time.sleep(0.01)
    replies = [get(future) for future in [rank.exchange(0, b"x") for rank in first]]
    assert [reply.line["joiners"] for reply in replies] == [[1], [1]]
    get(first[0].state(1, b"s0"))
    assert not joins[0].done()  # all ranks get it, or none
    get(first[1].state(1, b"s1"))
    assert [(get(f).line["round"], get(f).parts) for f in joins] == [(1, [b"s0"]), (1, [b"s1"])]
    asked = [rank.exchange(1, b"z") for rank in (*first, *again)]
    assert all(len(get(future).line["islands"]) == 2 for future in asked)


def test_if_the_island_that_sends_its_state_is_lost_another_one_does():
    hub, (first, second, third) = started(islands=3)
    third[0].lose()
    again = island(hub, 2)[0]
    join = again.join()
    while 2 not in hub._joining:
        time.sleep(0.01)
    asked = [first[0].exchange(0, b"x"), second[0].exchange(0, b"y")]
    assert [get(future).line["joiners"] for future in asked] == [[2], []]
    first[0].lose()
    assert get(second[0].exchange(1, b"y")).line["joiners"] == [2]
    get(second[0].state(2, b"s"))
    assert get(join).parts == [b"s"]


def test_the_end_of_one_island_is_the_last_round_of_all():
    _, (first, second) = started()
    regular = second[0].exchange(0, b"part")
    time.sleep(0.1)
    last = first[0].exchange(0, b"all of 0", ends=True)
    assert get(regular).line["what"] == "ends"
    assert get(second[0].exchange(0, b"all of 1", ends=True)).parts == [b"all of 0"]
    assert get(last).parts == [b"all of 1"]


def ended(*, patience_s: float = 0.5, state: bytes | None = b"end") -> tuple[Hub, str, list[Rank], list[Rank]]:
    """A run that the first of two islands has ended while the second one was late; its two rounds are over."""
    hub, (first, second) = started(patience_s=patience_s)
    run = str(hub._run)
    for rank in (first[0], second[0]):
        rank.run = run
    both = [first[0].exchange(0, b"a"), second[0].exchange(0, b"b")]
    assert [get(each).line["what"] for each in both] == ["done", "done"]
    reply = get(first[0].exchange(1, b"last", ends=True))
    assert (reply.line["islands"], reply.line["joiners"]) == ([[0, 1]], [1])
    if state is not None:
        get(first[0].state(2, state))
    first[0].lose()
    return hub, run, first, second


def test_an_island_that_is_late_for_the_last_round_gets_its_contributions():
    _, _, _, second = ended(state=None)
    assert get(second[0].exchange(1, b"part")).line["what"] == "ends"
    reply = get(second[0].exchange(1, b"all", ends=True))
    assert (reply.line["what"], reply.line["islands"], reply.parts) == ("done", [[0, 1]], [b"last"])
    assert reply.line["late"]


def test_an_island_whose_connection_breaks_in_the_last_round_gets_it_again():
    hub, run, _, second = ended(state=None)
    second[0].lose()
    again = island(hub, 1)[0]
    own = {"what": "own", "joiners": [], "run": run, "round": 1, "over": True}
    assert get(again.join(run, 1, again=True)).line == own
    assert get(again.exchange(1, b"all", ends=True, run=run)).parts == [b"last"]


def test_an_island_that_lacks_more_than_the_last_round_gets_its_result():
    _, run, _, second = ended()
    assert get(second[0].exchange(0, b"old", ends=True)).line["what"] == "missed"
    reply = get(second[0].join(run, 0, again=True))
    assert (reply.line["what"], reply.line["run"], reply.line["round"], reply.parts) == ("fetch", run, 2, [b"end"])
    assert get(second[0].exchange(2, b"part")).line["what"] == "ends"
    assert get(second[0].exchange(2, b"all", ends=True)).line["islands"] == []


@pytest.mark.wide
def test_without_the_result_of_the_last_round_a_late_island_is_told_so():
    hub, run, _, second = ended(state=None)  # the one that had it was lost
    assert "island 1 after the last round of its run" in get(second[0].join(run, 0, again=True)).line["error"]
    second[0].lose()
    assert "after the last round" in get(island(hub, 1)[0].join(run, 0)).line["error"]  # from a checkpoint, alone


@pytest.mark.parametrize("state", [b"end", None])
def test_an_island_that_waits_to_be_let_in_gets_the_result_of_the_last_round(state: bytes | None):
    hub, (first, second) = started(patience_s=0.5)
    run = str(hub._run)
    second[0].lose()
    join = island(hub, 1)[0].join(run, 0)
    while 1 not in hub._joining:
        time.sleep(0.01)
    get(first[0].exchange(0, b"last", ends=True))
    if state is not None:
        get(first[0].state(1, state))
    first[0].lose()
    assert get(join).parts == [state] if state is not None else "after the last round" in get(join).line["error"]


@pytest.mark.wide
def test_all_islands_may_continue_a_run_that_has_ended():
    hub, run, _, second = ended(patience_s=3.0)
    second[0].lose()
    joins = [island(hub, number)[0].join(run, 2) for number in (0, 1)]
    assert [get(each).line for each in joins] == [{"what": "own", "joiners": [], "run": run, "round": 2}] * 2


def test_an_island_does_not_come_back_into_another_run():
    hub, _ = started()
    hub.gone(hub._seats[1, 0])
    assert "different runs" in get(island(hub, 1)[0].join("another", 3, again=True)).line["error"]


def test_what_one_rank_refuses_all_ranks_of_its_island_refuse():
    _, (first, second) = started(ranks=2)
    for each in [rank.exchange(0, b"x") for rank in (*first, *second)]:
        get(each)
    early = first[0].verdict(0, [])
    time.sleep(0.2)
    assert not early.done()
    assert get(first[1].verdict(0, [1])).line == get(early).line == {"what": "refused", "islands": [1]}
    half = second[0].verdict(0, [1])
    second[1].lose()
    assert get(half).line["what"] == "missed"
    assert get(first[0].verdict(5, [])).line["what"] == "missed"


def test_a_run_continues_from_the_newest_state_and_islands_at_the_same_round_keep_what_they_have():
    hub = Hub(3, 30.0)
    old, new, none = (island(hub, number)[0] for number in range(3))
    joins = [old.join("run", 4), new.join("run", 5), none.join()]
    assert get(joins[1]).line == {"what": "own", "joiners": [0, 2], "run": "run", "round": 5}
    get(new.state(5, b"newest"))
    assert get(joins[0]).parts == get(joins[2]).parts == [b"newest"]
    hub = Hub(2, 30.0)
    joins = [island(hub, number)[0].join("run", 7) for number in range(2)]
    assert [get(future).line for future in joins] == [{"what": "own", "joiners": [], "run": "run", "round": 7}] * 2


@pytest.mark.parametrize(
    ("ranks", "given", "words"),
    [
        ((1, 1), ({"run": "a", "round": 7}, {"run": "b", "round": 7}), "continue different runs"),
        ((2, 2), ({"every": 30}, {"every": 20}), "every is 30 on island 0 and 20 on island 1. Start all islands with"),
        ((2, 1), ({"every": 30}, {"every": 30}), "ranks is 2 on island 0 and 1 on island 1"),
    ],
    ids=["checkpoints of different runs", "other options", "another number of ranks"],
)
def test_islands_that_do_not_fit_are_refused_on_every_rank(ranks: Any, given: Any, words: str):
    hub = Hub(2, 30.0)
    joins = [rank.join(**given[number]) for number in range(2) for rank in island(hub, number, ranks[number])]
    assert all(words in get(future).line["error"] for future in joins)


def test_an_island_that_does_not_fit_to_a_run_is_refused_alone():
    hub, (first, second) = started()
    second[0].lose()
    assert "every is" in get(island(hub, 1)[0].join(every=3)).line["error"]
    assert get(first[0].exchange(0, b"x")).line["what"] == "done"


def test_islands_that_differ_later_are_all_stopped():
    _, (first, second) = started()
    asked = [first[0].exchange(0, b"x", trains="a"), second[0].exchange(0, b"x", trains="b")]
    assert all("trains is a on island 0 and b on island 1" in get(future).line["error"] for future in asked)


def test_what_is_an_islands_own_must_differ():
    same = {0: {0: {"own folder": "/runs"}}, 1: {0: {"own folder": "/runs"}}}
    assert "same folder on island 0 and island 1: /runs" in str(disagreement(same))
    assert disagreement({0: {0: {"own folder": "/a"}}, 1: {0: {"own folder": "/b"}}}) is None
    assert disagreement({0: {0: {"own folder": None}}, 1: {0: {"own folder": None}}}) is None


def test_two_islands_with_one_number_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ls_strategy.extras.islands.hub._SEAT_S", 0.5)
    hub, _ = started()
    assert "island=1 a second time" in get(island(hub, 1)[0].join()).line["error"]
    assert "island=2, but the hub was started for 2 islands" in get(island(hub, 2)[0].join()).line["error"]


@pytest.mark.wide
def test_an_island_whose_ranks_do_not_all_come_is_an_error_on_those_that_have():
    hub = Hub(1, 1.0)
    there = island(hub, 0, 3)[:2]
    for future in [rank.join() for rank in there]:
        assert "Got 2 of the ranks of island 0 in 1 s" in get(future).line["error"]
    for rank in there:
        rank.lose()
    again = [rank.join() for rank in island(hub, 0, 3)]
    assert [get(future).line["what"] for future in again] == ["own"] * 3


def test_a_lost_rank_whose_connection_looks_alive_gives_its_seat_to_the_next_one():
    hub, (_, second) = started()
    second[0].is_lost = True  # nobody has noticed
    join = island(hub, 1)[0].join()
    while 1 not in hub._joining:
        time.sleep(0.01)
    assert not join.done()


# --- server and client -----------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    made = HubServer(Hub(1, 5.0), host="127.0.0.1", port=0, secret="right")
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.close()
    thread.join()


JOIN = {"fingerprint": {}, "run": None, "round": 0, "again": False}
EXCHANGE = {"run": None, "round": 0, "ends": False, "steps": 1, "fingerprint": {}}


def client(server: HubServer, secret: str = "right") -> HubClient:
    return HubClient(("127.0.0.1", server.port), secret, {"island": 0, "rank": 0, "ranks": 1}, 1.0)


def test_bytes_pass_through_sockets(server: HubServer):
    one = client(server)
    one.connect()
    assert one.ask("join", JOIN)[0]["what"] == "own"
    line, parts = one.ask("exchange", EXCHANGE, b"x" * 100_000)
    assert (line["what"], parts, one.sent_bytes) == ("done", [], 100_000)
    one.close()


def test_a_closed_connection_is_an_island_that_is_lost(server: HubServer):
    one = client(server)
    one.connect()
    one.ask("join", JOIN)
    one.close()
    with pytest.raises(HubLostError):
        one.ask("exchange", {})
    two = client(server)
    two.connect()
    assert two.ask("join", JOIN)[0]["what"] == "own"
    two.close()


@pytest.mark.wide
def test_another_secret_is_refused_with_the_cure(server: HubServer):
    with pytest.raises(ConfigError, match=r"its secret is another one.*DiLoCo\(secret=...\)"):
        client(server, "wrong").connect()


def test_without_a_hub_the_error_has_the_command_that_starts_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lonely = HubClient(("127.0.0.1", port), "", {"island": 0, "rank": 0, "ranks": 1}, 0.2)
    with pytest.raises(StateError, match=f"no hub answers at 127.0.0.1:{port}.*ls-strategy meet --port {port}"):
        lonely.connect()


def test_a_taken_port_is_an_error_that_names_the_process(server: HubServer, capsys: pytest.CaptureFixture[str]):
    assert main(["meet", "--islands=2", f"--port={server.port}"]) == 1
    assert "--port" in (text := capsys.readouterr().err)
    assert "Address already in use; process " in text
    assert "several runs need a hub each" in text


def test_a_short_secret_is_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "secret").write_text("1234\n")
    assert main(["meet", "--islands=2", "--port=29400", f"--secret={tmp_path / 'secret'}"]) == 1
    assert "with 4 characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "where", "text"),
    [
        ([], "127.0.0.1", ""),
        (["--host=localhost"], "localhost", ""),
        (["--host=127.0.0.1", "--secret"], "127.0.0.1", ""),
        (["--host=0.0.0.0", "--secret"], "0.0.0.0", ""),
        (["--secret"], None, "Got --secret without --host"),
        (["--host=0.0.0.0"], None, "Got --host 0.0.0.0 without --secret"),
        (["--host=192.0.2.1", "--secret"], None, "Got --host 192.0.2.1 --port [0-9]+, but it cannot be listened on"),
    ],
)
def test_the_hub_listens_only_where_it_is_told(
    given: list[str], where: str | None, text: str, tmp_path: Any, monkeypatch: Any, capsys: Any
):
    """All addresses of the host, if a secret was given, before there was --host."""
    bound: list[str] = []

    def serve(server: HubServer) -> None:
        bound.append(server._server.server_address[0])
        server._server.server_close()

    monkeypatch.setattr(HubServer, "serve", serve)
    (tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
    args = [f"--secret={tmp_path / 'secret'}" if each == "--secret" else each for each in given]
    assert main(["meet", "--islands=2", f"--port={free_port()}", *args]) == (1 if where is None else 0)
    said = capsys.readouterr()
    if where is None:
        assert re.search(text, said.err)
        assert not bound
    else:
        assert bound == [socket.gethostbyname(where)]
        assert f"at {where}:" in said.out


# --- formats ---------------------------------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("form", ["exact", "bf16", "int8", "int4"])
@pytest.mark.parametrize("numel", [0, 1, 511, 512, 513, 3000])
def test_the_bytes_of_a_format_are_those_of_its_table(form: Any, numel: int):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    data = wire.encode(values, form)
    assert len(data) == wire.nbytes(numel, form)
    back = wire.decode(data, numel, form)
    assert back.shape == values.shape
    bound = {"exact": 0.0, "bf16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}[form]
    if numel:
        assert (back - values).abs().max() <= bound * values.abs().max()


def test_fp64_stays_fp64():
    values = torch.randn(7, dtype=torch.float64)
    assert torch.equal(wire.decode(wire.encode(values, "exact"), 7, "exact", torch.float64), values)


def test_equal_buffers_and_infinities_of_a_mask_stay_as_they_are_and_others_become_their_mean():
    mask = torch.tensor([0.0, -INF, INF], dtype=torch.float64)
    for value in (torch.rand(100, dtype=torch.float64), mask):
        assert torch.equal(buffers.mean([value] * 3), value)
    assert buffers.change(mask, mask).tolist() == [0.0, 0.0, 0.0]
    ends = torch.tensor([1.0, 4.0], dtype=torch.float64)
    assert buffers.mean([ends, ends + 1, ends + 2]).tolist() == [2.0, 5.0]


@pytest.mark.parametrize(
    ("first", "second", "known", "wrong"),
    [
        ([1.0, 2.0], [3.0, 4.0], None, []),
        ([1.0, NAN], [3.0, 4.0], None, [0]),
        ([1.0, 2.0], [INF, 4.0], None, [1]),
        ([-INF, 2.0], [-INF, 4.0], None, []),  # a mask
        ([-INF, 2.0], [NAN, 4.0], None, [1]),
        ([NAN, 2.0], [-INF, 4.0], None, [0]),
        ([NAN, 2.0], [NAN, 4.0], None, []),
        ([-INF, 2.0], [INF, 4.0], None, [1]),
        ([INF, 2.0], [-INF, 4.0], [-INF, 2.0], [0]),
        ([NAN, NAN], [NAN, 1.0], [1.0, 1.0], [0, 1]),
        ([NAN, 1.0], [NAN, 1.0], [1.0], []),  # of another size
    ],
)
def test_buffers_that_are_not_finite_are_found(first: Any, second: Any, known: Any, wrong: list[int]):
    values = {i: torch.tensor(each, dtype=torch.float64) for i, each in enumerate((first, second))}
    before = None if known is None else torch.tensor(known, dtype=torch.float64)
    assert sorted(buffers.problems(values, before)) == wrong


# --- options ---------------------------------------------------------------------------------------------------------


def options(**changes: Any) -> dict[str, Any]:
    return {"meet": "host:1", "island": 0, "islands": 2, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"island": 2}, "island=2 of islands=2"),
        ({"every": 10, "fragments": 3}, "every=10 with fragments=3.*such as 9"),
        ({"every": 10, "fragments": 2, "delay": 5}, "delay=5 with an exchange every 5 steps.*at most 4"),
        ({"every": 1, "delay": 1}, "at most 0"),
        ({"meet": "host"}, 'meet="host:port"'),
        ({"meet": "host:99999"}, 'meet="host:port"'),
        ({"outer_lr": 0}, "outer_lr"),
        ({"outer_momentum": 1.5}, "outer_momentum"),
        ({"wire": "fp8"}, "wire"),
        ({"mixing": -0.1}, "mixing"),
    ],
)
def test_options_that_cannot_work_are_errors_with_the_cure(changes: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        DiLoCo(**options(**changes))


def test_the_local_weights_keep_half_with_a_delay_unless_set():
    assert [DiLoCo(**options(delay=d, mixing=m)).mixing for d, m in ((0, None), (3, None), (3, 0.0))] == [0.0, 0.5, 0.0]


def test_addresses():
    assert parse_address("10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert parse_address("[::1]:80") == ("::1", 80)
