"""Where the states of one flat buffer rest between uses, and how they are reached there.

On the device and in host memory a state is a tensor, always there. On the NVMe tier it is a range of a file, brought in
chunks of `DRIVE_CHUNK` elements: `read` and `write` are for set-up and checkpoints, the step streams (`update.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ls_strategy.config import TierName
from ls_strategy.distributed.comm import BufferPool
from ls_strategy.tiers.base import Key, ResidentTier, Tier
from ls_strategy.tiers.link import Link, host_empty

T = TypeVar("T")

DRIVE_CHUNK = 1 << 20
"""Elements that are brought from a drive at a time: 4 MiB of fp32. Every tier sums norms in these portions too."""

PAGE = 4096
"""Elements, at one byte or more each."""


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut ``[start, stop)`` at multiples of `DRIVE_CHUNK`.

    >>> list(chunks(5, CHUNK + 3)) == [(5, CHUNK), (CHUNK, CHUNK + 3)]
    True
    """
    while start < stop:
        end = min((start // DRIVE_CHUNK + 1) * DRIVE_CHUNK, stop)
        yield start, end
        start = end


_KEPT = 4
"""Free buffers of one size that are kept: as many as updates under way have while backward fills the next ones."""


def gradient_buffers(device: torch.device) -> BufferPool:
    """Buffers in host memory for gradients that ``device`` copies there; zeros if they are new.

    They go round between the units.
    """
    return BufferPool(lambda numel, dtype, _: host_empty(numel, dtype, device).zero_(), kept=_KEPT)


@dataclass
class StateStorage:
    """One flat buffer's place on the tiers."""

    number: int = 0
    """Of the flat buffer, in order of the units."""

    tiers: Mapping[str, Tier] = field(default_factory=dict)
    link: Link = field(default_factory=lambda: Link(torch.device("cpu")))
    sizes: Mapping[Key, tuple[int, torch.dtype]] = field(default_factory=dict)
    """Elements and dtype of every state on the NVMe tier."""

    ring: BufferPool = field(default_factory=lambda: gradient_buffers(torch.device("cpu")))
    worker: ThreadPoolExecutor | None = None
    """One thread for what goes on beside the training thread; shared by all flat buffers."""

    def in_background(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` beside the training thread, after what came before; at once where there is no such thread."""
        if self.worker is not None:
            return self.worker.submit(work)
        done: Future[T] = Future()
        done.set_result(work())
        return done

    def key(self, name: str) -> Key:
        """Of a state of this buffer."""
        return (self.number, name)

    def resident(self, tier: TierName, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A state's tensor, ``(numel,)``, on the device or in host memory; zeros at first."""
        home = self.tiers.get(tier)
        if isinstance(home, ResidentTier) and self.key(name) in home.sizes:
            return home.tensor(self.key(name))
        if tier == "cpu":
            return host_empty(numel, dtype, self.link.device).zero_()
        return torch.zeros(numel, dtype=dtype, device=self.link.device)

    @property
    def drive(self) -> Tier:
        """The NVMe tier."""
        return self.tiers["nvme"]

    def read(self, name: str) -> Tensor:
        """A copy in host memory of a state on the NVMe tier. ``(numel,)``."""
        numel, dtype = self.sizes[self.key(name)]
        whole = torch.empty(numel, dtype=dtype)
        self.read_into(name, whole)
        return whole

    def read_into(self, name: str, out: Tensor, start: int = 0) -> None:
        """Copy elements of a state on the NVMe tier, from ``start`` on, into ``out``, 1-d, any dtype and device."""
        # A drive is read from page to page; PAGE elements are whole pages in every dtype.
        ranges = list(chunks(start // PAGE * PAGE, start + out.numel()))
        leases = [self.drive.get(self.key(name), *r) for r in ranges[:1]]
        for i, (lo, hi) in enumerate(ranges):
            if i + 1 < len(ranges):
                leases.append(self.drive.get(self.key(name), *ranges[i + 1]))
            lease = leases.pop(0)
            skip = max(start - lo, 0)
            out[lo + skip - start : hi - start].copy_(lease.wait()[skip:])
            lease.release()

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Replace ``[start, start + n)`` of a state on the NVMe tier. Returns before it is on the drive."""
        numel, _ = self.sizes[self.key(name)]
        position = start
        while position < start + values.numel():
            # Whole chunks are put as they are; a range that begins or ends inside one takes the rest from the drive.
            lo = position // DRIVE_CHUNK * DRIVE_CHUNK
            hi = min(lo + DRIVE_CHUNK, numel)
            end = min(hi, start + values.numel())
            if (position, end) == (lo, hi):
                self.drive.put(self.key(name), values[lo - start : hi - start], lo)
                position = end
                continue
            lease = self.drive.get(self.key(name), lo, hi)
            lease.wait()[position - lo : end - lo].copy_(values[position - start : end - start])
            self.drive.put(self.key(name), lease, lo)
            position = end
