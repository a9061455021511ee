"""Copies between the device and its host, overlapped with the work of both.

On an accelerator, they run on separate streams, from and to pinned memory. Users of the result wait for an event, on
the device or on the host. If the device is the CPU, a copy is done when it returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy.tiers.arrival import DONE, Arrival
from ls_strategy.tiers.buffers import AlignedBuffer
from ls_strategy.tiers.stock import BufferStock


class Link:
    """The connection between one device and its host."""

    def __init__(self, device: torch.device) -> None:
        """Create a side stream for each direction, since PCIe is full duplex."""
        self.device = device
        self._down = dev.new_stream(device) if dev.is_accelerator(device) else None
        self._up = dev.new_stream(device) if dev.is_accelerator(device) else None
        self.stock = BufferStock(pin=dev.registering(device))
        """Host memory for what is only on its way to the device."""
        self._freed_bytes = 0

    def bind_thread(self) -> None:
        """Select the device in this thread; a new thread would use the first device."""
        dev.select(self.device)

    @contextmanager
    def aside(self, after: Any = None, *, work: str, down: bool = False) -> Iterator[None]:
        """Do what `enqueued` does, and wait for the work on the host at the end."""
        with self.enqueued(after, work=work, down=down):
            yield
            done = self.mark()
        Arrival(done).wait_on_host()

    @contextmanager
    def enqueued(self, after: Any = None, *, work: str = "update on the device", down: bool = False) -> Iterator[None]:
        """Run the device's work inside the context on a side stream; nobody waits for it.

        Args:
            after: from `mark`; begin when the device has passed it.
            work: its name in traces.
            down: on the stream of copies to the host, not of those to the device.
        """
        side = self._down if down else self._up
        if side is None:
            yield
            return
        if after is not None:
            side.wait_event(after)
        with dev.on(side), spans.copying_on(side, work, 0):
            yield

    def to_host(self, host: Tensor, source: Tensor) -> Arrival:
        """Start copying ``source`` (on the device, after the current stream's work) into ``host`` (pinned)."""
        if self._down is None:
            with spans.copying("to host", host.nbytes):
                host.copy_(source)
            return DONE
        return self._copy(self._down, host, source)

    def mark(self) -> Any:
        """Return a mark in the current stream's work, for ``after``."""
        if self._up is None:
            return None
        return dev.record(self.device)

    def to_device(self, target: Tensor, source: Tensor, after: Any = None) -> Arrival:
        """Start copying ``source`` (pinned host memory, same dtype) into ``target`` (device).

        Args:
            target: written when the device has passed ``after``. Wait for the arrival, in the stream in which it was
                allocated, before its storage is resized.
            source: must not change before the copy has arrived.
            after: from `mark`; by default, after all present work of the current stream.
        """
        if self._up is None:
            with spans.copying("to device", target.nbytes):
                target.copy_(source)
            return DONE
        return self._copy(self._up, target, source, after)

    def staged_to_device(self, target: Tensor, fill: Callable[[Tensor], object], after: Any = None) -> Arrival:
        """Let ``fill`` write host memory of the size and dtype of ``target``, then start copying it there.

        Args:
            target: contiguous.
            fill: called before this returns.
            after: see `to_device`.
        """
        buffer = self.stock.take_idle(target.nbytes)
        source = buffer.elements(target.numel(), target.dtype)
        fill(source)
        arrival = self.to_device(target, source, after)
        self.stock.give(buffer, arrival)
        return arrival

    def _copy(self, stream: torch.Stream, target: Tensor, source: Tensor, after: Any = None) -> Arrival:
        if after is None:
            stream.wait_stream(dev.stream(self.device))
        else:
            stream.wait_event(after)
        name = "to host" if dev.is_host(target.device) else "to device"
        with dev.on(stream), spans.copying_on(stream, name, target.nbytes):
            target.copy_(source, non_blocking=True)
            event = dev.record(self.device, stream)
        return Arrival(event, source, source if dev.is_host(target.device) else target, stream)

    def freed(self, nbytes: int) -> None:
        """Note that the device freed ``nbytes``. If it is the host, return them to the system from time to time.

        Small activations that are allocated between a release and the next gather make holes in the heap which no
        buffer fits again. A heap that nobody trims grows by a copy of the parameters (measured: 2 bytes of each).
        """
        if dev.is_host(self.device):
            self._freed_bytes += nbytes
            if self._freed_bytes >= _UNTRIMMED_BYTES:
                self._freed_bytes = 0
                trim_heap()


_UNTRIMMED_BYTES = 32 << 20
"""Memory of released buffers that the heap may keep: `trim_heap` and the new pages take about 0.3 ms per MiB."""

_OWN_PAGES_BYTES = {False: 1 << 20, True: 1 << 16}
"""Smallest tensor in pages of its own, by whether it is pinned."""


def host_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized host memory for copies from and to ``device``, ``(numel,)``; pinned for an accelerator.

    Large tensors get pages of their own. On the heap, between short-lived activations and gradients, they would cause
    fragmentation (measured: 1 to 3 bytes per parameter); and torch rounds pinned memory up to a power of two, up to
    twice what is needed, and keeps it when it is freed. New pages take time (pinned ones about 0.1 ms per MiB): for
    memory that is needed for a short time there is `Link.stock`.
    """
    nbytes = numel * dtype.itemsize
    pinned = dev.is_accelerator(device)
    own_pages = dev.can_register(device) or not pinned
    if own_pages and nbytes >= _OWN_PAGES_BYTES[pinned]:
        return AlignedBuffer(nbytes, pin=device if pinned else None).elements(numel, dtype)
    return torch.empty(numel, dtype=dtype, pin_memory=pinned)


def trim_heap() -> None:
    """Return free memory of the C heap to the system, if the C library supports it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
