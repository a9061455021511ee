"""Where activations rest away from the device: in host memory, or in a file on a local drive.

::

    host   | device ─► pinned buffer ........................................................ ─► device
    drive  | device ─► staging buffer ─► pwritev ─► file ─► preadv ─► staging buffer ─► device

Host buffers are pinned where there is CUDA, and used again: a step asks for the sizes of the step before. The file has
no name and vanishes with the process; its space is used again in every step.
"""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import PlanError
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer
from ls_strategy.tiers.file_io import IOEngine, Transfer
from ls_strategy.tiers.link import DONE, Arrival, Link
from ls_strategy.tiers.nvme_folder import check_path, open_scratch

_GROWTH = 64 << 20


class Stowed:
    """A region's bytes on their way to a place, there, or on their way back."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer: AlignedBuffer | None = None
        """Host memory that holds them, or will."""
        self.copying: Arrival = DONE
        """The copy into that buffer."""
        self.transfer: Transfer | None = None
        """The write from that buffer, or the read into it."""
        self.offset: int | None = None
        """Place in the file."""

    def host(self) -> Tensor:
        """The bytes in host memory, ``(nbytes,)`` uint8."""
        assert self.buffer is not None
        return self.buffer.tensor[: self.nbytes]


class ActivationStorage(Protocol):
    """Takes bytes and gives them back."""

    name: str
    stored_bytes: int
    """In it now."""

    waited_s: float
    """Seconds so far that training has waited for it."""

    @property
    def host_bytes(self) -> int:
        """Host memory that it holds, in use or free."""
        ...

    def begin(self, stowed: Stowed, source: Tensor) -> None:
        """Start copying ``source``, ``(nbytes,)`` uint8 on the device, to host memory."""
        ...

    def finish(self, stowed: Stowed) -> None:
        """Return when the source is not needed any more."""
        ...

    def prepare(self, stowed: Stowed) -> bool:
        """Start bringing the bytes to host memory, if there is room; returns whether they are there already."""
        ...

    def host(self, stowed: Stowed) -> Tensor:
        """The bytes, in host memory; waits for them. ``(nbytes,)`` uint8."""
        ...

    def arrived(self, stowed: Stowed, arrival: Arrival) -> None:
        """The bytes are on their way from `host` to the device."""
        ...

    def drop(self, stowed: Stowed) -> None:
        """The bytes are not needed any more. Does not wait."""
        ...

    def close(self) -> None:
        """Give everything back; nothing is in it any more."""
        ...


class _Free(NamedTuple):
    nbytes: int
    number: int
    buffer: AlignedBuffer
    busy: Arrival
    round: int


class BufferStock:
    """Host buffers that are used again: the smallest that is large enough, and no more than twice too large."""

    rounds_kept = 8
    """Calls of `trim` after which a buffer that nobody took is freed."""

    def __init__(self, *, pin: bool) -> None:
        """``pin``: register buffers with CUDA."""
        self._pin = pin
        self._free: list[_Free] = []
        self._round = 0
        self.total_bytes = 0
        """Of all buffers, taken or free."""
        self.taken_bytes = 0

    def take(self, nbytes: int) -> tuple[AlignedBuffer, Arrival]:
        """A buffer, and a copy that may still be reading it."""
        i = bisect_left(self._free, (nbytes, 0))
        if i < len(self._free) and self._free[i].nbytes <= max(2 * nbytes, PAGE):
            free = self._free.pop(i)
            buffer, busy = free.buffer, free.busy
        else:
            buffer, busy = AlignedBuffer(nbytes, pin=self._pin), DONE
            self.total_bytes += buffer.nbytes
        self.taken_bytes += buffer.nbytes
        return buffer, busy

    def give(self, buffer: AlignedBuffer, busy: Arrival = DONE) -> None:
        """Give a buffer back that is read by nothing but ``busy``."""
        self.taken_bytes -= buffer.nbytes
        insort(self._free, _Free(buffer.nbytes, id(buffer), buffer, busy, self._round))

    def trim(self) -> None:
        """A step is over: free what the last few did not need."""
        self._round += 1
        old = [free for free in self._free if free.round < self._round - self.rounds_kept]
        self._free = [free for free in self._free if free not in old]
        self._discard(old)

    def close(self) -> None:
        """Free every buffer that is not taken."""
        self._discard(self._free)
        self._free = []

    def _discard(self, free: list[_Free]) -> None:
        for each in free:
            each.busy.wait_on_host()
            each.buffer.unpin()
            self.total_bytes -= each.nbytes


class HostStorage:
    """Host memory."""

    name = "host memory"

    def __init__(self, link: Link) -> None:
        """Of the host at the end of ``link``."""
        self._link = link
        self._stock = BufferStock(pin=link.device.type == "cuda")
        self.stored_bytes = 0
        self.waited_s = 0.0

    @property
    def host_bytes(self) -> int:
        """Of its buffers, in use or free."""
        return self._stock.total_bytes

    def begin(self, stowed: Stowed, source: Tensor) -> None:
        """See `ActivationStorage`."""
        # What was copied out of the buffer before is done first: the device's current stream has waited for that.
        stowed.buffer, _ = self._stock.take(stowed.nbytes)
        self.stored_bytes += stowed.nbytes
        stowed.copying = self._link.to_host(stowed.host(), source)

    def finish(self, stowed: Stowed) -> None:
        """See `ActivationStorage`."""
        started = time.perf_counter()
        stowed.copying.wait_on_host()
        self.waited_s += time.perf_counter() - started

    def prepare(self, stowed: Stowed) -> bool:
        """See `ActivationStorage`."""
        return True

    def host(self, stowed: Stowed) -> Tensor:
        """See `ActivationStorage`."""
        return stowed.host()

    def arrived(self, stowed: Stowed, arrival: Arrival) -> None:
        """See `ActivationStorage`."""
        stowed.copying = arrival

    def drop(self, stowed: Stowed) -> None:
        """See `ActivationStorage`."""
        if stowed.buffer is not None:
            self.stored_bytes -= stowed.nbytes
            self._stock.give(stowed.buffer, stowed.copying)
            stowed.buffer = None
            if self.stored_bytes == 0:
                self._stock.trim()

    def close(self) -> None:
        """See `ActivationStorage`."""
        self._stock.close()


@dataclass(frozen=True)
class NVMeFolder:
    """The folder of the NVMe tier, and how files in it are read and written."""

    path: str
    io: NVMeIOConfig = field(default_factory=NVMeIOConfig)
    rank: int = 0
    """Of this process, for messages."""

    allow_ram: bool = False
    """Accept a folder that is in memory itself, for tests."""


class FileSpace:
    """Free stretches of a file, in whole pages. Integers only.

    >>> space = FileSpace()
    >>> space.take(5000), space.take(100), space.end
    (0, 8192, 12288)
    >>> space.give(0, 5000)
    >>> space.take(4096), space.end
    (0, 12288)
    """

    def __init__(self) -> None:
        """Nothing is taken."""
        self.end = 0
        """Where the file must reach."""
        self._free: list[tuple[int, int]] = []  # (begin, end), sorted, never touching each other

    def take(self, nbytes: int) -> int:
        """Where ``nbytes`` may go: the first stretch that is long enough, else behind all others."""
        need = -(-nbytes // PAGE) * PAGE
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= need:
                self._free[i : i + 1] = [(begin + need, end)] if end - begin > need else []
                return begin
        self.end += need
        return self.end - need

    def give(self, offset: int, nbytes: int) -> None:
        """Free what `take` gave."""
        insort(self._free, (offset, offset + -(-nbytes // PAGE) * PAGE))
        merged: list[tuple[int, int]] = []
        for begin, end in self._free:
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged


class FileStorage:
    """A file on a local drive, behind a bounded number of bytes of host memory."""

    name = "NVMe"

    def __init__(self, link: Link, drive: NVMeFolder, staging_bytes: int) -> None:
        """Make the file, still empty.

        Args:
            link: to the device.
            drive: where.
            staging_bytes: bound of the host memory that waits for the drive; what waits for the device comes on top.

        Raises:
            ConfigError: the folder is unfit for it.
        """
        check_path(drive.path, 0, drive.allow_ram)
        self._link = link
        self._drive = drive
        self._file = open_scratch(Path(drive.path), PAGE, rank=drive.rank, direct=drive.io.direct)
        self._file_bytes = PAGE
        self._space = FileSpace()
        self._engine = IOEngine(drive.io)
        self._stock = BufferStock(pin=link.device.type == "cuda")
        self._limit = staging_bytes
        self._writing: deque[Stowed] = deque()
        self._dropped: deque[Stowed] = deque()
        self.stored_bytes = 0
        self.waited_s = 0.0

    @property
    def host_bytes(self) -> int:
        """Of its staging buffers, in use or free."""
        return self._stock.total_bytes

    def begin(self, stowed: Stowed, source: Tensor) -> None:
        """See `ActivationStorage`. Raises `DriveError` of an earlier write."""
        self._take_buffer(stowed)
        self.stored_bytes += stowed.nbytes
        stowed.copying = self._link.to_host(stowed.host(), source)

    def finish(self, stowed: Stowed) -> None:
        """See `ActivationStorage`. Raises `DriveError` of an earlier write, `PlanError` where the file cannot grow."""
        stowed.copying.wait_on_host()
        if stowed.offset is None:
            stowed.offset = self._space.take(stowed.nbytes)
            self._grow()
            assert stowed.buffer is not None
            stowed.transfer = self._engine.write(self._file, self._pages(stowed), stowed.offset)
            self._writing.append(stowed)

    def prepare(self, stowed: Stowed) -> bool:
        """See `ActivationStorage`."""
        if stowed.buffer is None:
            if not self._has_room(stowed.nbytes):
                return False
            self._read(stowed)
        elif stowed.offset is not None and stowed in self._writing:
            return True  # still in the buffer that it is written from
        return stowed.transfer is None or stowed.transfer.finished.is_set()

    def host(self, stowed: Stowed) -> Tensor:
        """See `ActivationStorage`. Raises `DriveError`."""
        if stowed.buffer is None:
            self._read(stowed)
        transfer = stowed.transfer
        # A write need not be over: what it takes to the drive is here.
        if transfer is not None and (transfer.verb == "read" or transfer.error is not None):
            self._wait(transfer)
        return stowed.host()

    def arrived(self, stowed: Stowed, arrival: Arrival) -> None:
        """See `ActivationStorage`."""
        stowed.copying = arrival
        if stowed.transfer is not None and stowed.transfer.verb == "read":
            self._give_buffer(stowed)

    def drop(self, stowed: Stowed) -> None:
        """See `ActivationStorage`."""
        if stowed.buffer is not None or stowed.offset is not None:
            self.stored_bytes -= stowed.nbytes
            self._dropped.append(stowed)
        self._sweep()
        if self.stored_bytes == 0:
            self._stock.trim()

    def close(self) -> None:
        """See `ActivationStorage`."""
        self._engine.close()
        self._sweep()
        self._file.close()
        self._stock.close()

    def _read(self, stowed: Stowed) -> None:
        assert stowed.offset is not None
        if stowed.transfer is not None and stowed.transfer.verb == "write":
            self._wait(stowed.transfer)
        self._take_buffer(stowed)
        stowed.transfer = self._engine.read(self._file, self._pages(stowed), stowed.offset)

    def _pages(self, stowed: Stowed) -> memoryview:
        assert stowed.buffer is not None
        return stowed.buffer.view[: -(-stowed.nbytes // PAGE) * PAGE]

    def _has_room(self, nbytes: int) -> bool:
        self._sweep()
        return self._stock.taken_bytes + nbytes <= self._limit

    def _take_buffer(self, stowed: Stowed) -> None:
        """Wait for writes until there is room; what the device still holds back is beyond the bound."""
        while not self._has_room(stowed.nbytes) and self._writing:
            first = self._writing[0]
            assert first.transfer is not None
            self._wait(first.transfer)
            self._sweep()
        stowed.buffer, busy = self._stock.take(stowed.nbytes)
        busy.wait_on_host()  # the drive does not wait for the device

    def _sweep(self) -> None:
        """Take buffers and space back that the drive is done with; those of failed writes stay, for `_wait` to tell."""
        while self._writing and self._finished_well(self._writing[0]):
            stowed = self._writing.popleft()
            if stowed.buffer is not None:
                self._give_buffer(stowed)
        for _ in range(len(self._dropped)):
            stowed = self._dropped.popleft()
            if stowed.transfer is not None and not stowed.transfer.finished.is_set():
                self._dropped.append(stowed)
                continue
            if stowed in self._writing:
                self._writing.remove(stowed)
            if stowed.buffer is not None:
                self._give_buffer(stowed)
            if stowed.offset is not None:
                self._space.give(stowed.offset, stowed.nbytes)
                stowed.offset = None

    @staticmethod
    def _finished_well(stowed: Stowed) -> bool:
        transfer = stowed.transfer
        return transfer is not None and transfer.finished.is_set() and transfer.error is None

    def _give_buffer(self, stowed: Stowed) -> None:
        assert stowed.buffer is not None
        self._stock.give(stowed.buffer, stowed.copying)
        stowed.buffer = None

    def _wait(self, transfer: Transfer) -> None:
        started = time.perf_counter()
        transfer.wait()
        self.waited_s += time.perf_counter() - started

    def _grow(self) -> None:
        """Reserve space for the file, so that a full drive is an error here."""
        if self._space.end <= self._file_bytes:
            return
        nbytes = -(-self._space.end // _GROWTH) * _GROWTH
        try:
            os.posix_fallocate(self._file.fd, self._file_bytes, nbytes - self._file_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise PlanError(
                    f"offload.nvme_path={self._drive.path!r} has no room for activations, of which there are "
                    f"{self._space.end / 2**30:.2f} GiB so far: {error.strerror}. Free space, use another drive, "
                    "smaller batches, or recompute more."
                ) from error
            os.ftruncate(self._file.fd, nbytes)  # not reserved: a full drive shows when it is written
        self._file_bytes = nbytes
