"""Activation offload: saved tensors leave the device during forward and return before backward needs them.

::

    forward   | keep 1, 2, 3, 4, 5 ...      at most `in_flight_bytes` wait for their copy; 1 is stored when 4 is kept
    between   |                             the last ones stay on the device: backward needs them first
    backward  | 5, 4, 3, 2, 1               4, 3 and 2 are prefetched within the same bound

On CUDA, copies use pinned memory and their own streams, and the device waits for them by events. The host waits only if
a copy must have ended before the next one starts. On a CPU, ``tier="cpu"`` copies within memory, saves nothing and
exists for tests; ``tier="nvme"`` does free memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy._torch import version_of
from ls_strategy.activations.storage import NVMeFolder, StoredRegion, make_storage
from ls_strategy.config import ActivationOffloadConfig
from ls_strategy.errors import StateError
from ls_strategy.tiers.arrival import DONE, Arrival
from ls_strategy.tiers.link import Link

_LOOK_BACK = 64
"""How many regions before the loaded one are considered for prefetch."""


class Offloaded:
    """A region on the device, in storage, or in transfer between the two."""

    def __init__(self, number: int, region: Tensor) -> None:
        """``region``: ``(n,)``, on the device."""
        self.uses = 0
        """Number of handles."""
        self.loads = 0
        """Number of loads so far."""
        self.number = number
        """Position in the order of `ActivationOffload.keep`."""
        self.nbytes = region.nbytes
        self.numel, self.dtype = region.numel(), region.dtype
        self.on_device: Tensor | None = region
        """The region on the device; None while only storage holds it."""
        self.version = version_of(region)
        self.changed = False
        """Whether the region was changed in place before it was stored."""
        self.arriving: Arrival = DONE
        self.is_stored = False
        """Whether storage holds the region, so that device memory may be freed."""
        self.stored = StoredRegion(region.nbytes)

    @property
    def consumed(self) -> bool:
        """Return whether every handle has loaded the region."""
        return self.loads >= self.uses


class ActivationOffload:
    """A `Keeper` in host memory or in a file. Not thread-safe: callers must serialize their calls."""

    def __init__(self, config: ActivationOffloadConfig, device: torch.device, folder: NVMeFolder | None = None) -> None:
        """Create the storage.

        Args:
            config: The tier and the bound on bytes in flight.
            device: Device of the activations.
            folder: Folder on the NVMe device, for ``tier="nvme"``.

        Raises:
            ConfigError: The folder is unsuitable.
        """
        self.config = config
        self._link = Link(device)
        self._asynchronous = dev.is_accelerator(device)
        self.storage = make_storage(config, self._link, folder)
        self.in_flight_bytes = 0
        """Bytes on the device now: not yet stored, or prefetched."""
        self.in_flight_peak = 0
        self.stored_peak = 0
        """Peak of the bytes in storage."""
        self.bytes_out = 0
        """Bytes copied from the device so far."""
        self.bytes_back = 0
        """Bytes copied back so far."""
        self._kept: dict[int, Offloaded] = {}
        self._on_device: dict[Offloaded, None] = {}
        self._next = 0
        self._closed = False

    def keep(self, region: Tensor) -> Offloaded:
        """Keep a region. Waits while the bytes in flight would exceed the bound.

        Raises:
            NVMeError: An earlier write failed.
            PlanError: The NVMe device is full.
            StateError: The offload was closed.
        """
        if self._closed:
            raise StateError(
                "activation offload was removed while a forward that uses it was running. Remove it between steps."
            )
        self._make_room(region.nbytes)
        kept = Offloaded(self._next, region)
        self._next += 1
        self._kept[kept.number] = kept
        self._track(kept)
        try:
            if self._asynchronous:
                self._begin(kept)
            if kept.nbytes > self.config.in_flight_bytes:
                self._send(kept)
        except BaseException:
            self.drop(kept)
            raise
        return kept

    def add_use(self, kept: Offloaded) -> None:
        """See `Keeper`."""
        kept.uses += 1

    def load(self, kept: Offloaded) -> Tensor:
        """Return the region on the device, and prefetch the regions that were kept before it.

        Raises:
            NVMeError: A write or read failed.
            StateError: A tensor that backward needs was changed in place.
        """
        kept.loads += 1
        if kept.on_device is None:
            self._make_room(kept.nbytes)
            self._fetch(kept)
        self._detect_change(kept)
        if kept.changed:
            raise StateError(
                f"a tensor of {kept.numel} elements ({kept.dtype}) that backward needs was changed in place after it "
                "was saved. Backward raises for it without offload too; torch.autograd.set_detect_anomaly(True) finds "
                "the operation."
            )
        kept.arriving.wait_on_device()
        region = kept.on_device
        assert region is not None
        self._fetch_before(kept)
        if kept.nbytes > self.config.in_flight_bytes and kept.is_stored:
            self._release(kept)
        return region

    def drop(self, kept: Offloaded) -> None:
        """Forget a region. Does not raise."""
        del self._kept[kept.number]
        if kept.on_device is not None:
            if kept.loads == 0:
                kept.arriving.wait_on_host()  # the device does not wait for it, and the memory is about to be reused
            self._release(kept)
        self.storage.drop(kept.stored)
        if self._closed and not self._kept:
            self.storage.close()

    def close(self) -> None:
        """Refuse further regions, and free host memory and the file once no region is kept. Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._kept:
                self.storage.close()

    def metrics(self) -> dict[str, float]:
        """Return total bytes copied and seconds waited, peaks, and bytes stored now."""
        return {
            "in_flight_peak_bytes": self.in_flight_peak,
            "out_bytes": self.bytes_out,
            "back_bytes": self.bytes_back,
            "stored_bytes": self.storage.stored_bytes,
            "stored_peak_bytes": self.stored_peak,
            "host_bytes": self.storage.host_bytes,
            "waited_s": self.storage.waited_s,
        }

    # on the device ---------------------------------------------------------------------------------------------------

    def _track(self, kept: Offloaded) -> None:
        self._on_device[kept] = None
        self.in_flight_bytes += kept.nbytes
        self.in_flight_peak = max(self.in_flight_peak, self.in_flight_bytes)

    def _release(self, kept: Offloaded) -> None:
        kept.on_device = None
        kept.arriving = DONE
        del self._on_device[kept]
        self.in_flight_bytes -= kept.nbytes

    def _make_room(self, nbytes: int) -> None:
        """Release regions until ``nbytes`` more fit: first those that backward has consumed, then the oldest."""
        consumed = [kept for kept in self._on_device if kept.consumed and kept.loads]
        for kept in [*consumed, *(k for k in self._on_device if k not in consumed)]:
            if self.in_flight_bytes + nbytes <= self.config.in_flight_bytes:
                return
            self._send(kept)

    def _send(self, kept: Offloaded) -> None:
        """Store a region and return when its device memory is free."""
        if not kept.is_stored:
            if not self._asynchronous:
                self._begin(kept)
            self.storage.finish(kept.stored)
            self._detect_change(kept)
            kept.is_stored = True
        elif not kept.loads:
            kept.arriving.wait_on_host()
        self._release(kept)

    def _begin(self, kept: Offloaded) -> None:
        assert kept.on_device is not None
        self.storage.begin(kept.stored, kept.on_device.view(torch.uint8))
        self.bytes_out += kept.nbytes
        self.stored_peak = max(self.stored_peak, self.storage.stored_bytes)

    def _fetch(self, kept: Offloaded) -> None:
        """Start copying a region to the device. Waits until host memory holds it."""
        source = self.storage.host(kept.stored)
        kept.on_device = torch.empty(kept.numel, dtype=kept.dtype, device=self._link.device)
        kept.arriving = self._link.to_device(kept.on_device.view(torch.uint8), source)
        self.storage.arrived(kept.stored, kept.arriving)
        self.bytes_back += kept.nbytes
        self._track(kept)

    def _fetch_before(self, kept: Offloaded) -> None:
        """Prefetch the regions kept before ``kept``, the nearest first, as far as there is room."""
        room = self.config.in_flight_bytes - self.in_flight_bytes
        for number in range(kept.number - 1, max(kept.number - _LOOK_BACK, 0) - 1, -1):
            before = self._kept.get(number)
            if before is None or before.on_device is not None or before.consumed:
                continue
            ready = self.storage.prepare(before.stored)
            if before.nbytes > room:
                return
            room -= before.nbytes
            if ready:
                self._fetch(before)

    @staticmethod
    def _detect_change(kept: Offloaded) -> None:
        """Detect changes in place, as autograd does for the tensors that it saves itself."""
        if kept.on_device is not None and not kept.is_stored:
            kept.changed = kept.changed or version_of(kept.on_device) != kept.version
