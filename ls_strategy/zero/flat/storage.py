"""Storage of the states of one flat buffer between uses, and access to them.

On the device and in host memory, a state is a resident tensor. On the NVMe tier it is a range of a file, accessed in
chunks of `NVME_CHUNK` elements. `read` and `write` are for set-up and checkpoints; the step streams (`update.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.config import TierName
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.ops.norm import CHUNK
from ls_strategy.tiers import CHUNK_BYTES, TIERS
from ls_strategy.tiers.arrival import DONE, Arrival
from ls_strategy.tiers.base import Key, Lease, ResidentTier, Tier
from ls_strategy.tiers.buffers import PAGE
from ls_strategy.tiers.link import Link, host_empty

T = TypeVar("T")

NVME_CHUNK = CHUNK
"""Elements per transfer of a tier with leases: of those whose sum of squares is a term of the sum over all."""

assert NVME_CHUNK * torch.float32.itemsize == CHUNK_BYTES


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split ``[start, stop)`` at multiples of `NVME_CHUNK`.

    >>> list(chunks(5, NVME_CHUNK + 3)) == [(5, NVME_CHUNK), (NVME_CHUNK, NVME_CHUNK + 3)]
    True
    """
    while start < stop:
        end = min((start // NVME_CHUNK + 1) * NVME_CHUNK, stop)
        yield start, end
        start = end


_KEPT = 4
"""Free buffers that are kept per size: as many as updates in flight use while backward fills the next ones."""


def gradient_buffers(device: torch.device) -> BufferPool:
    """Return a pool of host buffers for gradients of ``device``, shared by all units. New buffers are zero."""
    return BufferPool(lambda numel, dtype, _: host_empty(numel, dtype, device).zero_(), kept=_KEPT)


@dataclass
class StateStorage:
    """Access to the states of one flat buffer on its tiers."""

    number: int = 0
    """Number of the flat buffer, in order of the units."""

    tiers: Mapping[TierName, Tier] = field(default_factory=dict)
    link: Link = field(default_factory=lambda: Link(torch.device("cpu")))
    ring: BufferPool = field(default_factory=lambda: gradient_buffers(torch.device("cpu")))
    worker: ThreadPoolExecutor | None = None
    """One background thread, shared by all flat buffers."""

    writes: deque[Future[None]] = field(default_factory=deque)
    """`write_behind` of all flat buffers, the oldest first."""

    _pending: dict[str, Future[None]] = field(default_factory=dict)

    def write_behind(self, name: str, write: Callable[[Callable[[Tensor, int], None]], None]) -> Future[None]:
        """Run ``write(put)`` on the background thread. Whoever gets or puts this state waits for it.

        Waits itself if two others are not over yet: what they write is in memory until then.
        """
        while len(self.writes) > 1:
            self.writes.popleft().result()
        future = self.in_background(lambda: write(lambda value, start: self._put(name, value, start)))
        self.writes.append(future)
        self._pending[name] = future
        return future

    def give_up(self) -> None:
        """Forget what `write_behind` has in flight, which has failed."""
        self._pending.clear()
        self.writes.clear()

    def in_background(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` on the background thread, in order of submission; at once without such a thread."""
        if self.worker is not None:
            return self.worker.submit(work)
        done: Future[T] = Future()
        done.set_result(work())
        return done

    def key(self, name: str) -> Key:
        """Return the tiers' key of a state of this buffer."""
        return (self.number, name)

    def _tier_of(self, name: str) -> TierName:
        for tier_name, tier in self.tiers.items():
            if self.key(name) in tier.sizes:
                return tier_name
        return "device"

    def is_resident(self, name: str) -> bool:
        """Return whether a state is a tensor in memory. Otherwise `get`, `put`, `read` and `write` access it."""
        return TIERS[self._tier_of(name)].resident

    def get(self, name: str, start: int, stop: int) -> Lease:
        """Start loading elements ``[start, stop)`` of a state that is not resident; see `Tier.get`."""
        self._settle(name)
        return self.tiers[self._tier_of(name)].get(self.key(name), start, stop)

    def put(self, name: str, value: Tensor | Lease, start: int) -> None:
        """Store ``value`` in a state that is not resident, from element ``start`` on; see `Tier.put`."""
        self._settle(name)
        self._put(name, value, start)

    def _put(self, name: str, value: Tensor | Lease, start: int) -> None:
        self.tiers[self._tier_of(name)].put(self.key(name), value, start)

    def _settle(self, name: str) -> None:
        """Wait for `write_behind` of a state: any thread."""
        pending = self._pending.get(name)
        if pending is not None:
            pending.result()
            if self._pending.get(name) is pending:
                self._pending.pop(name, None)

    def resident(self, tier: TierName, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a state's tensor, ``(numel,)``, on the device or in host memory. A new state is zero."""
        home = self.tiers.get(tier)
        if isinstance(home, ResidentTier) and self.key(name) in home.sizes:
            return home.tensor(self.key(name))
        if tier == "cpu":
            return host_empty(numel, dtype, self.link.device).zero_()
        return torch.zeros(numel, dtype=dtype, device=self.link.device)

    def drop(self, name: str) -> None:
        """Free a state's memory on a resident tier: it is stored elsewhere now."""
        home = self.tiers.get(self._tier_of(name))
        if isinstance(home, ResidentTier):
            home.drop(self.key(name))

    def read(self, name: str) -> Tensor:
        """Return a copy in host memory of a state that is not resident, ``(numel,)``."""
        numel, dtype = self.tiers[self._tier_of(name)].sizes[self.key(name)]
        full = torch.empty(numel, dtype=dtype)
        self.read_into(name, full)
        return full

    def read_into(self, name: str, out: Tensor, start: int = 0) -> None:
        """Copy elements of a state that is not resident, from ``start`` on, into ``out``: 1-d, any dtype and device."""
        # Reads begin at a page; PAGE elements are full pages in every dtype.
        ranges = list(chunks(start // PAGE * PAGE, start + out.numel()))
        leases = [self.get(name, *r) for r in ranges[:1]]
        for i, (lo, hi) in enumerate(ranges):
            if i + 1 < len(ranges):
                leases.append(self.get(name, *ranges[i + 1]))
            lease = leases.pop(0)
            skip = max(start - lo, 0)
            out[lo + skip - start : hi - start].copy_(lease.wait()[skip:])
            lease.release()

    def read_to_device(self, name: str, out: Tensor, after: Any) -> Arrival:
        """Start copying a state that is not resident into ``out``: 1-d and contiguous, of any dtype.

        Returns when the values have arrived. On an accelerator, the copies run on a stream of their own.

        Args:
            name: of the state.
            out: written when the device has passed ``after``.
            after: from ``link.mark``.
        """
        if dev.is_host(out.device) or not out.numel():
            self.read_into(name, out)
            return DONE
        ranges = list(chunks(0, out.numel()))
        reading = self.get(name, *ranges[0])
        arrival = DONE
        for i, (lo, hi) in enumerate(ranges):
            lease = reading
            if i + 1 < len(ranges):  # the tier has two buffers for this: one is read while the other is copied
                reading = self.get(name, *ranges[i + 1])
            arrival = self._chunk_to_device(out[lo:hi], lease.wait(), after)
            arrival.wait_on_host()
            lease.release()
        return arrival

    def _chunk_to_device(self, out: Tensor, source: Tensor, after: Any) -> Arrival:
        if source.dtype == out.dtype:
            return self.link.to_device(out, source, after)
        # Cast on the host, so that half the bytes cross the bus.
        return self.link.staged_to_device(out, lambda host: host.copy_(source), after)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Replace ``[start, start + n)`` of a state that is not resident. May return before it is stored."""
        numel, _ = self.tiers[self._tier_of(name)].sizes[self.key(name)]
        for begin, end in chunks(start, start + values.numel()):
            # Full chunks are put directly. A range that begins or ends inside a chunk is merged with what is stored.
            lo = begin // NVME_CHUNK * NVME_CHUNK
            hi = min(lo + NVME_CHUNK, numel)
            part = values[begin - start : end - start]
            if (begin, end) == (lo, hi):
                self.put(name, part, lo)
            else:
                lease = self.get(name, lo, hi)
                lease.wait()[begin - lo : end - lo].copy_(part)
                self.put(name, lease, lo)
