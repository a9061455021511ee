"""Which blocks are read before they are called."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ls_strategy.inference.storage import Resting
from ls_strategy.tiers.base import Lease


class ReadAhead:
    """The blocks that are on their way, in the order in which they are expected to run: as they ran the last time."""

    def __init__(self, resting: Resting, sizes: Sequence[int], following: Sequence[int]) -> None:
        """``following``: of each block, the one that is expected after it."""
        self._resting = resting
        self._sizes = list(sizes)
        self._following = list(following)
        self._under_way: deque[tuple[int, Lease]] = deque()
        self._last: int | None = None
        self.trace: list[tuple[str, int]] | None = None

    def take(self, index: int) -> Lease:
        """The block that runs now, under way or read from now on."""
        if self._last is not None:
            self._following[self._last] = index
        self._last = index
        if not self._under_way or self._under_way[0][0] != index:
            self.drop()
            self._start(index)
        return self._under_way.popleft()[1]

    def fill(self, *, running: bool) -> None:
        """Start as many reads as there are free buffers. ``running``: the block that was taken is in one."""
        assert self._last is not None
        last = self._under_way[-1][0] if self._under_way else self._last
        while len(self._under_way) + running < self._resting.capacity:
            last = self._following[last]
            self._start(last)

    def drop(self) -> None:
        """Forget what is under way."""
        while self._under_way:
            self._under_way.popleft()[1].release()

    def _start(self, index: int) -> None:
        if self.trace is not None:
            self.trace.append(("read", index))
        self._under_way.append((index, self._resting.start(index, self._sizes[index])))
