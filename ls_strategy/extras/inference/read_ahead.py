"""Prefetch of blocks before they are called."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ls_strategy.extras.inference.storage import StoredBlocks
from ls_strategy.tiers.base import Lease


class ReadAhead:
    """The reads in flight, in the order in which the blocks are expected to run: as they ran the last time."""

    def __init__(self, storage: StoredBlocks, sizes: Sequence[int], following: Sequence[int]) -> None:
        """``following``: for each block, the one expected after it."""
        self._storage = storage
        self._sizes = list(sizes)
        self._following = list(following)
        self._in_flight: deque[tuple[int, Lease]] = deque()
        self._last: int | None = None
        self.trace: list[tuple[str, int]] | None = None

    def take(self, index: int) -> Lease:
        """Return the lease of the block that runs now. Its read is in flight, or starts now."""
        if self._last is not None:
            self._following[self._last] = index
        self._last = index
        if not self._in_flight or self._in_flight[0][0] != index:
            self.drop()
            self._start(index)
        return self._in_flight.popleft()[1]

    def fill(self, *, running: bool) -> None:
        """Start as many reads as there are free buffers. ``running``: whether the running block occupies one."""
        assert self._last is not None
        last = self._in_flight[-1][0] if self._in_flight else self._last
        while len(self._in_flight) + running < self._storage.capacity:
            last = self._following[last]
            self._start(last)

    def drop(self) -> None:
        """Release all reads in flight."""
        while self._in_flight:
            self._in_flight.popleft()[1].release()

    def _start(self, index: int) -> None:
        if self.trace is not None:
            self.trace.append(("read", index))
        self._in_flight.append((index, self._storage.start(index, self._sizes[index])))
