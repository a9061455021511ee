"""Memory for direct I/O, and a fixed number of pieces of it that threads share."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from typing import Any

import torch
from torch import Tensor

from ls_strategy.errors import StateError

logger = logging.getLogger("ls_strategy.tiers")

PAGE = 4096
"""Direct I/O wants memory, offset and length in multiples of the drive's block: 512 or 4096 bytes. This fits both."""


class AlignedBuffer:
    """Memory that direct I/O can use: it begins at a page. Freed when nothing refers to it or its tensor any more.

    Private memory may use huge pages, which are cheaper to hand to the drive than 4 KiB ones. It is kept out of forked
    processes (workers of a DataLoader): a fork while the drive fills it could leave either side with a stale copy, see
    open(2).
    """

    def __init__(self, nbytes: int, *, pin: bool = False) -> None:
        """Allocate zeros.

        Args:
            nbytes: at least one; rounded up to whole pages.
            pin: register with CUDA, so that copies from and to the device take no detour.
        """
        self.nbytes = -(-nbytes // PAGE) * PAGE
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            logger.debug("no huge pages for buffers of the NVMe tier")
        self.view = memoryview(memory)
        """The bytes, for system calls."""
        self.tensor: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        """The bytes, ``(nbytes,)`` uint8."""
        self._pinned = pin and self._register()

    def elements(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first ``numel`` elements, ``(numel,)`` of ``dtype``."""
        return self.tensor[: numel * dtype.itemsize].view(dtype)

    def _register(self) -> bool:
        status = int(_cudart().cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0))
        if status:
            logger.warning(
                "CUDA did not pin %d bytes of host memory (error %d): copies will be slower. Raise `ulimit -l`.",
                self.nbytes,
                status,
            )
        return not status

    def unpin(self) -> None:
        """Take the memory back from CUDA; nothing may be copying it. Idempotent."""
        if self._pinned:
            _cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._pinned = False


class BoundedPool:
    """A fixed number of buffers that threads take and give back."""

    patience_s = 60.0
    """`take` gives up when no buffer has come back for this long."""

    def __init__(self, count: int, nbytes: int, *, pin: bool = False) -> None:
        """Up to ``count`` buffers of ``nbytes`` bytes each, made when first needed."""
        self.count, self.nbytes = count, nbytes
        self._pin = pin
        self._free: list[AlignedBuffer] = []
        self._holders: dict[AlignedBuffer, str] = {}
        self._moved = threading.Condition()
        self._moved_at = 0.0
        self._closed = False

    def take(self, holder: str) -> AlignedBuffer:
        """A buffer; waits until there is one.

        Args:
            holder: who holds it from now on, for the error message of those who wait in vain.

        Raises:
            StateError: none has come back for `patience_s`: those who hold them wait for each other. Or it is closed.
        """
        since = time.monotonic()
        with self._moved:
            while not self._free and len(self._holders) >= self.count and not self._closed:
                left = self.patience_s - (time.monotonic() - max(since, self._moved_at))
                if left <= 0:
                    raise StateError(self._exhausted(holder))
                self._moved.wait(timeout=left)
            if self._closed:
                raise StateError(f"{holder}: the NVMe tier is closed.")
            buffer = self._free.pop() if self._free else AlignedBuffer(self.nbytes, pin=self._pin)
            self._holders[buffer] = holder
            return buffer

    def give(self, buffer: AlignedBuffer) -> None:
        """Give a buffer back."""
        with self._moved:
            del self._holders[buffer]
            if not self._closed:
                self._free.append(buffer)
            self._moved_at = time.monotonic()
            self._moved.notify()

    def close(self) -> None:
        """Forget the buffers; those still held are freed when their tensors are. Idempotent."""
        with self._moved:
            self._closed = True
            for buffer in (*self._free, *self._holders):
                buffer.unpin()
            self._free.clear()
            self._moved.notify_all()

    def _exhausted(self, holder: str) -> str:
        held = "; ".join(self._holders.values())
        return (
            f"{holder} waits for a buffer: all {self.count} of {self.nbytes / 2**20:.1f} MiB are taken, and none has "
            f"come back for {self.patience_s:.0f} s. Who holds one must not wait for another: release leases, or make "
            f"the tier with more buffers. Held by: {held}."
        )


def _cudart() -> Any:
    return torch.cuda.cudart()
