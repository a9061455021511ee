"""Host buffers that are taken, given back while a copy still uses them, and taken again."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from typing import NamedTuple

import torch

from ls_strategy.tiers.arrival import DONE, Arrival
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer


class _Free(NamedTuple):
    nbytes: int
    number: int
    buffer: AlignedBuffer
    busy: Arrival
    round: int


class BufferStock:
    """A pool of host buffers. A request gets the smallest free one that fits and is at most twice too large.

    Any thread may use it.
    """

    rounds_kept = 8
    """Calls of `trim` after which an unused buffer is freed."""

    busy_bytes = 64 << 20
    """`take_idle` waits for a copy only if this much memory is in the stock already."""

    def __init__(self, *, pin: torch.device | None) -> None:
        """``pin``: register the buffers with CUDA, for copies from and to this device."""
        self._pin = pin
        self._free: list[_Free] = []
        self._closed = False
        self._round = 0
        self._lock = threading.Lock()
        self.total_bytes = 0
        """Bytes of all buffers, taken or free."""
        self.taken_bytes = 0

    def take(self, nbytes: int) -> tuple[AlignedBuffer, Arrival]:
        """Return a buffer, and a copy that may still read it."""
        with self._lock:
            fitting = self._fitting(nbytes)
            return self._taken(fitting[0]) if fitting else (self._new(nbytes), DONE)

    def take_idle(self, nbytes: int) -> AlignedBuffer:
        """Return a buffer that no copy uses, a new one if the free ones are all in use.

        Waits for a copy if two free buffers would do and the stock has `busy_bytes`.
        """
        with self._lock:
            fitting = self._fitting(nbytes)
            idle = [free for free in fitting if free.busy.is_over()]
            few = len(fitting) < 2 or self.total_bytes + nbytes <= self.busy_bytes
            if not idle and few:
                return self._new(nbytes)
            buffer, busy = self._taken((idle or fitting)[0])
        busy.wait_on_host()
        return buffer

    def give(self, buffer: AlignedBuffer, busy: Arrival = DONE) -> None:
        """Return a buffer to the pool. Only ``busy`` may still read it."""
        with self._lock:
            self.taken_bytes -= buffer.nbytes
            free = _Free(buffer.nbytes, id(buffer), buffer, busy, self._round)
            if not self._closed:
                insort(self._free, free)
                return
        self._discard([free])

    def trim(self) -> None:
        """Free the buffers that the last few steps did not need. Called once per step."""
        with self._lock:
            self._round += 1
            old = [free for free in self._free if free.round < self._round - self.rounds_kept]
            self._free = [free for free in self._free if free not in old]
        self._discard(old)

    def close(self) -> None:
        """Free every buffer; those that are taken, when they are returned."""
        with self._lock:
            self._closed = True
            old, self._free = self._free, []
        self._discard(old)

    def _fitting(self, nbytes: int) -> list[_Free]:
        first = bisect_left(self._free, (nbytes, 0))
        return [free for free in self._free[first:] if free.nbytes <= max(2 * nbytes, PAGE)]

    def _taken(self, free: _Free) -> tuple[AlignedBuffer, Arrival]:
        self._free.remove(free)
        self.taken_bytes += free.nbytes
        return free.buffer, free.busy

    def _new(self, nbytes: int) -> AlignedBuffer:
        buffer = AlignedBuffer(nbytes, pin=self._pin)
        self.total_bytes += buffer.nbytes
        self.taken_bytes += buffer.nbytes
        return buffer

    def _discard(self, free: list[_Free]) -> None:
        for each in free:
            each.busy.wait_on_host()
            each.buffer.unpin()
            self.total_bytes -= each.nbytes
