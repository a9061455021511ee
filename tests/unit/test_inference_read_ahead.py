"""Which blocks are read before they are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ls_strategy.extras.inference.stream import ReadAhead


class Storage:
    """Notes which blocks are read, and which reads are released unused."""

    def __init__(self, capacity: int = 2) -> None:
        self.capacity = capacity
        self.started: list[int] = []
        self.released: list[int] = []

    def start(self, index: int, nbytes: int) -> Any:
        assert nbytes == 10 * index
        self.started.append(index)
        return SimpleNamespace(index=index, release=lambda: self.released.append(index))


def make(capacity: int = 2, blocks: int = 4) -> tuple[ReadAhead, Any]:
    storage: Any = Storage(capacity)
    return ReadAhead(storage, [10 * i for i in range(blocks)], [(i + 1) % blocks for i in range(blocks)]), storage


def run(ahead: ReadAhead, index: int) -> None:
    lease: Any = ahead.take(index)
    assert lease.index == index
    ahead.fill(running=True)
    ahead.fill(running=False)


@pytest.mark.parametrize(("capacity", "started"), [(2, [0, 1]), (4, [0, 1, 2, 3])])
def test_blocks_are_read_while_one_runs_into_all_buffers(capacity: int, started: list[int]) -> None:
    ahead, storage = make(capacity)
    ahead.take(0)
    ahead.fill(running=True)
    assert storage.started == started


def test_blocks_in_the_expected_order_are_read_once() -> None:
    """Also into the free buffer of a finished block. The trace names every read."""
    ahead, storage = make()
    ahead.trace = []
    run(ahead, 0)
    assert storage.started == [0, 1, 2]
    assert ahead.trace == [("read", 0), ("read", 1), ("read", 2)]
    for index in (1, 2, 3, 0, 1):
        run(ahead, index)
    assert storage.started[:6] == [0, 1, 2, 3, 0, 1]
    assert storage.released == []


def test_an_unexpected_block_releases_the_reads_in_flight() -> None:
    ahead, storage = make()
    run(ahead, 0)
    run(ahead, 3)
    assert storage.released == [1, 2]
    assert storage.started[:4] == [0, 1, 2, 3]


def test_the_order_of_the_last_pass_is_expected_again() -> None:
    ahead, storage = make()
    for index in (0, 2, 0, 2):  # blocks 1 and 3 are skipped
        run(ahead, index)
    del storage.released[:]
    run(ahead, 0)
    assert storage.released == []
