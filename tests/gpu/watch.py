"""What a program is watched with: late streams, waits of the host for the device, pinned memory."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.tiers.arrival import Arrival
from tests.simulated_device.programs import Block
from tests.simulated_device.timeline import caller

CYCLES = 2_000_000
"""About a millisecond of a GPU."""


def sleep() -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(CYCLES)


@contextmanager
def late_side_streams(sleep: Callable[[], None] = sleep) -> Iterator[None]:
    """Put ``sleep`` in front of every copy and update on a side stream, so that nothing is there by luck.

    A wait for a copy that is missing shows in the numbers. All side streams are used through `device.on`.
    """
    on = dev.on

    @contextmanager
    def late(stream: torch.Stream) -> Iterator[None]:
        with on(stream):
            sleep()
            yield

    with mock.patch.object(dev, "on", late):
        yield


@contextmanager
def late_computation(sleep: Callable[[], None] = sleep) -> Iterator[None]:
    """Put ``sleep`` in front of every block's forward and backward: a copy that does not wait for them is early."""
    forward = Block.forward

    def late(block: Block, x: Tensor) -> Tensor:
        sleep()
        out = forward(block, x)
        if out.requires_grad:
            out.register_hook(lambda grad: sleep())
        return out

    with mock.patch.object(Block, "forward", late):
        yield


LATE: dict[str, Callable[..., Any]] = {"side streams": late_side_streams, "computation": late_computation}


# waits of the host ---------------------------------------------------------------------------------------------------

SYNCHRONIZING = "called a synchronizing CUDA operation"
"""Torch's warning."""


class HostWaits(pl.Callback):
    """Counts how often training has waited for the device in steps ``[first, last]``, by the line of the package.

    What torch itself reports (``torch.cuda.set_sync_debug_mode``), and waits for events of copies, which it does not.
    Threads that run in the background may wait.
    """

    def __init__(self, first: int = 3, last: int = 8, set_mode: Callable[[str], None] | None = None) -> None:
        self.first, self.last = first, last
        self.lines: Counter[str] = Counter()
        self._set_mode = torch.cuda.set_sync_debug_mode if set_mode is None else set_mode
        self._undo: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 != self.first:
            return
        caught = warnings.catch_warnings()
        caught.__enter__()
        wait = Arrival.wait_on_host

        def noting(arrival: Arrival) -> None:
            if arrival._event is not None:
                self._note()
            wait(arrival)

        patch = mock.patch.object(Arrival, "wait_on_host", noting)
        patch.start()
        self._undo = [patch.stop, lambda: caught.__exit__(None, None, None), lambda: self._set_mode("default")]
        warnings.simplefilter("always")
        warnings.showwarning = self._on_warning  # type: ignore[assignment]
        self._set_mode("warn")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.last:
            self.on_exception(trainer, module, None)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: Any) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def _on_warning(self, message: Any, *args: Any, **options: Any) -> None:
        if SYNCHRONIZING in str(message):
            self._note()

    def _note(self) -> None:
        if not threading.current_thread().name.startswith("ls_"):
            self.lines[caller()] += 1


# pinned memory -------------------------------------------------------------------------------------------------------


class PinnedBytes:
    """Counts the most host memory that was pinned at once since this was entered: registered by us, or torch's own."""

    def __init__(self) -> None:
        self.registered = 0
        """Peak of what `device.register_host_memory` has pinned."""
        self.by_torch = 0
        """Peak of what torch has handed out, rounded up to powers of two as it does; 0 where it does not count."""
        self._now: dict[int, int] = {}
        self._lock = threading.RLock()
        self._patches: list[Any] = []

    def __enter__(self) -> PinnedBytes:
        register, unregister = dev.register_host_memory, dev.unregister_host_memory

        def noting(address: int, nbytes: int) -> int:
            status = register(address, nbytes)
            with self._lock:
                if not status:
                    self._now[address] = nbytes
                    self.registered = max(self.registered, sum(self._now.values()))
            return status

        def forgetting(address: int) -> None:
            with self._lock:
                self._now.pop(address, None)
            unregister(address)

        self._patches = [
            mock.patch.object(dev, "register_host_memory", noting),
            mock.patch.object(dev, "unregister_host_memory", forgetting),
        ]
        for patch in self._patches:
            patch.start()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_host_memory_stats()
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in self._patches:
            patch.stop()
        if torch.cuda.is_available():
            stats = torch.cuda.host_memory_stats()
            self.by_torch = int(stats.get("active_bytes.peak", 0))
