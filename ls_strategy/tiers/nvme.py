"""The NVMe tier: model states in one file per rank, accessed in chunks.

::

    file   | 0:master ......... | 0:exp_avg ........ | 1:master .. | ...        one extent per state, at full pages
                   ▲ │ put: pwritev
           preadv  │ ▼
    memory       [buffer] [buffer] [buffer] ...                                a fixed number for any model size

If transfers access the same bytes and one of them writes, they keep the order of their calls, across threads. Others
overlap. A failed write breaks the tier: every later call raises its error, since states are missing.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import StateError
from ls_strategy.layout import round_up
from ls_strategy.tiers.base import Key, Lease, Sizes, resolve_range
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer, BoundedPool
from ls_strategy.tiers.file_io import IOEngine, NVMeError, Transfer
from ls_strategy.tiers.nvme_folder import open_scratch

logger = logging.getLogger("ls_strategy.tiers")


def extents(sizes: Sizes) -> tuple[dict[Key, int], int]:
    """Return the offset of each state in the file, and the file's bytes. States begin at a page and are padded.

    >>> extents({(0, "master"): (1, torch.float32), (0, "exp_avg"): (1025, torch.float32)})
    ({(0, 'master'): 0, (0, 'exp_avg'): 4096}, 12288)
    """
    offsets: dict[Key, int] = {}
    end = 0
    for key, (numel, dtype) in sizes.items():
        offsets[key] = end
        end += round_up(numel * dtype.itemsize, PAGE)
    return offsets, end


class _Access:
    """A transfer, and the byte range of its state."""

    def __init__(self, transfer: Transfer, begin: int, end: int) -> None:
        self.transfer = transfer
        self.begin, self.end = begin, end

    def must_wait_for(self, other: _Access) -> bool:
        overlap = self.begin < other.end and other.begin < self.end
        return overlap and "write" in (self.transfer.verb, other.transfer.verb)


class NVMeLease:
    """Elements in a buffer of the tier."""

    def __init__(self, tier: NVMeTier, buffer: AlignedBuffer | None, tensor: Tensor, transfer: Transfer | None) -> None:
        """Wrap a buffer and its read, which are both None for a range without elements."""
        self.buffer = buffer
        self.transfer = transfer
        self._tier = tier
        self._tensor = tensor
        self._ended = False

    def wait(self) -> Tensor:
        """Return the elements, a view of the buffer.

        Raises:
            NVMeError: reading failed.
            StateError: the lease was released or put, or the device hangs.
        """
        if self._ended:
            raise StateError("this lease was released or put, and its buffer may hold another state now. Get it again.")
        if self.transfer is not None:
            self.transfer.wait()
        return self._tensor

    def release(self) -> None:
        """Return the buffer when its read is done. Does not wait. Idempotent."""
        if not self._ended:
            self.end()
            if self.buffer is not None and self.transfer is not None:
                self._tier.recycle_after(self.transfer, self.buffer)

    def end(self) -> None:
        """End the lease: the buffer has another owner now."""
        self._ended = True

    def belongs_to(self, tier: NVMeTier) -> bool:
        """Return whether ``tier`` made this lease."""
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
        device: torch.device | None = None,
    ) -> None:
        """Create the file and reserve its space.

        Args:
            directory: a folder on a local NVMe device; see `check_path`.
            sizes: elements and dtype of every state.
            io: settings of reads and writes.
            rank: of this process, for messages.
            buffer_bytes: size of a buffer, and the maximum of one ``get``; rounded up to full pages.
            buffers: number of buffers. A lease holds one, and so does a write in flight.
            device: the buffers are pinned for copies from and to it. None: for the one in use, if there is one.

        Raises:
            ConfigError: no file can be created in the folder.
            PlanError: there is not enough space.
        """
        self.sizes = dict(sizes)
        self.buffer_bytes = round_up(buffer_bytes, PAGE)
        self._offsets, nbytes = extents(self.sizes)
        io = io if io is not None else NVMeIOConfig()
        self._file = open_scratch(Path(directory), nbytes, rank=rank, direct=io.direct)
        self._engine = IOEngine(io)
        if device is None and dev.is_in_use():
            device = dev.current()
        self._pool = BoundedPool(buffers, self.buffer_bytes, pin=None if device is None else dev.registering(device))
        self._in_flight: dict[Key, list[_Access]] = defaultdict(list)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._error_raised = False
        self._closed = False

    @property
    def bytes_read(self) -> int:
        """Return the bytes read so far, with padding to full pages."""
        return self._engine.bytes_read

    @property
    def bytes_written(self) -> int:
        """Return the bytes written so far, with padding to full pages."""
        return self._engine.bytes_written

    @property
    def busy_s(self) -> float:
        """Return the seconds so far with a read or write in flight."""
        return self._engine.busy_s

    def chunk_numel(self, dtype: torch.dtype) -> int:
        """Return the maximum elements of ``dtype`` of one ``get``."""
        return self.buffer_bytes // dtype.itemsize

    def get(self, key: Key, start: int = 0, stop: int | None = None) -> NVMeLease:
        """Start reading elements ``[start, stop)`` into a buffer. Wait for a free one, and for writes of that range.

        Args:
            key: the state.
            start: at a page of the state, as every multiple of 4096 elements is.
            stop: at most ``start + chunk_numel(dtype)``. Default: the state's end.

        Raises:
            StateError: there is no such state or range, the tier is closed, or no buffer is returned.
            NVMeError: an earlier write failed.
        """
        end, dtype = resolve_range(self.sizes, key, start, stop)
        self._raise_if_unusable()
        numel = end - start
        if numel > self.chunk_numel(dtype):
            raise StateError(
                f"Got a request for {numel} elements of state {key[1]!r} of flat buffer {key[0]}, but the NVMe tier "
                f"reads at most {self.chunk_numel(dtype)} of {dtype} at a time. Request chunks, or create it with "
                "larger buffers."
            )
        assert start * dtype.itemsize % PAGE == 0, f"get of {key} starts at {start}, inside a page"
        if numel == 0:
            return NVMeLease(self, None, torch.empty(0, dtype=dtype), None)
        buffer = self._pool.take(f"get of {key[1]!r} of flat buffer {key[0]}, elements [{start}, {end})")
        transfer = self._engine.transfer(self._file, "read")
        try:
            self._move(transfer, buffer, key, start * dtype.itemsize, numel * dtype.itemsize)
        except BaseException:
            self.recycle_after(transfer, buffer)
            raise
        return NVMeLease(self, buffer, buffer.elements(numel, dtype), transfer)

    def put(self, key: Key, value: Tensor | Lease, start: int = 0) -> None:
        """Start writing ``value`` to elements ``[start, start + n)``. A lease's buffer is written without a copy.

        Args:
            key: the state.
            value: ``(n,)`` of the state's dtype, copied in chunks of a buffer; or a lease of this tier, which ends.
            start: at a page of the state. The end must be at a page too, or at the state's end.

        Raises:
            StateError: there is no such state or range, the tier is closed, or no buffer is returned.
            NVMeError: the lease's read or an earlier write failed.
        """
        if isinstance(value, NVMeLease) and value.belongs_to(self):
            tensor = value.wait()
            end, dtype = resolve_range(self.sizes, key, start, start + tensor.numel())
            self._check_writable(key, tensor.dtype, start, end)
            self._raise_if_unusable()
            value.end()
            if value.buffer is not None:
                self._write(key, value.buffer, start * dtype.itemsize, tensor.numel() * dtype.itemsize)
            return
        source = value if isinstance(value, Tensor) else value.wait()
        end, dtype = resolve_range(self.sizes, key, start, start + source.numel())
        self._check_writable(key, source.dtype, start, end)
        chunk = self.buffer_bytes // dtype.itemsize
        for lo in range(start, end, chunk):
            self._raise_if_unusable()
            hi = min(lo + chunk, end)
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
        """Wait until every write is done.

        Raises:
            NVMeError: the first failed write.
            StateError: the device hangs.
        """
        with self._lock:
            in_flight = [access for accesses in self._in_flight.values() for access in accesses]
        for access in in_flight:
            if access.transfer.verb == "write":
                self._engine.wait_until(access.transfer.finished)
        try:
            if not self._closed:
                self._file.sync()
        except NVMeError as error:  # the kernel reports it only once
            self._error = self._error or error
        self._raise_error()

    def close(self) -> None:
        """Finish pending transfers, then free file, threads and buffers. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._engine.close()
        self._file.close()
        self._pool.close()
        if self._error is not None and not self._error_raised:
            logger.error("the NVMe tier was closed with an error that was not raised before: %s", self._error)

    def _check_writable(self, key: Key, dtype: torch.dtype, start: int, end: int) -> None:
        numel, expected = self.sizes[key]
        assert dtype == expected, f"{dtype} put into state {key} of {expected}"
        # Full pages are written, so a range that ends inside one would destroy the data after it.
        assert end == numel or end * dtype.itemsize % PAGE == 0, f"put of {key} ends at {end}, inside a page"
        assert start * dtype.itemsize % PAGE == 0, f"put of {key} starts at {start}, inside a page"

    def _write(self, key: Key, buffer: AlignedBuffer, begin: int, nbytes: int) -> None:
        transfer = self._engine.transfer(self._file, "write")
        transfer.when_finished(lambda: self._written(transfer, buffer))
        self._move(transfer, buffer, key, begin, nbytes)

    def _written(self, transfer: Transfer, buffer: AlignedBuffer) -> None:
        """Handle a finished or failed write, on an I/O thread."""
        self._pool.give(buffer)
        with self._lock:
            self._error = self._error or transfer.error

    def _move(self, transfer: Transfer, buffer: AlignedBuffer, key: Key, begin: int, nbytes: int) -> None:
        """Queue a transfer of ``nbytes`` from byte ``begin`` of a state, after transfers that it conflicts with."""
        access = _Access(transfer, begin, begin + round_up(nbytes, PAGE))
        with self._lock:
            in_flight = [a for a in self._in_flight[key] if not a.transfer.finished.is_set()]
            self._in_flight[key] = [*in_flight, access]
        try:
            for other in in_flight:
                if access.must_wait_for(other):
                    self._engine.wait_until(other.transfer.finished)
            self._raise_if_unusable()
        except BaseException as error:
            transfer.finish(error)  # other transfers may wait for it
            raise
        self._engine.submit(transfer, buffer.view[: access.end - begin], self._offsets[key] + begin)

    def recycle_after(self, transfer: Transfer, buffer: AlignedBuffer) -> None:
        """Return a buffer to the pool when the transfer is done."""
        transfer.when_finished(lambda: self._pool.give(buffer))

    def _raise_if_unusable(self) -> None:
        if self._closed:
            raise StateError("the NVMe tier is closed, and its states are lost.")
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._error_raised = True
            raise self._error
