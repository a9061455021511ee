"""The NVMe tier: model states in one file per rank, brought and taken away piece by piece.

::

    file   | 0:master ......... | 0:exp_avg ........ | 1:master .. | ...        one extent per state, at whole pages
                   ▲ │ put: pwritev
           preadv  │ ▼
    memory       [buffer] [buffer] [buffer] ...                                a fixed number, whatever the model's size

Transfers that touch the same bytes, one of them writing, keep the order in which they were asked for, across threads;
others overlap. A write that fails breaks the tier: every later call raises its error, since states are missing.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import StateError
from ls_strategy.tiers.base import Key, Lease, Sizes, resolve_range
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer, BoundedPool
from ls_strategy.tiers.file_io import DriveError, IOEngine, Transfer
from ls_strategy.tiers.nvme_folder import check_path, drive_wear, open_scratch

__all__ = ["NVMeLease", "NVMeTier", "check_path", "drive_wear"]

logger = logging.getLogger("ls_strategy.tiers")


def extents(sizes: Sizes) -> tuple[dict[Key, int], int]:
    """Where each state begins in the file, and the file's bytes. Every state begins at a page and is padded to one.

    >>> extents({(0, "master"): (1, torch.float32), (0, "exp_avg"): (1025, torch.float32)})
    ({(0, 'master'): 0, (0, 'exp_avg'): 4096}, 12288)
    """
    offsets: dict[Key, int] = {}
    end = 0
    for key, (numel, dtype) in sizes.items():
        offsets[key] = end
        end += _padded(numel * dtype.itemsize)
    return offsets, end


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class _Access:
    """A transfer and the bytes of its state that it touches."""

    def __init__(self, transfer: Transfer, begin: int, end: int) -> None:
        self.transfer = transfer
        self.begin, self.end = begin, end

    def must_wait_for(self, other: _Access) -> bool:
        overlap = self.begin < other.end and other.begin < self.end
        return overlap and "write" in (self.transfer.verb, other.transfer.verb)


class NVMeLease:
    """Elements in a buffer of the tier."""

    def __init__(self, tier: NVMeTier, buffer: AlignedBuffer | None, tensor: Tensor, transfer: Transfer | None) -> None:
        """``buffer`` and ``transfer`` are None for a range without elements."""
        self.buffer = buffer
        self.transfer = transfer
        self._tier = tier
        self._tensor = tensor
        self._ended = False

    def wait(self) -> Tensor:
        """The elements, a view of the buffer.

        Raises:
            DriveError: they could not be read.
            StateError: the lease was released or put, or the drive does not answer.
        """
        if self._ended:
            raise StateError(
                "this lease was released or put, and its buffer may hold another state by now: get it again."
            )
        if self.transfer is not None:
            self.transfer.wait()
        return self._tensor

    def release(self) -> None:
        """Give the buffer back, once nothing is read into it any more. Does not wait, idempotent."""
        if not self._ended:
            self.end()
            self._tier.recycle(self)

    def end(self) -> None:
        """From now on the buffer is somebody else's."""
        self._ended = True

    def belongs_to(self, tier: NVMeTier) -> bool:
        """Whether ``tier`` made it."""
        return self._tier is tier


class NVMeTier:
    """States in a file of this rank."""

    name = "nvme"

    def __init__(
        self,
        directory: str | Path,
        sizes: Sizes,
        *,
        io: NVMeIOConfig | None = None,
        rank: int = 0,
        buffer_bytes: int = 16 << 20,
        buffers: int = 16,
        pin: bool | None = None,
    ) -> None:
        """Make the file and reserve its space.

        Args:
            directory: a folder on a local drive; see `check_path`.
            sizes: elements and dtype of every state.
            io: how the file is read and written.
            rank: of this process, for messages.
            buffer_bytes: of one buffer, and so the most that one ``get`` brings; rounded up to whole pages.
            buffers: how many there are. A lease holds one, and so does a write until it is done.
            pin: register the buffers with CUDA; None: if CUDA is in use.

        Raises:
            ConfigError: no file can be made in the folder.
            PlanError: there is not enough space.
        """
        self.sizes = dict(sizes)
        self.buffer_bytes = _padded(buffer_bytes)
        self._offsets, nbytes = extents(self.sizes)
        io = io if io is not None else NVMeIOConfig()
        self._file = open_scratch(Path(directory), nbytes, rank=rank, direct=io.direct)
        self._engine = IOEngine(io)
        self._pool = BoundedPool(buffers, self.buffer_bytes, pin=torch.cuda.is_initialized() if pin is None else pin)
        self._under_way: dict[Key, list[_Access]] = defaultdict(list)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._error_told = False
        self._closed = False

    @property
    def bytes_read(self) -> int:
        """Read so far, padding to whole pages included."""
        return self._engine.bytes_read

    @property
    def bytes_written(self) -> int:
        """Written so far, padding to whole pages included."""
        return self._engine.bytes_written

    @property
    def busy_s(self) -> float:
        """Seconds so far in which something was being read or written."""
        return self._engine.busy_s

    def chunk_numel(self, dtype: torch.dtype) -> int:
        """The most elements of ``dtype`` that one ``get`` brings."""
        return self.buffer_bytes // dtype.itemsize

    def get(self, key: Key, start: int = 0, stop: int | None = None) -> NVMeLease:
        """Start reading elements ``[start, stop)`` into a buffer; waits for a free one, and for writes of that range.

        Args:
            key: the state.
            start: at a whole page of the state; multiples of 4096 elements always are.
            stop: at most `chunk_numel` further; the state's end without it.

        Raises:
            StateError: there is no such state or range, the tier is closed, or no buffer comes back.
            DriveError: an earlier write failed.
        """
        end, dtype = resolve_range(self.sizes, key, start, stop)
        self._raise_if_unusable()
        numel = end - start
        if numel > self.chunk_numel(dtype):
            raise StateError(
                f"{numel} elements of state {key[1]!r} of flat buffer {key[0]} in one get: the NVMe tier brings at "
                f"most {self.chunk_numel(dtype)} of {dtype} at a time. Ask in portions, or make it with larger buffers."
            )
        assert start * dtype.itemsize % PAGE == 0, f"get of {key} starts at {start}, inside a page"
        if numel == 0:
            return NVMeLease(self, None, torch.empty(0, dtype=dtype), None)
        buffer = self._pool.take(f"get of {key[1]!r} of flat buffer {key[0]}, elements [{start}, {end})")
        transfer = self._engine.transfer(self._file, "read")
        try:
            self._move(transfer, buffer, key, start * dtype.itemsize, numel * dtype.itemsize)
        except BaseException:
            self._recycle_after(transfer, buffer)
            raise
        return NVMeLease(self, buffer, buffer.elements(numel, dtype), transfer)

    def put(self, key: Key, value: Tensor | Lease, start: int = 0) -> None:
        """Start writing ``value`` to elements ``[start, start + n)``; a lease's buffer is written as it is.

        Args:
            key: the state.
            value: ``(n,)`` of the state's dtype, copied in portions of a buffer; or a lease of this tier, which ends.
            start: at a whole page of the state. The end must be at one too, or at the state's.

        Raises:
            StateError: there is no such state or range, the tier is closed, or no buffer comes back.
            DriveError: this lease could not be read, or an earlier write failed.
        """
        if isinstance(value, NVMeLease) and value.belongs_to(self):
            self._put_lease(key, value, start)
            return
        source = value if isinstance(value, Tensor) else value.wait()
        end, dtype = resolve_range(self.sizes, key, start, start + source.numel())
        self._check_writable(key, source.dtype, start, end)
        portion = self.buffer_bytes // dtype.itemsize
        for lo in range(start, end, portion):
            self._raise_if_unusable()
            hi = min(lo + portion, end)
            buffer = self._pool.take(f"put of {key[1]!r} of flat buffer {key[0]}, elements [{lo}, {hi})")
            try:
                buffer.elements(hi - lo, dtype).copy_(source[lo - start : hi - start])
            except BaseException:
                self._pool.give(buffer)
                raise
            self._write(key, buffer, lo * dtype.itemsize, (hi - lo) * dtype.itemsize)
        if not isinstance(value, Tensor):
            value.release()

    def flush(self) -> None:
        """Return when every write is done.

        Raises:
            DriveError: one was not; the first of them.
            StateError: the drive does not answer.
        """
        for access in self._all_in_flight():
            if access.transfer.verb == "write":
                self._engine.wait_until(access.transfer.finished)
        try:
            if not self._closed:
                self._file.sync()
        except DriveError as error:  # the kernel tells it once, and forgets
            self._error = self._error or error
        self._raise_error()

    def close(self) -> None:
        """Finish what was asked for, then give file, threads and buffers back. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._engine.close()
        self._file.close()
        self._pool.close()
        if self._error is not None and not self._error_told:
            logger.error("the NVMe tier was closed before anybody heard of this error: %s", self._error)

    def recycle(self, lease: NVMeLease) -> None:
        """Take a lease's buffer back."""
        if lease.buffer is not None and lease.transfer is not None:
            self._recycle_after(lease.transfer, lease.buffer)

    def _put_lease(self, key: Key, lease: NVMeLease, start: int) -> None:
        tensor = lease.wait()
        end, dtype = resolve_range(self.sizes, key, start, start + tensor.numel())
        self._check_writable(key, tensor.dtype, start, end)
        self._raise_if_unusable()
        lease.end()
        if lease.buffer is not None:
            self._write(key, lease.buffer, start * dtype.itemsize, tensor.numel() * dtype.itemsize)

    def _check_writable(self, key: Key, dtype: torch.dtype, start: int, end: int) -> None:
        numel, expected = self.sizes[key]
        assert dtype == expected, f"{dtype} put into state {key} of {expected}"
        # Whole pages are written, so a range that ended inside one would destroy what follows it.
        assert end == numel or end * dtype.itemsize % PAGE == 0, f"put of {key} ends at {end}, inside a page"
        assert start * dtype.itemsize % PAGE == 0, f"put of {key} starts at {start}, inside a page"

    def _write(self, key: Key, buffer: AlignedBuffer, begin: int, nbytes: int) -> None:
        """Write a buffer, which goes back to the pool when that is done."""
        transfer = self._engine.transfer(self._file, "write")
        transfer.when_finished(lambda: self._written(transfer, buffer))
        self._move(transfer, buffer, key, begin, nbytes)

    def _written(self, transfer: Transfer, buffer: AlignedBuffer) -> None:
        """On an I/O thread, when a write is done or has failed."""
        self._pool.give(buffer)
        with self._lock:
            self._error = self._error or transfer.error

    def _move(self, transfer: Transfer, buffer: AlignedBuffer, key: Key, begin: int, nbytes: int) -> None:
        """Queue a transfer of ``nbytes`` from byte ``begin`` of a state, after those that it must not overtake."""
        access = _Access(transfer, begin, begin + _padded(nbytes))
        with self._lock:
            under_way = [a for a in self._under_way[key] if not a.transfer.finished.is_set()]
            self._under_way[key] = [*under_way, access]
        try:
            for other in under_way:
                if access.must_wait_for(other):
                    self._engine.wait_until(other.transfer.finished)
            self._raise_if_unusable()
        except BaseException as error:
            transfer.finish(error)  # others may be waiting for it
            raise
        self._engine.submit(transfer, buffer.view[: access.end - begin], self._offsets[key] + begin)

    def _recycle_after(self, transfer: Transfer, buffer: AlignedBuffer) -> None:
        """Give a buffer back to the pool when the drive does not touch it any more."""
        transfer.when_finished(lambda: self._pool.give(buffer))

    def _all_in_flight(self) -> list[_Access]:
        with self._lock:
            return [access for accesses in self._under_way.values() for access in accesses]

    def _raise_if_unusable(self) -> None:
        if self._closed:
            raise StateError("the NVMe tier is closed, and its states are gone.")
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._error_told = True
            raise self._error
