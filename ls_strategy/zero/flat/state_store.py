"""The states of one flat buffer by name, on whatever tier each of them is.

On the device and in host memory, a state is a resident tensor. On the NVMe tier it is a range of a file, accessed in
chunks of `NVME_CHUNK` elements. To callers that is the same::

    create                 store the first values; from then on the state has them
    view, read, read_into  get elements: a view where that is possible, else a copy in host memory
    write                  replace elements
    get, put               the same for a chunk of what is not in memory, beside other work (`update.py`)
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


def placeholder_of(numel: int, dtype: torch.dtype) -> Tensor:
    """Return what stands for a state that is not in memory, ``(numel,)``: one element, that reads as NaN if it can."""
    return torch.full((1,), float("nan") if dtype.is_floating_point else 0, dtype=dtype).expand(numel)


@dataclass
class StateStore:
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
    _here: dict[str, Tensor] = field(default_factory=dict)
    """What `create` has stored in memory."""

    # states in full --------------------------------------------------------------------------------------------------

    def create(self, name: str, tier: TierName, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Store a state's first values, ``(numel,)``. Return its tensor, or what stands for it if it is not in memory.

        On the device, these are ``values`` themselves if they are of this dtype.
        """
        if tier == "device":
            self._here[name] = values.to(dtype)
        elif self.is_resident(name):
            self._here[name] = self.resident(tier, name, values.numel(), dtype).copy_(values)
        else:
            self._here.pop(name, None)
            self.write(name, 0, values.to(dtype))
        return self._here.get(name, placeholder_of(values.numel(), dtype))

    def in_memory(self, name: str) -> Tensor | None:
        """Return the tensor of a state that was created, ``(numel,)``; None if there is none in memory."""
        return self._here.get(name)

    def keep(self, before: StateStore) -> None:
        """Go on with what another store of the same buffer has in memory."""
        self._here = before._here

    # in the background -----------------------------------------------------------------------------------------------

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

    # elements --------------------------------------------------------------------------------------------------------

    def view(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` as a view, or as a copy in host memory. Any thread may call this."""
        here = self._here.get(name)
        if here is not None:
            return here.detach()[start:stop]
        out = torch.empty(stop - start, dtype=self.tiers[self._tier_of(name)].sizes[self.key(name)][1])
        self.read_into(name, out, start)
        return out

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
        if tier != "device":
            return host_empty(numel, dtype, self.link.device).zero_()
        return torch.zeros(numel, dtype=dtype, device=self.link.device)

    def drop(self, name: str) -> None:
        """Free a state's memory on a resident tier: another store has it now."""
        home = self.tiers.get(self._tier_of(name))
        if isinstance(home, ResidentTier):
            home.drop(self.key(name))

    def read(self, name: str) -> Tensor:
        """Return a state, ``(numel,)``: the tensor itself, or a copy in host memory."""
        here = self._here.get(name)
        if here is not None:
            return here
        numel, dtype = self.tiers[self._tier_of(name)].sizes[self.key(name)]
        full = torch.empty(numel, dtype=dtype)
        self.read_into(name, full)
        return full

    def read_into(self, name: str, out: Tensor, start: int = 0) -> None:
        """Copy elements from ``start`` on into ``out``: 1-d, any dtype and device."""
        here = self._here.get(name)
        if here is not None:
            out.copy_(here.detach()[start : start + out.numel()])
            return
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
        """Start copying a state into ``out``: 1-d and contiguous, of any dtype.

        On an accelerator, the copies run on a stream of their own, and the last one may be in flight.

        Args:
            name: of the state.
            out: written when the device has passed ``after``.
            after: from ``link.mark``.
        """
        here = self._here.get(name)
        if here is not None:
            return self._chunk_to_device(out, here, after)
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
        """Replace ``[start, start + n)``, unless ``values`` is what `view` returned. May return before it is stored."""
        here = self._here.get(name)
        if here is not None:
            target = here.detach()[start : start + values.numel()]
            if target.data_ptr() != values.data_ptr() or target.device != values.device:
                target.copy_(values)
            return
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
