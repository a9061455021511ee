"""Offload: what backward will need leaves the device during forward, and is back when backward asks.

::

    forward   | keep 1, 2, 3, 4, 5 ...      on its way: at most `in_flight_bytes`; 1 has left when 4 is kept
    between   |                             the last ones never leave: backward needs them first
    backward  | 5, 4, 3, 2, 1               while backward works with 4, 3 and 2 come, within the same bound

On CUDA copies run on streams of their own, from and to pinned memory, and the device waits for them by events; the host
waits only for a copy that must have ended before the next may begin. On a CPU, ``tier="cpu"`` copies within memory: it
saves nothing, and is there to test with; ``tier="nvme"`` frees memory there too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy._compat import version_of
from ls_strategy.activations.storage import ActivationStorage, FileStorage, HostStorage, NVMeFolder, Stowed
from ls_strategy.config import ActivationOffloadConfig
from ls_strategy.errors import StateError
from ls_strategy.tiers.link import DONE, Arrival, Link

_LOOK_BACK = 64
"""How many regions before the one that is used are considered for coming next."""


class Offloaded:
    """A region that is on its way to a place, there, or on its way back. A `Kept`."""

    def __init__(self, offload: ActivationOffload, number: int, region: Tensor) -> None:
        """``region``: ``(n,)``, on the device."""
        self.uses = 0
        """Handles on it."""
        self.brought = 0
        """How often it was brought."""
        self.number = number
        """In the order of keeping."""
        self.nbytes = region.nbytes
        self.numel, self.dtype = region.numel(), region.dtype
        self.here: Tensor | None = region
        """The region on the device: before it has left, or since it is on its way back."""
        self.version = version_of(region)
        self.changed = False
        """Whether it was changed in place before it had left."""
        self.arriving: Arrival = DONE
        self.has_left = False
        """Whether the place has it, so that the device need not."""
        self.stowed = Stowed(region.nbytes)
        self._offload = offload

    @property
    def spent(self) -> bool:
        """Whether every handle was served."""
        return self.brought >= self.uses

    def add_use(self) -> None:
        """See `Kept`."""
        self.uses += 1

    def load(self) -> Tensor:
        """See `Kept`."""
        return self._offload.load(self)

    def drop(self) -> None:
        """See `Kept`."""
        self._offload.drop(self)


class ActivationOffload:
    """A keeper of regions in host memory or on a drive. Not thread-safe: its caller lets in one thread at a time."""

    def __init__(self, config: ActivationOffloadConfig, device: torch.device, drive: NVMeFolder | None = None) -> None:
        """Make the place.

        Args:
            config: which place, and how much may be on its way.
            device: where activations are computed.
            drive: for ``tier="nvme"``: the folder.

        Raises:
            ConfigError: the folder is unfit for it.
        """
        self.config = config
        self._link = Link(device)
        self._asynchronous = device.type == "cuda"
        self.place: ActivationStorage
        if config.tier == "nvme":
            assert drive is not None, "tier='nvme' without a folder"
            self.place = FileStorage(self._link, drive, config.staging_bytes)
        else:
            self.place = HostStorage(self._link)
        self.in_flight_bytes = 0
        """On the device now: on its way out, not yet sent, or back before its time."""
        self.in_flight_peak = 0
        self.stored_peak = 0
        """The most bytes that were at the place."""
        self.bytes_out = 0
        """Sent from the device so far."""
        self.bytes_back = 0
        """Brought back so far."""
        self._kept: dict[int, Offloaded] = {}
        self._here: dict[Offloaded, None] = {}
        self._next = 0
        self._closed = False

    def keep(self, region: Tensor) -> Offloaded:
        """Take a region. Waits while what is on its way would exceed the bound.

        Raises:
            DriveError: an earlier write to the drive failed.
            PlanError: the drive is full.
            StateError: it is closed.
        """
        if self._closed:
            raise StateError("activation offload was removed, and a forward that began before still runs.")
        self._make_room(region.nbytes)
        kept = Offloaded(self, self._next, region)
        self._next += 1
        self._kept[kept.number] = kept
        self._hold(kept)
        try:
            if self._asynchronous:
                self._begin(kept)
            if kept.nbytes > self.config.in_flight_bytes:
                self._send(kept)
        except BaseException:
            self.drop(kept)
            raise
        return kept

    def load(self, kept: Offloaded) -> Tensor:
        """The region; then those that were kept before it begin to come.

        Raises:
            DriveError: it could not be written, or not be read.
            StateError: a tensor that backward needs was changed in place.
        """
        kept.brought += 1
        if kept.here is None:
            self._make_room(kept.nbytes)
            self._fetch(kept)
        self._note_change(kept)
        if kept.changed:
            raise StateError(
                f"a tensor of {kept.numel} elements ({kept.dtype}) that backward needs was changed in place after it "
                "was saved. Without offload, backward would refuse it too; torch.autograd.set_detect_anomaly(True) "
                "finds the operation."
            )
        kept.arriving.wait_on_device()
        region = kept.here
        assert region is not None
        self._fetch_before(kept)
        if kept.nbytes > self.config.in_flight_bytes and kept.has_left:
            self._let_go(kept)
        return region

    def drop(self, kept: Offloaded) -> None:
        """Forget a region. Does not raise."""
        del self._kept[kept.number]
        if kept.here is not None:
            if kept.brought == 0:
                kept.arriving.wait_on_host()  # the device was not told to wait, and the memory is about to be reused
            self._let_go(kept)
        self.place.drop(kept.stowed)
        if self._closed and not self._kept:
            self.place.close()

    def close(self) -> None:
        """Take nothing more; give host memory and the file back when nothing is kept any more. Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._kept:
                self.place.close()

    def metrics(self) -> dict[str, float]:
        """Bytes moved and seconds waited since the start, peaks, and what is away now."""
        return {
            "in_flight_peak_bytes": self.in_flight_peak,
            "out_bytes": self.bytes_out,
            "back_bytes": self.bytes_back,
            "stored_bytes": self.place.stored_bytes,
            "stored_peak_bytes": self.stored_peak,
            "host_bytes": self.place.host_bytes,
            "waited_s": self.place.waited_s,
        }

    # on the device ---------------------------------------------------------------------------------------------------

    def _hold(self, kept: Offloaded) -> None:
        self._here[kept] = None
        self.in_flight_bytes += kept.nbytes
        self.in_flight_peak = max(self.in_flight_peak, self.in_flight_bytes)

    def _let_go(self, kept: Offloaded) -> None:
        kept.here = None
        kept.arriving = DONE
        del self._here[kept]
        self.in_flight_bytes -= kept.nbytes

    def _make_room(self, nbytes: int) -> None:
        """Let regions go until ``nbytes`` more fit: first those that backward is done with, then the oldest."""
        spent = [kept for kept in self._here if kept.spent and kept.brought]
        for kept in [*spent, *(k for k in self._here if k not in spent)]:
            if self.in_flight_bytes + nbytes <= self.config.in_flight_bytes:
                return
            self._send(kept)

    def _send(self, kept: Offloaded) -> None:
        """Take a region off the device; returns when its memory is free."""
        if not kept.has_left:
            if not self._asynchronous:
                self._begin(kept)
            self.place.finish(kept.stowed)
            self._note_change(kept)
            kept.has_left = True
        elif not kept.brought:
            kept.arriving.wait_on_host()
        self._let_go(kept)

    def _begin(self, kept: Offloaded) -> None:
        assert kept.here is not None
        self.place.begin(kept.stowed, kept.here.view(torch.uint8))
        self.bytes_out += kept.nbytes
        self.stored_peak = max(self.stored_peak, self.place.stored_bytes)

    def _fetch(self, kept: Offloaded) -> None:
        """Start copying a region to the device; waits until the host has it."""
        source = self.place.host(kept.stowed)
        kept.here = torch.empty(kept.numel, dtype=kept.dtype, device=self._link.device)
        kept.arriving = self._link.to_device(kept.here.view(torch.uint8), source)
        self.place.arrived(kept.stowed, kept.arriving)
        self.bytes_back += kept.nbytes
        self._hold(kept)

    def _fetch_before(self, kept: Offloaded) -> None:
        """Let those that were kept before ``kept`` come, the nearest first, as far as there is room."""
        room = self.config.in_flight_bytes - self.in_flight_bytes
        for number in range(kept.number - 1, max(kept.number - _LOOK_BACK, 0) - 1, -1):
            before = self._kept.get(number)
            if before is None or before.here is not None or before.spent:
                continue
            ready = self.place.prepare(before.stowed)
            if before.nbytes > room:
                return
            room -= before.nbytes
            if ready:
                self._fetch(before)

    @staticmethod
    def _note_change(kept: Offloaded) -> None:
        """What autograd checks of a tensor that it holds itself: the region is what it was when it was saved."""
        if kept.here is not None and not kept.has_left:
            kept.changed = kept.changed or version_of(kept.here) != kept.version
