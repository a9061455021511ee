"""Background saves: one thread per rank writes one checkpoint at a time while training continues.

A save captures the state at the time of the call. States on the device are copied to host memory at once. Offloaded
states are not copied until an optimizer step is about to change them. That step finds a `Hold` on the flat buffer. It
first copies what the save has not read yet (host memory), or waits until the save has read it (NVMe). What goes into a
single file may have been gathered on rank 0, and is copied there.

A thread is enough: copying, writing, syncing and checksums release the GIL, and `RankFile` keeps the Python code per
chunk short. What training waits for is the copy, which another process would need as well.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy._torch import default_store
from ls_strategy.checkpoint.reshard import CheckpointEntry, Source
from ls_strategy.checkpoint.save import FileSave, Save, SharedFileSave, run
from ls_strategy.errors import CheckpointError
from ls_strategy.tiers.link import host_empty
from ls_strategy.zero.flat.flat_buffer import FlatBuffer

_log = logging.getLogger(__name__)

_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.02
"""Seconds between two polls of the store. They grow, so that a wait ends at most a third later than it could."""

Values = tuple[tuple[int, ...], Tensor]
"""Offsets in the full tensor, and values."""


class BackgroundSaver:
    """Runs the background saves of one rank. All ranks call its methods in the same order."""

    def __init__(self, rank: int, world_size: int, device: torch.device, name: str = "") -> None:
        """Start the thread.

        Args:
            rank: of this process.
            world_size: number of ranks that save together.
            device: that of this rank. A new thread would use the first one.
            name: the same on all ranks, and that of no other saver which the rendezvous store has seen.
        """
        self._rank, self._world_size = rank, world_size
        self._prefix, self._numbers = f"ls_strategy/save/{name}", itertools.count()
        self._worker = ThreadPoolExecutor(1, "ls_strategy_save", dev.select, (device,))
        self._pending: list[Future[None]] = []
        self._failed = False
        self._abandoned = threading.Event()
        self._exchange: StoreExchange | None = None
        self._copies, self._aside, self._read = _Staging(device), *(_Staging(torch.device("cpu")) for _ in range(2))
        self.busy_s = 0.0
        """CPU time of the thread in the last save that has ended, without what it waited for, in seconds."""

    def submit(
        self,
        save: Save | SharedFileSave | FileSave,
        done: Callable[[int, float], None],
        failed: Callable[[CheckpointError], None] | None = None,
    ) -> None:
        """Capture the state and start the save.

        Args:
            save: what to write, and where.
            done: called with bytes and seconds after the commit.
            failed: called with the error, which is then not raised later; such a save does not decide about `then`.
                The thread of the save calls both.

        Raises:
            CheckpointError: The previous save failed.
        """
        self.wait()
        holds: list[Hold] = []
        if isinstance(save, FileSave):
            save = replace(save, value=copy.deepcopy(save.value) if self._rank == 0 else {})
        else:
            holds = self._keep(save)
            save = _with_own_values(save, self._rank)
        exchange = StoreExchange(f"{self._prefix}/{next(self._numbers)}", self._rank, self._world_size, self._abandoned)
        before, self._exchange = self._exchange, exchange
        if failed is None:
            self._failed = False

        def work() -> None:
            started = time.thread_time()
            try:
                done(*run(save, self._rank, exchange))
                if before is not None:
                    before.forget()  # every rank reported to this save, so every rank has read the previous reports
            except CheckpointError as error:
                if failed is None:
                    self._failed = True
                    raise
                failed(error)
            except BaseException:
                self._failed = True
                raise
            finally:
                for hold in holds:
                    hold.finish()
                self.busy_s = time.thread_time() - started

        self._pending.append(self._worker.submit(work))

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the save in flight, or at once if there is none. Skip it if that save fails."""

        def work() -> None:
            if self._failed:
                return
            try:
                action()
            except (OSError, CheckpointError) as error:  # a file that was not removed does no harm
                _log.error("%s", error)

        self._pending.append(self._worker.submit(work))

    @property
    def in_flight(self) -> bool:
        """Return whether a save has not ended yet on this rank."""
        return any(not future.done() for future in self._pending)

    def ended_within(self, seconds: float) -> bool:
        """Wait until nothing is in flight, but not longer than this. Return whether that is so."""
        return not wait_for(self._pending, timeout=seconds).not_done

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            CheckpointError: A save failed and no earlier call has raised it.
        """
        pending, self._pending = self._pending, []
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Give up saves that are not committed, because other ranks have ended. Does not raise."""
        self._abandoned.set()
        try:
            self.wait()
        except Exception as error:
            _log.error("%s", error)

    def close(self) -> None:
        """End the thread and free the memory of copies."""
        self._worker.shutdown()
        self._copies.free()
        self._aside.free()
        self._read.free()

    def _keep(self, save: Save | SharedFileSave) -> list[Hold]:
        """Replace the save's values by copies, and put holds on offloaded buffers."""
        boxes = {
            number: list(entry.source.boxes())
            for number, entry in enumerate(save.entries)
            if entry.source is not None and not entry.source.at_rest
        }
        copies = iter(self._copied([values for found in boxes.values() for _, values in found]))
        holds: dict[int, Hold] = {}
        held: list[_Held] = []
        for number, entry in enumerate(save.entries):
            value, source = entry.value, entry.source
            if source is None:
                value = _copied(value)
            elif number in boxes:
                source = _CopiedSource(source, [(offsets, next(copies)) for offsets, _ in boxes[number]])
            else:
                source = holds.setdefault(id(source.flat), Hold(source.flat)).add(source, value.dtype, self._read)
                held.append(source)
            save.entries[number] = CheckpointEntry(entry.path, value, source)
        parts = iter(self._aside.parts([size for source in held for size in source.sizes]))
        for source in held:
            source.memory = list(itertools.islice(parts, len(source.sizes)))
        for hold in holds.values():
            hold.flat.hold = hold
        return list(holds.values())

    def _copied(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors to host memory."""
        parts = self._copies.parts([t.numel() * t.element_size() for t in tensors])
        result = [_copy_to(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]
        for device in {t.device for t in tensors if dev.is_accelerator(t.device)}:
            dev.stream(device).synchronize()
        return result


class _Staging:
    """Host memory for copies. The next save uses it again, because new memory costs page faults."""

    def __init__(self, device: torch.device) -> None:
        """``device``: where the copies come from."""
        self._device = device
        self.free()

    def parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return tensors of bytes, ``(size,)`` each. They replace those of the call before.

        On a CPU, what is not written to takes no memory.
        """
        starts = list(itertools.accumulate((-(-size // 64) * 64 for size in sizes), initial=0))
        if self._memory.numel() < starts[-1]:
            self.free()
            self._memory = host_empty(starts[-1], torch.uint8, self._device)
        return [self._memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def free(self) -> None:
        """Free the memory, when nothing uses the parts any more."""
        self._memory = torch.empty(0, dtype=torch.uint8)


def _copy_to(part: Tensor, values: Tensor) -> Tensor:
    """Start to copy values to bytes of the same number, and return them as the values' dtype and shape."""
    return part.view(values.dtype).view(values.shape).copy_(values, non_blocking=True)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _with_own_values(save: Save | SharedFileSave, rank: int) -> Save | SharedFileSave:
    """Return the save with copies of its small values."""
    if isinstance(save, Save):
        return replace(save, write_meta=_deep_copied(save.write_meta))
    stand_ins = {id(entry.value): entry.value for entry in save.entries}  # kept: they are known by their ids
    return replace(save, value=copy.deepcopy(save.value, stand_ins) if rank == 0 else {})


def _deep_copied(write: Any) -> Any:
    """Copy the arguments of a ``functools.partial``: callbacks keep changing the objects that they passed."""
    return type(write)(write.func, write.args[0], copy.deepcopy(write.args[1]), *write.args[2:])


class _CopiedSource(Source):
    """A source with copied boxes."""

    def __init__(self, source: Source, boxes: list[Values]) -> None:
        super().__init__(source.flat, source.slot, source.read)
        self._boxes = boxes

    @override
    def boxes(self) -> Iterator[Values]:
        yield from self._boxes


class _Held(Source):
    """A source with boxes that are read when the save reaches them, or copied just before they change."""

    def __init__(self, source: Source, dtype: torch.dtype, hold: Hold, staging: _Staging) -> None:
        super().__init__(source.flat, source.slot, source.read, at_rest=True)
        self._hold, self._staging = hold, staging
        self._ranges = list(source.ranges())
        copies = source.flat.states_in_memory
        self.sizes = [(stop - start) * dtype.itemsize for _, start, stop in self._ranges] if copies else []
        """Bytes of every box that `copy_aside` may copy."""
        self.memory: list[Tensor] = []
        """As many bytes for each of them."""
        self._aside: dict[int, Tensor] = {}
        self.left = set(range(len(self._ranges)))
        """Boxes that the save has not read yet."""

    @override
    def boxes(self) -> Iterator[Values]:
        """Yield a copy of each box, read under the hold's lock: a step may run while it is written.

        The next box takes the memory of the one before.
        """
        for number, (box, start, stop) in enumerate(self._ranges):
            with self._hold.lock:
                values = self._aside.pop(number, None)
                if values is None:
                    found = self.read(start, stop).detach()
                    [memory] = self._staging.parts([found.nbytes])
                    values = memory.view(found.dtype).copy_(found)
                self.left.discard(number)
                self._hold.lock.notify_all()
            yield from self.placed(box, values)

    def copy_aside(self) -> None:
        """Copy the boxes that have not been read yet."""
        for number in self.left:
            _, start, stop = self._ranges[number]
            self._aside[number] = _copy_to(self.memory[number], self.read(start, stop).detach())


class Hold:
    """Values of one flat buffer, in host memory or on NVMe, that a background save has yet to read."""

    def __init__(self, flat: FlatBuffer) -> None:
        self.flat = flat
        self.lock = threading.Condition()
        self._sources: list[_Held] = []
        self._finished = False

    def add(self, source: Source, dtype: torch.dtype, staging: _Staging) -> _Held:
        """Hold one more value of this dtype. ``staging``: memory for a box at a time."""
        held = _Held(source, dtype, self, staging)
        self._sources.append(held)
        return held

    def release(self) -> None:
        """Make the save independent of the buffer. The optimizer step calls it before it changes the states."""
        with self.lock:
            if not self.flat.states_in_memory:
                self.lock.wait_for(lambda: self._finished or not any(s.left for s in self._sources))
            elif not self._finished:
                for source in self._sources:
                    source.copy_aside()
            self.flat.hold = None

    def finish(self) -> None:
        """Drop the hold: the save has ended."""
        with self.lock:
            self._finished = True
            if self.flat.hold is self:
                self.flat.hold = None
            self.lock.notify_all()


class StoreExchange:
    """Exchanges values through the rendezvous store, because a thread must not use another thread's collectives.

    Any process that reaches the store's port can write to it. Values are therefore parsed as JSON only.
    """

    def __init__(self, prefix: str, rank: int, world_size: int, abandoned: threading.Event) -> None:
        """Create the exchange of one save. ``prefix`` is the same on all ranks and unique to the save."""
        self._prefix, self._rank, self._world_size, self._abandoned = prefix, rank, world_size, abandoned
        self._store = default_store().clone() if world_size > 1 else None
        self._round = 0

    def __call__(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's value, in rank order.

        Raises:
            CheckpointError: Another rank has ended, or a value is not JSON.
        """
        if self._store is None:
            return [value]
        keys = [f"{self._prefix}/{self._round}/{r}" for r in range(self._world_size)]
        self._round += 1
        self._store.set(keys[self._rank], json.dumps(value))
        pause = _FIRST_POLL_S
        while not self._store.check(keys):
            if self._abandoned.is_set():
                raise CheckpointError("another rank ended while a checkpoint was being saved in the background.")
            time.sleep(pause)
            pause = min(pause * 4 / 3, _LONGEST_POLL_S)
        try:
            return [json.loads(self._store.get(key)) for key in keys]
        except ValueError as error:
            raise CheckpointError(f"another rank's report about a save cannot be read: {error}.") from error

    def forget(self) -> None:
        """Remove this rank's values from the store."""
        for number in range(self._round if self._store is not None else 0):
            self._store.delete_key(f"{self._prefix}/{number}/{self._rank}")  # type: ignore[union-attr]
