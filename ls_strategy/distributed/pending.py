"""Collectives in flight on flat buffers, and how the terms of a reduction are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ls_strategy.distributed.wait_report import Entry

if TYPE_CHECKING:
    from ls_strategy.distributed.comm import Comm

SUM_CHUNK = 1 << 16
"""Elements summed at a time on the CPU: 256 KiB in fp32, so that the second operand meets a warm L2 cache."""


class Started:
    """Sends and receives in flight. Each is waited for once, because gloo never returns from a second wait.

    After an error every later wait raises it again; after an interrupt the next wait continues with what is left.
    """

    def __init__(self, works: Sequence[Any], entry: Entry | None = None) -> None:
        """``entry``: the collective in the journal, for reports of where this rank waits."""
        self._left = list(works)
        self._error: Exception | None = None
        self.entry = entry

    def wait(self) -> None:
        """Block until all are done."""
        if self._error is not None:
            raise self._error
        while self._left:
            work = self._left.pop(0)
            try:
                work.wait()
            except Exception as error:
                self._error = error
                raise


class PendingReduce:
    """A reduce-scatter in flight; `finish` writes its result."""

    def __init__(self, works: Sequence[Any], parts: Sequence[Tensor], borrowed: Sequence[Tensor], comm: Comm) -> None:
        """Keep what `finish` needs.

        Args:
            works: the operations in flight.
            parts: the terms of the sum, in rank order; NCCL delivers one part, already summed.
            borrowed: buffers to return to the pool.
            comm: the group.
        """
        self._works = works
        self._parts = parts
        self._borrowed = borrowed
        self._comm = comm

    def terms(self) -> Sequence[Tensor]:
        """Wait for the terms of the sum and return them; `release` must follow."""
        self._comm.wait(self._works)
        self._works = ()
        return self._parts

    def release(self) -> None:
        """Return the buffers of the terms to the pool."""
        self._comm.pool.give(self._borrowed)
        self._parts = self._borrowed = ()

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Write the average over ranks to ``out``, ``(shard,)``, or add it if ``accumulate``."""
        self._comm.wait(self._works)
        scale = 1.0 / self._comm.world_size
        step = SUM_CHUNK if out.device.type == "cpu" else out.numel()
        if out.numel() <= step:
            sum_(out, self._parts, scale, accumulate=accumulate)
        else:
            for lo in range(0, out.numel(), step):
                terms = [part[lo : lo + step] for part in self._parts]
                sum_(out[lo : lo + step], terms, scale, accumulate=accumulate)
        self._comm.pool.give(self._borrowed)


def sum_(out: Tensor, terms: Sequence[Tensor], scale: float, *, accumulate: bool) -> None:
    """Write the sum of ``terms`` times ``scale`` to ``out``, in the order of the terms, or add it if ``accumulate``."""
    for i, term in enumerate(terms):
        if i or accumulate:
            out.add_(term, alpha=scale)
        elif term.dtype == out.dtype:
            torch.mul(term, scale, out=out)
        else:
            out.copy_(term).mul_(scale)  # cast first: scaling in 16 bit would round twice


class PendingGather:
    """An in-place all-gather in flight."""

    def __init__(self, works: Sequence[Any], comm: Comm) -> None:
        self._works = works
        self._comm = comm

    def wait(self) -> None:
        """Block until every shard has arrived."""
        self._comm.wait(self._works)
        self._works = ()
