"""Memory for direct I/O, and a pool with a fixed number of such buffers."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.errors import StateError
from ls_strategy.layout import round_up

logger = logging.getLogger("ls_strategy.tiers")

PAGE = 4096
"""Bytes. Direct I/O needs memory, offset and length in multiples of the device's block of 512 or 4096 bytes."""


class _Pages(mmap.mmap):
    """Private pages of memory. If they are registered with CUDA, they are unregistered with the last reference.

    Any thread may take the first and drop the last one, so each call selects the device: a thread that was never bound
    would make a context on the first GPU, of 0.5 GB, and wait for that one.
    """

    _registered: tuple[int, torch.device, int] | None = None
    """Address, device and process."""

    def register(self, address: int, device: torch.device) -> int:
        """Register the pages, which begin at ``address``, with CUDA; return the error code, 0 on success."""
        with dev.selected(device):
            status = dev.register_host_memory(address, len(self))
        if not status:
            self._registered = address, device, os.getpid()
        return status

    def unregister(self) -> None:
        """Undo `register`; no copy may be in flight. Idempotent."""
        registered, self._registered = self._registered, None
        if registered is not None and registered[2] == os.getpid():
            with dev.selected(registered[1]):
                dev.unregister_host_memory(registered[0])

    def __del__(self) -> None:
        # Otherwise the next memory at this address could not be registered. Unlike torch's own pinned memory, nobody
        # knows which copies still use this, and it is freed too seldom for this wait to matter.
        if self._registered is not None and self._registered[2] == os.getpid():
            dev.synchronize(self._registered[1])
            self.unregister()


class AlignedBuffer:
    """Page-aligned memory for direct I/O. It is freed with the last reference to it or its tensor.

    It uses huge pages if the kernel has them, which cost less per transfer than 4 KiB pages. Forked processes (workers
    of a DataLoader) do not get it: after a fork during a read, either side could have a stale copy, see open(2).
    """

    def __init__(self, nbytes: int, *, pin: torch.device | None = None) -> None:
        """Allocate zeros.

        Args:
            nbytes: at least one; rounded up to full pages.
            pin: register with CUDA, for direct copies from and to this device, until `unpin` or the memory's end. Torch
                rounds its own pinned memory up to a power of two, and keeps it.
        """
        self.nbytes = round_up(nbytes, PAGE)
        self._pages = _Pages(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages.madvise(mmap.MADV_DONTFORK)
        try:
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            logger.debug("no huge pages for buffers of the NVMe tier")
        self.view = memoryview(self._pages)
        """The bytes, for system calls."""
        self.tensor: Tensor = torch.frombuffer(self._pages, dtype=torch.uint8)
        """The bytes, ``(nbytes,)`` uint8."""
        if pin is not None:
            self._pin(pin)

    def elements(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first ``numel`` elements, ``(numel,)`` of ``dtype``."""
        return self.tensor[: numel * dtype.itemsize].view(dtype)

    def _pin(self, device: torch.device) -> None:
        status = self._pages.register(self.tensor.data_ptr(), device)
        if status:
            logger.warning(
                "CUDA did not pin %d bytes of host memory (error %d), so copies will be slower. Raise `ulimit -l`.",
                self.nbytes,
                status,
            )

    def unpin(self) -> None:
        """Unregister the memory from CUDA; no copy may be in flight. Idempotent."""
        self._pages.unregister()


class BoundedPool:
    """A fixed number of buffers that threads take and return."""

    patience_s = 60.0
    """`take` raises an error if no buffer was returned for this long."""

    def __init__(self, count: int, nbytes: int, *, pin: torch.device | None = None) -> None:
        """Hold up to ``count`` buffers of ``nbytes`` bytes each, allocated on demand; ``pin`` as in `AlignedBuffer`."""
        self.count, self.nbytes = count, nbytes
        self._pin = pin
        self._free: list[AlignedBuffer] = []
        self._holders: dict[AlignedBuffer, str] = {}
        self._moved = threading.Condition()
        self._moved_at = 0.0
        self._closed = False

    def take(self, holder: str) -> AlignedBuffer:
        """Wait for a free buffer and return it.

        Args:
            holder: the purpose of the buffer, for the error message.

        Raises:
            StateError: no buffer was returned for `patience_s`, so the holders wait for each other; or it is closed.
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
        """Return a buffer to the pool."""
        with self._moved:
            del self._holders[buffer]
            if self._closed:
                buffer.unpin()
            else:
                self._free.append(buffer)
            self._moved_at = time.monotonic()
            self._moved.notify()

    def close(self) -> None:
        """Drop the buffers. Those that are held may be in a copy: they are unpinned when they return. Idempotent."""
        with self._moved:
            self._closed = True
            for buffer in self._free:
                buffer.unpin()
            self._free.clear()
            self._moved.notify_all()

    def _exhausted(self, holder: str) -> str:
        held = "; ".join(self._holders.values())
        return (
            f"{holder} waits for a buffer: all {self.count} of {self.nbytes / 2**20:.1f} MiB are taken, and none was "
            f"returned for {self.patience_s:.0f} s. A holder must not wait for another buffer: release leases, or "
            f"create the tier with more buffers. Held by: {held}."
        )
