"""Buffers that are used again, also while copies to the host still read them."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ls_strategy._torch import allow_views
from ls_strategy.distributed.gather_memory import GatherMemory

Places: TypeAlias = Sequence[tuple[Sequence[int], Sequence[int], int]]
"""Shape, stride and offset of each view of a buffer."""

LATE_BYTES = 64 << 20
"""Bytes of a pool that copies to the host may still read. With more, `BufferPool.take` waits for the oldest copy."""


class Copy(Protocol):
    """A copy in flight."""

    def is_over(self) -> bool:
        """Return whether the copy is done. Does not wait."""
        ...

    def wait_on_host(self) -> None:
        """Block this thread until the copy is done."""


class BufferPool:
    """Reuses receive and staging buffers: a new allocation of 64 MiB costs its page faults every time."""

    def __init__(
        self,
        make: Callable[[int, torch.dtype, torch.device], Tensor] = lambda n, dtype, device: torch.empty(
            n, dtype=dtype, device=device
        ),
        *,
        kept: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            make: allocates a new buffer.
            kept: the maximum number of free buffers per size. None: no maximum.
        """
        self._make = make
        self._kept = kept
        self._free: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        self._cuts: dict[int, tuple[Places, list[Tensor]]] = {}
        """By ``id`` of a free buffer: places and views, see `give`."""
        self._late: deque[tuple[Copy, Tensor]] = deque()
        self._late_bytes = 0
        self._lock = threading.Lock()
        self.bytes = 0
        self.gathers = GatherMemory()
        """Where `allocate` takes memory of accelerators."""

    def allocate(self, buffer: Tensor) -> None:
        """Give a gathered buffer memory, if it has none."""
        storage = buffer.untyped_storage()
        if storage.nbytes() == 0:
            allow_views(storage._cdata)
            if buffer.is_cpu:
                storage.resize_(buffer.nbytes)
            else:
                self.gathers.allocate(buffer)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of exactly this size, with arbitrary contents."""
        return self.take_cut(numel, dtype, device, ())[0]

    def take_cut(
        self, numel: int, dtype: torch.dtype, device: torch.device, places: Places
    ) -> tuple[Tensor, list[Tensor]]:
        """Return a buffer as `take` does, and a view for each of ``places``."""
        free = self._free[(numel, dtype, device)]
        if self._late:
            self._take_back(0 if free else numel * dtype.itemsize)
        if free:
            buffer = free.pop()
            known = self._cuts.pop(id(buffer), None)
            if known is not None and known[0] == places:
                return buffer, known[1]
        else:
            buffer = self._make(numel, dtype, device)
            self.bytes += buffer.numel() * buffer.element_size()
        return buffer, [buffer.as_strided(*place) for place in places]

    def give(self, buffers: Iterable[Tensor], cut: tuple[Places, list[Tensor]] | None = None) -> None:
        """Take back buffers that are no longer read or written.

        ``cut``: views of the one buffer that is given, which nobody else has, so that the next `take_cut` makes none.
        """
        for buffer in buffers:
            free = self._free[(buffer.numel(), buffer.dtype, buffer.device)]
            if self._kept is None or len(free) < self._kept:
                if cut is not None:
                    self._cuts[id(buffer)] = cut
                free.append(buffer)

    def give_late(self, buffer: Tensor, copy: Copy) -> None:
        """Take back a buffer that ``copy`` still reads, when it is over."""
        with self._lock:
            self._late.append((copy, buffer))
            self._late_bytes += buffer.nbytes

    def clear(self) -> None:
        """Free the buffers that nobody has taken, and what gathers keep. Waits for copies that still read them."""
        with self._lock:
            late, self._late, self._late_bytes = list(self._late), deque(), 0
        for copy, buffer in late:
            copy.wait_on_host()
            self.give([buffer])
        for free in self._free.values():
            self.bytes -= sum(buffer.nbytes for buffer in free)
            free.clear()
        self._cuts.clear()
        self.gathers.clear()

    def _take_back(self, nbytes: int) -> None:
        """Take back what copies have read, and wait for the oldest ones if ``nbytes`` more would be too much."""
        with self._lock:
            while self._late:
                copy, buffer = self._late[0]
                if not copy.is_over():
                    if not nbytes or self._late_bytes + nbytes <= LATE_BYTES:
                        break
                    copy.wait_on_host()
                self._late.popleft()
                self._late_bytes -= buffer.nbytes
                self.give([buffer])
