"""Partitioned activations, with two threads as the ranks of an axis."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.activations.partition import ActivationPartition, ShardBuffer
from ls_strategy.errors import PlanError

CPU = torch.device("cpu")


class ThreadAxis:
    """An axis of two ranks in one process."""

    name, size = "tensor", 2

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.slots, self.barrier = rank, slots, barrier
        self.gathers = 0

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.gathers += 1
        self.slots[self.rank] = tensor
        self.barrier.wait()
        result = torch.cat(self.slots, dim)
        self.barrier.wait()
        return result


def on_two_ranks(work: Callable[[ActivationPartition], Any]) -> list[Any]:
    slots, barrier = [None, None], threading.Barrier(2, timeout=10)
    partitions = [ActivationPartition(ThreadAxis(r, slots, barrier), CPU) for r in (0, 1)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, partitions))


@pytest.mark.parametrize("numel", [1, 7, 8])
def test_a_region_comes_back(numel: int) -> None:
    region = torch.arange(float(numel))
    results = on_two_ranks(lambda p: p.load(p.keep(region)))
    assert all(torch.equal(result, region) for result in results)


def test_each_rank_keeps_half() -> None:
    def bytes_of(p: ActivationPartition) -> tuple[int, int]:
        p.keep(torch.ones(7))
        return p.bytes_full, p.bytes_kept

    assert on_two_ranks(bytes_of) == [(28, 16), (28, 16)]


def test_the_latest_region_is_not_gathered_twice() -> None:
    def gathers(p: ActivationPartition) -> int:
        kept = p.keep(torch.ones(8))
        before = p.axis.gathers  # type: ignore[attr-defined]
        p.load(kept)
        p.load(kept)
        return p.axis.gathers - before  # type: ignore[attr-defined]

    assert on_two_ranks(gathers) == [1, 1]


@pytest.mark.parametrize("other", [[1.0, 2.0, 4.0], [2.0, 1.0, 3.0]])
def test_regions_that_differ_between_ranks_are_refused(other: list[float]) -> None:
    def keep(p: ActivationPartition) -> None:
        p.keep(torch.tensor([[1.0, 2.0, 3.0], other][p.axis.rank]))

    with pytest.raises(PlanError, match="differs between the 2 ranks of axis 'tensor'"):
        on_two_ranks(keep)


# the buffer ----------------------------------------------------------------------------------------------------------


def grown(nbytes: int) -> ShardBuffer:
    buffer = ShardBuffer(CPU)
    buffer.take(nbytes, torch.uint8)
    buffer.give()
    return buffer


def test_the_buffer_grows_when_it_is_empty() -> None:
    buffer = ShardBuffer(CPU)
    buffer.take(512, torch.uint8)
    buffer.take(1, torch.float32)
    buffer.give()
    assert buffer.nbytes == 0
    buffer.give()
    assert buffer.nbytes == 1024  # aligned to 512 bytes


def test_shards_lie_one_after_the_other() -> None:
    buffer = grown(1024)
    first, second = buffer.take(1, torch.float32), buffer.take(2, torch.int64)
    assert second.data_ptr() - first.data_ptr() == 512
    assert (second.shape, second.dtype) == ((2,), torch.int64)


def test_an_empty_buffer_starts_at_the_front() -> None:
    buffer = grown(512)
    first = buffer.take(1, torch.float32).data_ptr()
    buffer.give()
    assert buffer.take(1, torch.float32).data_ptr() == first


def test_what_does_not_fit_is_allocated_separately() -> None:
    buffer = grown(512)
    inside = buffer.take(512, torch.uint8)
    outside = buffer.take(8, torch.float64)
    outside.fill_(1.0)
    inside.zero_()
    assert outside.sum().item() == 8.0
