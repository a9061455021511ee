"""Read and write a file in the background.

::

    read(view, offset) ─► blocks ─► queue ─► thread 0: preadv ─┐
                                        ├──► thread 1: preadv ─┼─► last block done: the transfer is done
                                        └──► thread 2: preadv ─┘

Blocks are processed first in, first out. Threads are sufficient: system calls release the interpreter lock, and with
direct I/O the device writes to memory itself (0.02 s of CPU per 512 MiB), so four threads reach the bandwidth of fio.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import LSError, StateError
from ls_strategy.tiers.buffers import PAGE

logger = logging.getLogger("ls_strategy.tiers")

STALLED_S = 120.0
"""A waiter raises an error instead of hanging if no block has finished for this long. A healthy device moves a block in
milliseconds, and a reset of its controller takes at most the kernel's 30 s per command."""

_REFUSES_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)

_CURES = {
    errno.EIO: "The NVMe device reports an error (see dmesg and smartctl). Use another device.",
    errno.ENOSPC: "The file system is full. Free space on it, or use another one.",
    errno.EDQUOT: "The quota of this user is used up. Free space, or use another file system.",
    errno.EFBIG: "The file exceeds the size limit. Raise `ulimit -f`, or use another file system.",
    errno.EROFS: "The file system is read-only, probably after errors of the device (see dmesg). Use another one.",
}
_CURE = "See the kernel's messages about the device in dmesg, or use another one."


class NVMeError(LSError, OSError):
    """Reading or writing a file of the NVMe tier failed; `errno` has the reason."""


class DirectFile:
    """An open file that bypasses the page cache, unless the file system refuses direct I/O."""

    def __init__(self, fd: int, name: str, *, direct: bool) -> None:
        """Own ``fd``, which must be open for reading and writing.

        Args:
            fd: the descriptor.
            name: for messages.
            direct: use ``O_DIRECT`` if the file system allows it.
        """
        self.fd, self.name = fd, name
        self.direct = False
        self._lock = threading.Lock()
        if direct:
            try:
                self._set_direct(True)
            except OSError as error:
                if error.errno not in _REFUSES_DIRECT:
                    raise
                self._warn(error)

    def read(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from the file, from ``offset`` on. See `_move`."""
        self._move("reading", view, offset)

    def write(self, view: memoryview, offset: int) -> None:
        """Store ``view`` at ``offset``. See `_move`."""
        self._move("writing", view, offset)

    def sync(self) -> None:
        """Write the page cache back, so that an error of the device is not lost there.

        Raises:
            NVMeError: writing back failed.
        """
        if self.direct:
            return
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            raise self._error("writing back", 0, 0, error.errno or errno.EIO) from error

    def close(self) -> None:
        """Free the space, and close. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # A forked process keeps the file open, and with it the space, so truncate here.
            with contextlib.suppress(OSError):  # of a failed device; closing frees the space
                os.ftruncate(fd, 0)
            os.close(fd)

    def _move(self, verb: str, view: memoryview, offset: int) -> None:
        """Move every byte, with more calls if one moves fewer bytes than requested.

        Raises:
            NVMeError: a call failed, or calls move nothing.
        """
        call = os.preadv if verb == "reading" else os.pwritev
        done = idle = 0
        while done < len(view):
            direct = self.direct  # before the call: another thread may fall back while this one is refused
            try:
                moved = call(self.fd, [view[done:]], offset + done)
            except OSError as error:
                if direct and error.errno in _REFUSES_DIRECT:
                    with self._lock:
                        if self.direct:
                            self._set_direct(False)
                            self._warn(error)
                    continue
                raise self._error(verb, len(view) - done, offset + done, error.errno or errno.EIO) from error
            if direct and done + moved < len(view):
                moved -= moved % PAGE  # the next call must begin at a page
            idle = 0 if moved else idle + 1
            if idle > 3:
                raise self._error(verb, len(view) - done, offset + done, errno.EIO)
            done += moved

    def _set_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        self.direct = direct

    def _warn(self, error: OSError) -> None:
        logger.warning(
            "%s: this file system refuses direct I/O (%s). The NVMe tier uses the page cache, which takes host memory "
            "and CPU time. Use a local ext4 or XFS.",
            self.name,
            error.strerror,
        )

    def _error(self, verb: str, nbytes: int, offset: int, number: int) -> NVMeError:
        text = f"{verb} {nbytes} bytes at offset {offset} failed: {os.strerror(number)}. {_CURES.get(number, _CURE)}"
        return NVMeError(number, f"{text} The states in this file are lost. Resume from a checkpoint", self.name)


class Transfer:
    """One read or write of the I/O engine."""

    def __init__(self, engine: IOEngine, file: DirectFile, verb: Literal["read", "write"]) -> None:
        """Start unfinished; `IOEngine.submit` starts the transfer."""
        self.file, self.verb = file, verb
        self.error: BaseException | None = None
        self.blocks_left = 0
        self.finished = threading.Event()
        self._engine = engine
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []

    def wait(self) -> None:
        """Wait until every byte was moved.

        Raises:
            NVMeError: a block failed.
            StateError: the engine is stalled.
        """
        self._engine.wait_until(self.finished)
        if self.error is not None:
            raise self.error

    def when_finished(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on an I/O thread when the memory is free to use, before `wait` returns.

        It runs after an error too, and at once if the transfer is finished.
        """
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the transfer as done, or as failed with ``error``."""
        self.error = self.error or error
        with self._lock:
            callbacks, self._callbacks = self._callbacks or [], None
        try:
            for callback in callbacks:
                callback()
        finally:
            self.finished.set()


class _IOBlock(NamedTuple):
    transfer: Transfer
    view: memoryview
    offset: int


class IOEngine:
    """Threads that move blocks, first in, first out."""

    def __init__(self, io: NVMeIOConfig) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self.busy_s = 0.0
        """Seconds with at least one block in flight."""
        self._io = io
        self._queue: deque[_IOBlock] = deque()
        self._unfinished = 0
        self._active = 0
        self._active_since = 0.0
        self._moved_at = 0.0
        self._closing = False
        self._select_device = dev.selecting()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._threads = [
            threading.Thread(target=self._run, name=f"ls_strategy-io-{i}", daemon=True) for i in range(io.parallelism)
        ]
        for thread in self._threads:
            thread.start()

    def transfer(self, file: DirectFile, verb: Literal["read", "write"]) -> Transfer:
        """Return a transfer that `submit` starts later."""
        return Transfer(self, file, verb)

    def submit(self, transfer: Transfer, view: memoryview, offset: int) -> None:
        """Queue the blocks of a transfer; wait while ``queue_depth`` blocks are in flight.

        Args:
            transfer: from `transfer`.
            view: page-aligned memory; reserved until the transfer is finished.
            offset: position in the file, at a page.

        Raises:
            StateError: the engine is closed, or stalled. The transfer finishes with that error.
        """
        block = self._io.block_bytes
        starts = range(0, len(view), block)
        transfer.blocks_left = len(starts)
        if not starts:
            transfer.finish()
        for i, start in enumerate(starts):
            try:
                self._enqueue(_IOBlock(transfer, view[start : start + block], offset + start))
            except StateError as error:
                self._drop(transfer, len(starts) - i, error)
                raise

    def read(self, file: DirectFile, view: memoryview, offset: int) -> Transfer:
        """Start filling ``view`` from the file."""
        transfer = self.transfer(file, "read")
        self.submit(transfer, view, offset)
        return transfer

    def write(self, file: DirectFile, view: memoryview, offset: int) -> Transfer:
        """Start storing ``view`` in the file."""
        transfer = self.transfer(file, "write")
        self.submit(transfer, view, offset)
        return transfer

    def wait_until(self, finished: threading.Event) -> None:
        """Wait until ``finished`` is set.

        Raises:
            StateError: no block of any transfer has finished for `STALLED_S`.
        """
        since = time.monotonic()
        with spans.waiting(spans.COPY):
            while not finished.wait(timeout=min(5.0, STALLED_S)):
                self._raise_if_stalled(since)

    def close(self) -> None:
        """Finish what is queued and end the threads. Idempotent."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._room.notify_all()
        deadline = time.monotonic() + STALLED_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))
        self._threads = []

    def _raise_if_stalled(self, since: float) -> None:
        idle = time.monotonic() - max(since, self._moved_at)
        if idle > STALLED_S:
            raise StateError(
                f"no block was read or written for {idle:.0f} s, and {self._unfinished} are waiting. The NVMe device "
                "hangs: see the kernel's messages in dmesg, and use another device, or offload to the CPU."
            )

    def _enqueue(self, block: _IOBlock) -> None:
        since = time.monotonic()
        with self._lock:
            while self._unfinished >= self._io.queue_depth and not self._closing:
                self._room.wait(timeout=min(5.0, STALLED_S))
                self._raise_if_stalled(since)
            if self._closing:
                raise StateError("the NVMe tier is closed: nothing can be read or written any more.")
            self._queue.append(block)
            self._unfinished += 1
            self._work.notify()

    def _run(self) -> None:
        self._select_device()
        while True:
            with self._lock:
                while not self._queue and not self._closing:
                    self._work.wait()
                if not self._queue:
                    return
                block = self._queue.popleft()
                if self._active == 0:
                    self._active_since = time.monotonic()
                self._active += 1
            self._complete(block, self._move(block))
            del block  # free its memory while this thread waits

    def _move(self, block: _IOBlock) -> BaseException | None:
        transfer = block.transfer
        if transfer.error is not None:  # the other blocks of a failed transfer are useless
            return None
        try:
            with spans.copying(f"drive {transfer.verb}", len(block.view)):
                (transfer.file.read if transfer.verb == "read" else transfer.file.write)(block.view, block.offset)
        except BaseException as error:  # `Transfer.wait` raises it
            return error
        return None

    def _complete(self, block: _IOBlock, error: BaseException | None) -> None:
        with self._lock:
            self._moved_at = time.monotonic()
            self._unfinished -= 1
            self._active -= 1
            if self._active == 0:
                self.busy_s += self._moved_at - self._active_since
            if error is None:
                if block.transfer.verb == "read":
                    self.bytes_read += len(block.view)
                else:
                    self.bytes_written += len(block.view)
            self._room.notify()
        self._drop(block.transfer, 1, error)

    def _drop(self, transfer: Transfer, blocks: int, error: BaseException | None) -> None:
        """Count ``blocks`` of a transfer as done."""
        with self._lock:
            transfer.blocks_left -= blocks
            transfer.error = transfer.error or error
            last = transfer.blocks_left == 0
        if last:
            transfer.finish()
