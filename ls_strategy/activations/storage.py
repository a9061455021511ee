"""Storage of activations away from the device: host memory, or a file on a local NVMe device.

::

    host   | device ─► pinned buffer ........................................................ ─► device
    file   | device ─► staging buffer ─► pwritev ─► file ─► preadv ─► staging buffer ─► device

Host buffers are pinned if CUDA is available, and reused: each step needs the same sizes as the one before. The file has
no name, disappears with the process, and its space is reused in every step.
"""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.config import ActivationOffloadConfig, NVMeIOConfig
from ls_strategy.errors import PlanError
from ls_strategy.tiers.arrival import DONE, Arrival
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer
from ls_strategy.tiers.file_io import IOEngine, Transfer
from ls_strategy.tiers.link import Link
from ls_strategy.tiers.nvme_folder import check_path, open_scratch
from ls_strategy.tiers.stock import BufferStock

_GROWTH = 64 << 20


class StoredRegion:
    """A region's bytes in storage, or in transfer to or from it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer: AlignedBuffer | None = None
        """Host memory that holds the bytes, or will."""
        self.copying: Arrival = DONE
        """The copy into ``buffer``, or from it to the device."""
        self.transfer: Transfer | None = None
        """The write from ``buffer``, or the read into it."""
        self.offset: int | None = None
        """Position in the file."""

    def host(self) -> Tensor:
        """Return the bytes in host memory, ``(nbytes,)`` uint8."""
        assert self.buffer is not None
        return self.buffer.tensor[: self.nbytes]


class ActivationStorage(ABC):
    """Stores bytes and returns them, through a pool of host buffers."""

    name: str

    def __init__(self, link: Link) -> None:
        """``link``: to the device."""
        self._link = link
        self._stock = BufferStock(pin=dev.registering(link.device))
        self.stored_bytes = 0
        """Bytes stored now."""
        self.waited_s = 0.0
        """Seconds that training has waited for the storage so far."""

    @property
    def host_bytes(self) -> int:
        """Bytes of all host buffers, in use or free."""
        return self._stock.total_bytes

    def begin(self, region: StoredRegion, source: Tensor) -> None:
        """Start copying ``source``, ``(nbytes,)`` uint8 on the device, to host memory."""
        self._take_buffer(region)
        self.stored_bytes += region.nbytes
        region.copying = self._link.to_host(region.host(), source)

    @abstractmethod
    def finish(self, region: StoredRegion) -> None:
        """Wait until the source is not needed any more."""

    @abstractmethod
    def prepare(self, region: StoredRegion) -> bool:
        """Start loading the bytes to host memory if there is room. Return whether they are there already."""

    @abstractmethod
    def host(self, region: StoredRegion) -> Tensor:
        """Return the bytes in host memory, ``(nbytes,)`` uint8. Waits for them."""

    def arrived(self, region: StoredRegion, arrival: Arrival) -> None:
        """Note that ``arrival`` copies the bytes from `host` to the device."""
        region.copying = arrival

    @abstractmethod
    def drop(self, region: StoredRegion) -> None:
        """Free the bytes. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory and files. Nothing may be stored any more."""

    @abstractmethod
    def _take_buffer(self, region: StoredRegion) -> None: ...

    def _give_buffer(self, region: StoredRegion) -> None:
        assert region.buffer is not None
        self._stock.give(region.buffer, region.copying)
        region.buffer = None

    def _wait(self, wait: Callable[[], object]) -> None:
        started = time.perf_counter()
        wait()
        self.waited_s += time.perf_counter() - started


class _HostStorage(ActivationStorage):
    name = "host memory"

    def finish(self, region: StoredRegion) -> None:
        self._wait(region.copying.wait_on_host)

    def prepare(self, region: StoredRegion) -> bool:
        return True

    def host(self, region: StoredRegion) -> Tensor:
        return region.host()

    def drop(self, region: StoredRegion) -> None:
        if region.buffer is not None:
            self.stored_bytes -= region.nbytes
            self._give_buffer(region)
            if self.stored_bytes == 0:
                self._stock.trim()

    def close(self) -> None:
        self._stock.close()

    def _take_buffer(self, region: StoredRegion) -> None:
        # An earlier copy out of the buffer has ended: the device's current stream has waited for it.
        region.buffer, _ = self._stock.take(region.nbytes)


@dataclass(frozen=True)
class NVMeFolder:
    """The folder of the NVMe tier, and the options for I/O in it."""

    path: str
    io: NVMeIOConfig = field(default_factory=NVMeIOConfig)
    rank: int = 0
    """Rank of this process, for messages."""

    allow_ram: bool = False
    """Accept a folder on a RAM file system, for tests."""


class FileSpace:
    """Allocates ranges of a file in multiples of a page.

    >>> space = FileSpace()
    >>> space.take(5000), space.take(100), space.end
    (0, 8192, 12288)
    >>> space.give(0, 5000)
    >>> space.take(4096), space.end
    (0, 12288)
    """

    def __init__(self) -> None:
        self.end = 0
        """Size that the file needs."""
        self._free: list[tuple[int, int]] = []  # (begin, end), sorted, never touching each other

    def take(self, nbytes: int) -> int:
        """Return the offset of the first free range of ``nbytes``, or the end of all ranges."""
        need = -(-nbytes // PAGE) * PAGE
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= need:
                self._free[i : i + 1] = [(begin + need, end)] if end - begin > need else []
                return begin
        self.end += need
        return self.end - need

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range that `take` returned."""
        insort(self._free, (offset, offset + -(-nbytes // PAGE) * PAGE))
        merged: list[tuple[int, int]] = []
        for begin, end in self._free:
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged


class _FileStorage(ActivationStorage):
    """Storage in a file on a local NVMe device, with a bounded amount of host memory for staging."""

    name = "NVMe"

    def __init__(self, link: Link, folder: NVMeFolder, staging_bytes: int) -> None:
        super().__init__(link)
        check_path(folder.path, 0, folder.allow_ram)
        self._folder = folder
        self._file = open_scratch(Path(folder.path), PAGE, rank=folder.rank, direct=folder.io.direct)
        self._file_bytes = PAGE
        self._space = FileSpace()
        self._engine = IOEngine(folder.io)
        self._limit = staging_bytes
        self._writing: deque[StoredRegion] = deque()
        self._dropped: deque[StoredRegion] = deque()

    def finish(self, region: StoredRegion) -> None:
        region.copying.wait_on_host()
        if region.offset is None:
            region.offset = self._space.take(region.nbytes)
            self._grow()
            assert region.buffer is not None
            region.transfer = self._engine.write(self._file, self._pages(region), region.offset)
            self._writing.append(region)

    def prepare(self, region: StoredRegion) -> bool:
        if region.buffer is None:
            if not self._has_room(region.nbytes):
                return False
            self._read(region)
        elif region.offset is not None and region in self._writing:
            return True  # the buffer of the write still holds the bytes
        return region.transfer is None or region.transfer.finished.is_set()

    def host(self, region: StoredRegion) -> Tensor:
        if region.buffer is None:
            self._read(region)
        transfer = region.transfer
        # A write may still run: its buffer holds the bytes.
        if transfer is not None and (transfer.verb == "read" or transfer.error is not None):
            self._wait(transfer.wait)
        return region.host()

    def arrived(self, region: StoredRegion, arrival: Arrival) -> None:
        super().arrived(region, arrival)
        if region.transfer is not None and region.transfer.verb == "read":
            self._give_buffer(region)

    def drop(self, region: StoredRegion) -> None:
        if region.buffer is not None or region.offset is not None:
            self.stored_bytes -= region.nbytes
            self._dropped.append(region)
        self._sweep()
        if self.stored_bytes == 0:
            self._stock.trim()

    def close(self) -> None:
        self._engine.close()
        self._sweep()
        self._file.close()
        self._stock.close()

    def _read(self, region: StoredRegion) -> None:
        assert region.offset is not None
        if region.transfer is not None and region.transfer.verb == "write":
            self._wait(region.transfer.wait)
        self._take_buffer(region)
        region.transfer = self._engine.read(self._file, self._pages(region), region.offset)

    def _pages(self, region: StoredRegion) -> memoryview:
        assert region.buffer is not None
        return region.buffer.view[: -(-region.nbytes // PAGE) * PAGE]

    def _has_room(self, nbytes: int) -> bool:
        self._sweep()
        return self._stock.taken_bytes + nbytes <= self._limit

    def _take_buffer(self, region: StoredRegion) -> None:
        """Wait for writes until there is room. Buffers that the device still uses may exceed the bound."""
        while not self._has_room(region.nbytes) and self._writing:
            first = self._writing[0]
            assert first.transfer is not None
            self._wait(first.transfer.wait)
            self._sweep()
        region.buffer, busy = self._stock.take(region.nbytes)
        busy.wait_on_host()  # I/O does not wait for the device

    def _sweep(self) -> None:
        """Free buffers and file ranges after their transfers. Those of failed writes stay, so that `_wait` raises."""
        while self._writing and self._finished_well(self._writing[0]):
            region = self._writing.popleft()
            if region.buffer is not None:
                self._give_buffer(region)
        for _ in range(len(self._dropped)):
            region = self._dropped.popleft()
            if region.transfer is not None and not region.transfer.finished.is_set():
                self._dropped.append(region)
                continue
            if region in self._writing:
                self._writing.remove(region)
            if region.buffer is not None:
                self._give_buffer(region)
            if region.offset is not None:
                self._space.give(region.offset, region.nbytes)
                region.offset = None

    @staticmethod
    def _finished_well(region: StoredRegion) -> bool:
        transfer = region.transfer
        return transfer is not None and transfer.finished.is_set() and transfer.error is None

    def _grow(self) -> None:
        """Reserve space for the file, so that a full NVMe device raises here."""
        if self._space.end <= self._file_bytes:
            return
        nbytes = -(-self._space.end // _GROWTH) * _GROWTH
        try:
            os.posix_fallocate(self._file.fd, self._file_bytes, nbytes - self._file_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise PlanError(
                    f"offload.nvme_path={self._folder.path!r} has no room for the activations, which take "
                    f"{self._space.end / 2**30:.2f} GiB so far: {error.strerror}. Free space, use another NVMe device, "
                    "smaller batches, or more recompute."
                ) from error
            os.ftruncate(self._file.fd, nbytes)  # not reserved: a full device shows up as a failed write
        self._file_bytes = nbytes


def make_storage(config: ActivationOffloadConfig, link: Link, folder: NVMeFolder | None) -> ActivationStorage:
    """Return the storage of ``config.tier``, still empty.

    Its methods raise `NVMeError` for an earlier failed write, and `PlanError` if the NVMe device is full.

    Raises:
        ConfigError: The folder is unsuitable.
    """
    if config.tier == "nvme":
        assert folder is not None, "tier='nvme' without a folder"
        return _FileStorage(link, folder, config.staging_bytes)
    return _HostStorage(link)
