"""What a rank records of its collectives and waits, and what its reports say."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from ls_strategy.distributed.watchdog import wait_report
from ls_strategy.distributed.watchdog.wait_report import Whereabouts
from tests.unit.test_failures import Store


def ranks(count: int = 2) -> list[Whereabouts]:
    return [Whereabouts(rank, count) for rank in range(count)]


@pytest.mark.parametrize(
    ("kind", "of", "batch", "equal"),
    [
        ("all_gather", "a", (0, 0, ""), True),
        ("all_reduce", "a", (0, 0, ""), False),
        ("all_gather", "b", (0, 0, ""), False),
        ("all_gather", "a", (1, 2, "training epoch"), False),
    ],
    ids=["equal", "kind", "tensor", "batch"],
)
def test_equal_operations_at_one_batch_have_one_tag(kind: str, of: str, batch: Any, equal: bool) -> None:
    first, second = ranks()
    second.batch = batch
    mine = first.journal("world", [0, 1]).enter("all_gather", "a")
    theirs = second.journal("world", [0, 1]).enter(kind, of)
    assert (theirs.tag == mine.tag) is equal
    assert mine.number == theirs.number == 1


def test_groups_are_counted_apart() -> None:
    where = Whereabouts(0, 4)
    where.journal("world", range(4)).enter("barrier")
    where.journal("model", [0, 1]).enter("barrier")
    entry = where.journal("model", [0, 1]).enter("barrier")
    assert (entry.number, entry.journal.name, entry.journal.ranks) == (2, "model", (0, 1))
    assert where.journals["world"].count == 1
    assert where.progress == 3


def test_an_era_counts_from_the_beginning() -> None:
    where = Whereabouts(0, 2)
    where.journal("world", [0, 1]).enter("barrier")
    where.left, where.batch = True, (1, 1, "training epoch")
    where.begin_era()
    assert (where.era, where.left, where.batch) == (1, False, (0, 0, ""))
    assert where.journal("world", [0, 1]).enter("barrier").number == 1


def test_a_wait_inside_of_a_wait_gives_the_outer_one_back() -> None:
    where = Whereabouts(0, 2)
    journal = where.journal("world", [0, 1])
    outer, inner = journal.enter("all_gather"), journal.enter("barrier")
    with outer:
        with inner:
            assert where.waiting is inner
        assert where.waiting is outer
    assert where.waiting is None


def test_a_wait_ends_with_an_exception_too() -> None:
    where = Whereabouts(0, 2)
    with pytest.raises(RuntimeError), where.journal("world", [0, 1]).enter("barrier"):
        raise RuntimeError("closed")
    assert where.waiting is None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(wait_report, "default_store", lambda: made)
    monkeypatch.setattr(wait_report, "world_group", lambda: object())
    return made


@pytest.mark.usefixtures("store")
def test_ranks_that_ended_the_run_are_named() -> None:
    first, second = ranks()
    second.leave()
    with first.journal("world", [0, 1]).enter("all_gather", "weights"):
        text = first.explain_ended()
    assert text.startswith("this rank has waited 0 s in all_gather of 'weights', and rank 1 has ended the run")


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("waits", [True, False], ids=["an earlier run", "a rank that does not wait"])
def test_others_are_not(waits: bool) -> None:
    first, second = ranks()
    second.leave()
    if waits:
        first.begin_era()
    with first.journal("world", [0, 1]).enter("barrier") if waits else nullcontext():
        assert first.explain_ended() == ""


def test_a_verdict_is_read_from_the_store_once(store: Store) -> None:
    where = Whereabouts(0, 2)
    assert where.read_verdict() == ""
    store.set("ls_strategy/whereabouts/verdict", "no rank can continue")
    assert where.read_verdict() == "no rank can continue"
    store.clear()
    assert where.read_verdict() == "no rank can continue"
