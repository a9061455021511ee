"""The memory of gathered units on an accelerator: with ``LS_STRATEGY_GATHER_POOL=1`` a pool, in which addresses repeat.

::

    step n      root       A            |  the root's memory is taken for the whole step,
                blocks     B C B C B C  |  that of as many blocks as are gathered at once in turn: prefetch depth + 1,
                                        |  and one more where backward begins a block before it releases another
    step n + 1  root       A            |  A, B and C are free again, so the same order of sizes leads to the same
                blocks     B C B C B C  |  addresses

The one invariant: a gathered buffer lives in its own storage from `GatherMemory.allocate` to ``resize_(0)``, as it
would without the pool; only the place from which the storage gets its memory differs. So nothing that protects a
released buffer changes: autograd and user code have views of that storage, never of the pool, and memory is used again
in the order of the stream that it was allocated for, without events and without ``record_stream``.

Why not a list of persistent buffers to which parameters point in turn? Autograd saves views of the storage that a
forward has read (a transposed weight, for example), and backward reads them once the unit is gathered again. With
storages that units share, such a view would silently show another unit's weights. `torch` cannot exchange the memory
below a storage, so a pool of the allocator is the place where buffers persist: it keeps what was allocated once, and
takes the smallest free block that fits, at the lowest address. Between two steps all of it is free, so every step of
the same gathers finds it in the same state. A view that user code keeps moves addresses only while it exists.

What it costs: memory that gathers have used at their peak stays reserved for gathers. The peak of what is allocated is
the same as without the pool. Other allocations take idle blocks of the pool before they fail (``use_on_oom``), and a
gather that finds no memory in the pool is allocated like any other tensor. Torch does not lend idle blocks of
expandable segments, so with these there is no pool.

Pools are not registered with NCCL (``ProcessGroupNCCL.register_mem_pool``). NCCL leaves undefined what a collective
does if some ranks pass registered memory and others do not, and each rank decides alone whether a gather fits into its
pool. Torch would also register what a pool takes later inside of the allocation, where an error would stop one rank.

It has to be asked for, because no GPU has run this yet. Tests run fits on a simulated device, and repeat what these
allocate in torch's own allocator.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor

from ls_strategy import device as dev

_ON = "LS_STRATEGY_GATHER_POOL"


class GatherMemory:
    """Allocates gathered buffers of one process group, from one pool per accelerator."""

    def __init__(self) -> None:
        """Start without pools: a device gets one with its first buffer."""
        self._pools: dict[torch.device, Any] = {}
        self._lock = threading.Lock()  # torch refuses two threads that allocate in one pool

    def allocate(self, buffer: Tensor) -> None:
        """Give a buffer of an accelerator memory.

        Raises:
            torch.OutOfMemoryError: there is none, neither in the pool nor elsewhere.
        """
        if not self._allocate_in_pool(buffer):
            buffer.untyped_storage().resize_(buffer.nbytes)

    def _allocate_in_pool(self, buffer: Tensor) -> bool:
        """Return whether there was memory in the pool, or for it."""
        # Another thread, or what a signal has interrupted, may be here.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if buffer.device not in self._pools:
                wanted = os.environ.get(_ON) == "1"
                self._pools[buffer.device] = dev.new_memory_pool(buffer.device) if wanted else None
            pool = self._pools[buffer.device]
            if pool is None or dev.is_capturing(buffer.device):  # a graph owns what is allocated while it is captured
                return False
            if _fits(buffer, pool):
                return True
            # For a pool, torch does not return to the device what it keeps for other tensors.
            dev.free_cached(buffer.device)
            return _fits(buffer, pool)
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Return memory that no buffer uses to the device. The next buffer begins a new pool."""
        with self._lock:
            self._pools.clear()


def _fits(buffer: Tensor, pool: Any) -> bool:
    try:
        with dev.allocating_in(pool, buffer.device):
            buffer.untyped_storage().resize_(buffer.nbytes)
    except torch.OutOfMemoryError:
        return False
    return True
