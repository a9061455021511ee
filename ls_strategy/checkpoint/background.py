"""Background saves: one thread per rank writes one checkpoint at a time while training continues.

A save captures the state at the time of the call, but copies little of it there. Masters and optimizer states change in
an optimizer step, most of a step after the call, and whatever changes them calls `FlatBuffer.before_change` first. So
the call leaves a `Hold` on each flat buffer, and the thread copies what it holds while the next forward and backward
compute::

    call             | holds | small values |
    training                                | forward, backward          | update finds no hold |
    thread                                  | copies, box by box | writes, syncs, commits ...

An update that comes earlier copies what is left of its buffer by itself. States on NVMe are not copied ahead: an update
waits until the save has read them. All that may change without a notice is copied at the call: masters that are the
parameters, or are shown to user code (`FlatBuffer.master_is_private`), averages, buffers and whatever callbacks save.
What goes into a single file may have been gathered on rank 0, and is copied there.

A thread is enough: copying, writing, syncing and checksums release the GIL, and `RankFile` keeps the Python code per
chunk short.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy._torch import default_store, version_of
from ls_strategy.checkpoint.reshard import CheckpointEntry, Source
from ls_strategy.checkpoint.save import FileSave, Save, SharedFileSave, described, run
from ls_strategy.errors import CheckpointError
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.link import host_empty
from ls_strategy.zero.flat.flat_buffer import FlatBuffer

_log = logging.getLogger(__name__)

_HOST = torch.device("cpu")

_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.02
"""Seconds between two polls of the store. They grow, so that a wait ends at most a third later than it could."""


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
        self._rank, self._world_size, self._device = rank, world_size, device
        self._prefix, self._numbers = f"ls_strategy/save/{name}", itertools.count()
        self._worker = ThreadPoolExecutor(1, "ls_strategy_save", dev.select, (device,))
        self._pending: list[Future[None]] = []
        self._failed = False
        self._abandoned = threading.Event()
        self._store = default_store().clone() if world_size > 1 else None
        """A connection of the thread's own, kept: a new one takes two milliseconds of every call."""
        self._exchange: StoreExchange | None = None
        self._from_device, self._from_host, self._read = map(_Staging, (device, _HOST, _HOST))
        self._stream: torch.Stream | None = None
        """Of the thread's copies from an accelerator."""
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
        prefix = f"{self._prefix}/{next(self._numbers)}"
        exchange = StoreExchange(self._store, prefix, self._rank, self._world_size, self._abandoned)
        before, self._exchange = self._exchange, exchange
        holds: list[Hold] = []
        save = _with_own_values(save, self._rank)
        if not isinstance(save, FileSave):
            holds = self._keep(save)  # last: an error would leave holds that nobody ends
        begun = dev.record(self._device) if dev.is_accelerator(self._device) else None
        if failed is None:
            self._failed = False

        def work() -> None:
            started = time.thread_time()
            try:
                self._copy_ahead(holds, begun)
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
        for staging in (self._from_device, self._from_host, self._read):
            staging.free()

    def _keep(self, save: Save | SharedFileSave) -> list[Hold]:
        """Copy the values that may change without a notice, and hold those that cannot."""
        at_once, holds, made = Hold(None, self._device), {}, {}
        for number, entry in enumerate(save.entries):
            value, source = entry.value, entry.source
            if source is None:
                value = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            elif id(value) not in made:  # tied parameters share one
                hold = holds.setdefault(id(source.flat), Hold(source.flat, self._device)) if source.guarded else at_once
                made[id(value)] = hold.add(source, value.dtype)
            save.entries[number] = CheckpointEntry(entry.path, value, made.get(id(entry.value)))
        self._give_memory([each for hold in (at_once, *holds.values()) for each in hold.sources])
        at_once.release()
        for hold in holds.values():
            hold.begin()
        return list(holds.values())

    def _give_memory(self, sources: list[_Held]) -> None:
        """Give memory to every box that is copied ahead, and to one at a time of the others."""
        chosen = {id(each): self._staging_of(each) for each in sources}
        for staging in (self._from_device, self._from_host):
            own = [each for each in sources if chosen[id(each)] is staging]
            parts = iter(staging.parts([size for each in own for size in each.sizes]))
            for each in own:
                each.memory = list(itertools.islice(parts, len(each.sizes)))
        for each in sources:
            each.staging = self._read

    def _staging_of(self, source: _Held) -> _Staging | None:
        if not source.is_copied:
            return None
        return self._from_host if source.guarded and source.flat.steps_in_background else self._from_device

    def _copy_ahead(self, holds: list[Hold], begun: torch.Event | None) -> None:
        """Copy what is held while training goes on. ``begun``: the device has done what came before the call."""
        if begun is None:
            for hold in holds:
                hold.copy_ahead(_has_arrived)
            return
        begun.synchronize()
        if self._stream is None:
            self._stream = dev.new_stream(self._device)
        with dev.on(self._stream):
            for hold in holds:
                hold.copy_ahead(self._stream.synchronize)


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


def _with_own_values(save: Save | SharedFileSave | FileSave, rank: int) -> Save | SharedFileSave | FileSave:
    """Return the save with copies of its small values on rank 0, which writes them: callbacks keep changing theirs."""
    if isinstance(save, Save):  # the second argument of a `functools.partial`
        write: Any = save.write_meta
        if rank == 0:
            write = type(write)(write.func, write.args[0], _own(write.args[1], {}), *write.args[2:])
        return replace(save, write_meta=write)
    # The stand-ins are kept: they are known by their ids.
    kept = {} if isinstance(save, FileSave) else {id(entry.value): entry.value for entry in save.entries}
    return replace(save, value=_own(save.value, kept) if rank == 0 else {})


def _own(value: Any, kept: dict[int, Any]) -> Any:
    """Copy all but what is kept. What cannot be copied is an error of the save, on all ranks, and not of this rank."""
    try:
        return copy.deepcopy(value, kept)
    except Exception as error:  # of whatever a callback or a hook has put there
        return _Uncopied(error)


class _Uncopied:
    """Stands for values that could not be copied: whoever writes them raises the reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @override
    def __reduce__(self) -> str:
        raise self._error


class _Held(Source):
    """A source of which the save writes what it was at the call."""

    staging: _Staging
    """Memory for one box at a time, of values that are not copied ahead."""

    memory: list[Tensor]
    """Bytes for each of the boxes of other values."""

    def __init__(self, source: Source, dtype: torch.dtype, hold: Hold) -> None:
        super().__init__(source.flat, source.slot, source.read, guarded=source.guarded)
        self._hold = hold
        self._ranges = list(source.ranges())
        self.is_copied = not source.guarded or source.flat.states_in_memory
        """Whether it is copied ahead. Otherwise it is on NVMe, and the next update waits until it was read."""
        self.sizes = [(stop - start) * dtype.itemsize for _, start, stop in self._ranges]
        """Bytes of every box."""
        self._copies: dict[int, Tensor] = {}

    @override
    def boxes(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield a copy of each box. One that is read now takes the memory of the one before."""
        for number, (box, start, stop) in enumerate(self._ranges):
            if self.is_copied:
                self._hold.wait_copied()
                values = self._copies.pop(number)
            else:
                found = self.read(start, stop).detach()
                [memory] = self.staging.parts([found.nbytes])
                values = memory.view(found.dtype).copy_(found)
                self._hold.note_read()
            yield from self.placed(box, values)

    def copy(self, number: int) -> None:
        """Start copying a box, after this thread's work on the device."""
        _, start, stop = self._ranges[number]
        values = self.read(start, stop).detach()
        self._copies[number] = self.memory[number].view(values.dtype).copy_(values, non_blocking=True)


class Hold:
    """Values of one flat buffer that a background save has yet to copy or, on NVMe, to read.

    The thread of the save and the one that is about to change the values take boxes from the same queue.
    """

    def __init__(self, flat: FlatBuffer | None, device: torch.device) -> None:
        """Hold nothing yet. ``flat``: None for what is copied at the call."""
        self._flat, self._device = flat, device
        self._changed = threading.Condition()
        self.sources: list[_Held] = []
        self._left: deque[tuple[_Held, int]] = deque()
        """Boxes that nobody has begun to copy."""
        self._copying = self._to_read = 0
        """Number of boxes that are being copied, and of those on NVMe that were not read yet."""
        self._arrivals: list[Arrival] = []
        """Of copies in flight from the device."""
        self._error: Exception | None = None
        self._version: int | None = None
        """Of the masters at the call."""

    def add(self, source: Source, dtype: torch.dtype) -> _Held:
        """Hold one more value of this dtype."""
        held = _Held(source, dtype, self)
        self.sources.append(held)
        if held.is_copied:
            self._left.extend((held, number) for number in range(len(held.sizes)))
        else:
            self._to_read += len(held.sizes)
        return held

    def begin(self) -> None:
        """Let whatever is about to change the buffer call `release` first."""
        assert self._flat is not None
        self._flat.hold, self._version = self, version_of(self._flat.master)

    def copy_ahead(self, arrived: Callable[[], object]) -> None:
        """Copy what nobody has copied, on the thread of the save. ``arrived`` waits for a copy."""
        self._copy_left(arrived)
        if not self._to_read:
            self.finish()

    def release(self) -> None:
        """Make the save independent of the buffer, which is about to change: copy what is left, or wait for it."""
        self._copy_left(self._note_arrival)
        with self._changed:
            self._changed.wait_for(lambda: not self._copying and not self._to_read)
        self._let_go()

    def _note_arrival(self) -> None:
        if dev.is_accelerator(self._device):  # what changes the values follows in the same stream
            self._arrivals.append(Arrival(dev.record(self._device)))

    def _copy_left(self, arrived: Callable[[], object]) -> None:
        while True:
            with self._changed:
                if not self._left:
                    return
                held, number = self._left.popleft()
                self._copying += 1
            try:
                held.copy(number)
                arrived()
                self._refuse_unseen_writes()
            except Exception as error:  # of the save, on whichever thread
                self._error = error
            finally:
                with self._changed:
                    self._copying -= 1
                    self._changed.notify_all()

    def _refuse_unseen_writes(self) -> None:
        if self._flat is not None and version_of(self._flat.master) != self._version:
            raise CheckpointError(
                f"the master weights of the buffer of {self._flat.name!r} were written to while a checkpoint in the "
                "background still copied them, and FlatBuffer.before_change was not called. Code that writes to "
                "flat.master has to call it first"
            )

    def wait_copied(self) -> None:
        """Wait until all copies are in host memory.

        Raises:
            CheckpointError: one of them failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
        if self._error is not None:
            raise CheckpointError(described(self._error)) from self._error
        for arrival in self._arrivals:
            arrival.wait_on_host()

    def note_read(self) -> None:
        """Record that the save has read a box on NVMe."""
        with self._changed:
            self._to_read -= 1
            self._changed.notify_all()

    def finish(self) -> None:
        """Drop the hold: the save does not need the buffer any more."""
        with self._changed:
            self._left.clear()
            self._to_read = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._copying)
        self._let_go()

    def _let_go(self) -> None:
        if self._flat is not None and self._flat.hold is self:
            self._flat.hold = None


def _has_arrived() -> None:
    """Do nothing: without an accelerator, copies have arrived when they return."""


class StoreExchange:
    """Exchanges values through the rendezvous store, because a thread must not use another thread's collectives.

    Any process that reaches the store's port can write to it. Values are therefore parsed as JSON only.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int, abandoned: threading.Event) -> None:
        """Create the exchange of one save.

        Args:
            store: used by no other thread meanwhile; None on a single rank.
            prefix: the same on all ranks, and unique to the save.
            rank: of this process.
            world_size: number of ranks that exchange.
            abandoned: set when the others are not waited for any more.
        """
        self._store, self._prefix = store, prefix
        self._rank, self._world_size, self._abandoned = rank, world_size, abandoned
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
        for number in range(self._round):
            self._store.delete_key(f"{self._prefix}/{number}/{self._rank}")
