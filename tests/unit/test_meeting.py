"""Ranks meet if all of them come; nobody waits for ever for one that does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ls_strategy.distributed import meeting
from ls_strategy.distributed.meeting import Meeting


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run one function per rank, on threads that share a store."""
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "default_store", lambda: store)

    def run(*bodies: Callable[[Meeting], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            here = Meeting(SimpleNamespace(rank=rank, world_size=len(bodies), failures=SimpleNamespace(round=0)))  # type: ignore[arg-type]
            try:
                return bodies[rank](here)
            finally:
                here.leave()

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(one, range(len(bodies))))

    return run


def test_ranks_that_come_with_the_same_text_meet(ranks: Callable[..., list[Any]]) -> None:
    def late(here: Meeting) -> list[bool]:
        time.sleep(0.3)
        return [here.is_complete("a"), here.is_complete("b")]

    assert ranks(lambda here: [here.is_complete("a"), here.is_complete("b")], late) == [[True, True]] * 2
    assert ranks(*[lambda here: here.is_complete("again")] * 2) == [True] * 2


def test_ranks_that_want_different_things_do_not_meet(ranks: Callable[..., list[Any]]) -> None:
    def two(first: str) -> Callable[[Meeting], list[bool]]:
        return lambda here: [here.is_complete(first), here.is_complete("same")]

    begin = time.monotonic()
    assert ranks(two("a"), two("a"), two("b")) == [[False, True]] * 3
    assert time.monotonic() - begin < meeting.PATIENCE_S / 2


def test_a_rank_that_has_left_is_not_waited_for(ranks: Callable[..., list[Any]]) -> None:
    begin = time.monotonic()
    more = ranks(lambda here: [here.is_complete("a"), here.is_complete("b")], lambda here: here.is_complete("a"))
    assert more == [[True, False], True]
    assert ranks(lambda here: here.is_complete("a"), lambda here: None) == [False, None]
    assert time.monotonic() - begin < meeting.PATIENCE_S / 2


def test_a_rank_that_waits_for_another_one_is_waited_for_only_so_long(
    ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.2)
    done = threading.Event()

    def first(here: Meeting) -> bool:
        answer = here.is_complete("a")
        done.set()
        return answer

    def after_it(here: Meeting) -> bool:
        assert done.wait(20)
        return here.is_complete("a")

    assert ranks(first, after_it) == [False, False], "the decision was made before the second rank came"
