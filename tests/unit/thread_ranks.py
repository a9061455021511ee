"""Ranks of an axis as threads of one process: collectives of plain tensors without process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ls_strategy._torch import fake_tensors
from ls_strategy.distributed.axis import Axis, sum_in_order

T = TypeVar("T")


class Rank(Axis):
    """One of several ranks, without communication."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("test")
        self.rank, self.size = rank, size


class ThreadAxis(Axis):
    """One rank. Every collective gives all ranks' arguments to each of them."""

    def __init__(self, name: str, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(name)
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier
        self.calls: list[str] = []

    def _all(self, kind: str, value: Any) -> list[Any]:
        self.calls.append(kind)
        self._slots[self.rank] = value
        self._barrier.wait(20)
        result = list(self._slots)
        self._barrier.wait(20)
        return result

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return sum_in_order(self._all("all_reduce", tensor.clone()))

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        return torch.cat(self._all("all_gather", tensor.clone()), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        full = sum_in_order(self._all("reduce_scatter", tensor.clone()))
        return full.chunk(self.size, dim)[self.rank].contiguous()

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        return [sent[self.rank] for sent in self._all("all_to_all", [part.clone() for part in parts])]

    def start_all_to_all(self, parts: Sequence[Tensor], received: Sequence[Tensor], kind: str = "all_to_all") -> Any:
        arrived = [sent[self.rank] for sent in self._all(kind, [part.clone() for part in parts])]
        for target, part in zip(received, arrived, strict=True):
            target.copy_(part)
        return SimpleNamespace(wait=lambda: None)

    def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._all("broadcast", tensor.clone())[source])


def on_ranks(size: int, body: Callable[[ThreadAxis], T], name: str = "tensor") -> list[T]:
    """Run ``body`` on ``size`` ranks; their results by rank. The first error of a rank is raised."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> T:
        try:
            return body(ThreadAxis(name, rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    # Without GPUs, torch 2.11 gives the process a stand-in for them that belongs to the first thread with fake tensors,
    # and frees it when that thread ends: a compiler's thread, say. The next plan would then crash the process.
    with fake_tensors():
        pass
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [e for e in (future.exception() for future in futures) if e is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
