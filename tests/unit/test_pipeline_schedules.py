"""Every table is complete and ends; bubbles and memory are those of the papers; orders are those of torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from ls_strategy.config.parallel import Schedule
from ls_strategy.errors import PlanError
from ls_strategy.parallel.pipeline.p2p import plan_messages
from ls_strategy.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    ScheduleKind,
    Table,
    forward_table,
    least_micro_batches,
    make_table,
    place,
    placement_of,
)
from ls_strategy.parallel.pipeline.simulate import Costs, simulate
from tests import papers
from tests.marks import few_or_all

RANKS = (1, 2, 4, 8)


def sizes() -> list[tuple[int, int]]:
    return [(p, m) for p in RANKS for m in range(p, 17)]


COSTS = (Costs(), Costs(forward=1, inputs=1.3, weights=0.6, message=0.2), Costs(message=5))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("at_a_time", few_or_all(1, len(COSTS)))
def test_every_table_is_complete_and_ends(at_a_time: int, schedule: str) -> None:
    """With a few, tables get the costs in turn."""
    numbers = {"interleaved_1f1b": (2, 3, 4), "zero_bubble": (1, 2, 3)}.get(schedule, (None,))
    for ranks, count in sizes():
        for per_rank in numbers:
            if schedule == "dualpipe_v" and count < 2 * ranks:
                with pytest.raises(PlanError, match="dualpipe_v requires at least 2 per rank"):
                    make_table(schedule, ranks, count)
                continue
            table = make_table(schedule, ranks, count, per_rank)
            for turn in range(at_a_time):
                simulate(table, COSTS[(ranks + count + (per_rank or 0) + turn) % len(COSTS)])


def test_a_schedule_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forwards, then all backwards, the last micro-batch first: its activations were stored last."""

    def rows(rank_of: tuple[int, ...], ranks: int, micro_batches: int) -> list[list[Action]]:
        forwards = [[Action("F", rank, m) for m in range(micro_batches)] for rank in range(ranks)]
        return [row + [each._replace(kind="B") for each in reversed(row)] for row in forwards]

    monkeypatch.setitem(SCHEDULES, "last first", ScheduleKind(rows, micro_batches_per_rank=2))
    table = make_table("last first", 4, 8)
    result = simulate(table)
    assert result.bubble == pytest.approx(papers.gpipe_bubble(4, 8))
    assert result.alive == (8,) * 4
    assert least_micro_batches("last first", 4) == 8
    with pytest.raises(PlanError, match="last first requires at least 2 per rank"):
        make_table("last first", 4, 7)


def test_options_name_every_schedule() -> None:
    assert get_args(get_args(Schedule)[0]) == tuple(SCHEDULES)


def test_forward_tables_end_and_wait_little() -> None:
    for ranks, count in sizes():
        for rank_of in (place(ranks, 1, "loop"), place(ranks, 3, "loop"), place(ranks, 2, "v")):
            result = simulate(forward_table(rank_of, count))
            per_rank = len(rank_of) // ranks
            assert result.length <= per_rank * (count + ranks - 1) + per_rank * ranks
            if per_rank == 1:
                assert result.bubble == pytest.approx(papers.gpipe_bubble(ranks, count))


@pytest.mark.parametrize(("ranks", "count"), sizes())
def test_bubbles_and_memory(ranks: int, count: int) -> None:
    """For equal F, I and W, p ranks, m micro-batches and v stages per rank."""
    p, m = ranks, count
    gpipe = simulate(make_table("gpipe", p, m))
    assert gpipe.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert gpipe.alive == (m,) * p
    one = simulate(make_table("1f1b", p, m))
    assert one.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert one.alive == tuple(min(p - rank, m) for rank in range(p))
    for v in (2, 3):
        interleaved = simulate(make_table("interleaved_1f1b", p, m, v))
        if m % p == 0:
            assert interleaved.bubble == pytest.approx((p - 1) / (m * v + p - 1))
        else:
            assert interleaved.bubble <= one.bubble + 1e-9
        first = -(-m // max(1, m // p))  # micro-batches in the first round
        bounds = [min(2 * (p - r - 1) + (v - 1) * first + 1, m * v) for r in range(p)]
        assert interleaved.alive == tuple(bounds)
    for v in (1, 2, 3):
        zero = simulate(make_table("zero_bubble", p, m, v))
        assert zero.bubble == pytest.approx((p - 1) / (3 * m * v + p - 1))
        if v == 1:
            assert max(zero.alive) <= min(p, m)  # no more than 1f1b on its first rank
    zbv = simulate(make_table("zbv", p, m))
    assert zbv.bubble <= one.bubble / 2 + 1e-9
    assert max(zbv.alive) <= 2 * min(p, m)  # of half the size
    if m >= 2 * p:
        dual = simulate(make_table("dualpipe_v", p, m))
        assert dual.bubble <= one.bubble / 2 + 1e-9
        assert max(dual.alive) <= 2 * p + 1


def test_v_shaped_schedules_have_their_ends_on_one_rank() -> None:
    for schedule in ("zbv", "dualpipe_v"):
        table = make_table(schedule, 4, 8)
        assert table.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
        assert table.stages_of(1) == (1, 6)
        assert (3, 3) not in plan_messages(table)


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_message_for_every_use_on_another_rank(schedule: str) -> None:
    for ranks, count in ((2, 4), (4, 8), (8, 16)):
        table = make_table(schedule, ranks, count)
        plan = plan_messages(table)
        got = {m.target: m for messages in plan.values() for m in messages}
        for rank, row in enumerate(table.rows):
            for action in row:
                kind, s, _ = action
                neighbour = s - 1 if kind == "F" else s + 1
                needed = kind != "W" and 0 <= neighbour < table.stages and table.rank_of[neighbour] != rank
                assert (action in got) == needed
        for (source, to), messages in plan.items():
            assert abs(source - to) in (1, ranks - 1)
            assert [m.sent_at for m in messages] == sorted(m.sent_at for m in messages)


# --- wrong tables -----------------------------------------------------------------------------------------------------


def changed(table: Table, rank: int, row: tuple[Action, ...]) -> Table:
    rows = list(table.rows)
    rows[rank] = row
    return Table(table.schedule, table.micro_batches, table.rank_of, tuple(rows))


def test_the_simulator_finds_what_is_wrong() -> None:
    table = make_table("1f1b", 2, 3)
    row = table.rows[1]
    with pytest.raises(PlanError, match="stage 1, micro-batch 2"):
        simulate(changed(table, 1, row[:-1]))
    with pytest.raises(PlanError, match="stage 1, micro-batch 0"):
        simulate(changed(table, 1, (*row, row[0])))
    with pytest.raises(PlanError, match="0F0 is on rank 1"):
        simulate(changed(table, 1, (*row, Action("F", 0, 0))))
    with pytest.raises(PlanError, match="1F9 belongs to no"):
        simulate(changed(table, 1, (*row, Action("F", 1, 9))))
    with pytest.raises(PlanError, match="never ends"):
        simulate(changed(table, 1, tuple(reversed(row))))
    forwards_first = tuple(sorted(row, key=lambda action: (action.kind == "B", action.micro_batch)))
    with pytest.raises(PlanError, match="never ends: 0B0, 1F2"):  # each waits for what the other does later
        simulate(changed(table, 1, forwards_first))


def test_options_are_checked() -> None:
    with pytest.raises(PlanError, match=r"schedule='dapple'.*gpipe"):
        make_table("dapple", 2, 4)
    with pytest.raises(PlanError, match=r"stages_per_rank=2.*1f1b requires 1\."):
        make_table("1f1b", 2, 4, 2)
    with pytest.raises(PlanError, match=r"stages_per_rank=1.*2 or more"):
        make_table("interleaved_1f1b", 2, 4, 1)
    with pytest.raises(PlanError, match="at least 1"):
        make_table("1f1b", 2, 0)


# --- against torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "theirs", "per_rank"),
    [
        ("gpipe", "GPipe", 1),
        ("1f1b", "1F1B", 1),
        ("interleaved_1f1b", "Interleaved1F1B", 2),
        ("interleaved_1f1b", "Interleaved1F1B", 3),
        ("dualpipe_v", "DualPipeV", 2),
    ],
)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_the_order_is_that_of_torch(
    schedule: str, theirs: str, per_rank: int, ranks: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or the import sets it, for good
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = visualizer.get_schedule_ops(theirs, ranks, count, per_rank)
    pattern = re.compile(r"(\d+)([FBIW])(\d+)")
    if theirs == "1F1B":
        rows = rows[:-1]  # torch's drawing, not its pipeline, counts the micro-batches of the last rank from 1
    for rank, row in enumerate(rows):
        names = [f"{s}{k}{m}" for action in row if action is not None for s, k, m in pattern.findall(str(action))]
        assert names == [str(action) for action in make_table(schedule, ranks, count, per_rank).rows[rank]]


def test_placement() -> None:
    assert place(3, 2, "loop") == (0, 1, 2, 0, 1, 2)
    assert place(3, 2, "v") == (0, 1, 2, 2, 1, 0)
    assert {placement_of(s) for s in SCHEDULES} == {"loop", "v"}
