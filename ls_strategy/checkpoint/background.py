"""Saving while training goes on: one thread per rank, one save at a time.

What is saved is the state at the call. States on the device are copied to host memory at the call. States that rest on
another tier are not copied as long as nothing changes them: the update of a flat buffer, when it comes, finds a `Hold`
on it, and first copies aside what the save has not read yet (host memory), or waits for it to be read (a drive).
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._compat import default_store
from ls_strategy.checkpoint.reshard import Entry, Source
from ls_strategy.checkpoint.save import Save, run
from ls_strategy.errors import CheckpointError
from ls_strategy.tiers.link import host_empty
from ls_strategy.zero.units import Flat

_log = logging.getLogger(__name__)

_POLL_S = 0.02
"""Between two looks at the store."""

_NUMBERS = itertools.count()
"""Of the saves of this process: the same on every rank, since all ranks save together."""

Values = tuple[tuple[int, ...], Tensor]
"""Offsets in the whole tensor, and values."""


class BackgroundSaver:
    """Saves of one rank. All ranks call the same methods in the same order."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Start nothing yet."""
        self._rank, self._world_size = rank, world_size
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ls_strategy_save")
        self._pending: list[tuple[str, Future[Any]]] = []
        self._failed = False
        self._abandoned = threading.Event()
        self._exchange: StoreExchange | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    def submit(self, save: Save, done: Callable[[int, float], None]) -> None:
        """Take over what is to be saved, and return; ``done(bytes, seconds)`` is called after the commit.

        Raises:
            CheckpointError: the save before this one failed.
        """
        self.wait()
        holds = self._keep(save)
        save = replace(save, write_meta=_deep_copied(save.write_meta))
        exchange = StoreExchange(f"ls_strategy/save/{next(_NUMBERS)}", self._rank, self._world_size, self._abandoned)
        before, self._exchange = self._exchange, exchange
        self._failed = False

        def work() -> None:
            try:
                done(*run(save, self._rank, exchange))
                if before is not None:
                    before.forget()  # this save had words of every rank, so every rank has read the last one's
            except BaseException:
                self._failed = True
                raise
            finally:
                for hold in holds:
                    hold.finish()

        self._pending.append((save.path, self._worker.submit(work)))

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the save that is under way, if that is committed; at once if none is."""

        def work() -> None:
            if self._failed:
                return
            try:
                action()
            except (OSError, CheckpointError) as error:  # what is not removed is not lost either
                _log.error("%s", error)

        self._pending.append(("", self._worker.submit(work)))

    def wait(self) -> None:
        """Return when nothing is under way.

        Raises:
            CheckpointError: something failed that no earlier call has raised.
        """
        pending, self._pending = self._pending, []
        error: BaseException | None = None
        for _, future in pending:
            error = error or future.exception()
        if error is not None:
            raise error

    def abandon(self) -> None:
        """The other ranks are gone: wait for none of them, and give up what is not committed. Does not raise."""
        self._abandoned.set()
        try:
            self.wait()
        except Exception as error:
            _log.error("%s", error)

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def _keep(self, save: Save) -> list[Hold]:
        """Let the save's values outlive the training that goes on: copies, and holds on what is not copied."""
        to_copy = [
            (number, box)
            for number, entry in enumerate(save.entries)
            if entry.source is not None and not entry.source.at_rest
            for box in entry.source.boxes()
        ]
        copies = self._copied([values for _, (_, values) in to_copy])
        kept: dict[int, list[Values]] = {}
        for (number, (offsets, _)), values in zip(to_copy, copies, strict=True):
            kept.setdefault(number, []).append((offsets, values))
        holds: dict[int, Hold] = {}
        for number, entry in enumerate(save.entries):
            source = entry.source
            if source is None:
                save.entries[number] = Entry(entry.path, _copied(entry.value), None)
            elif not source.at_rest:
                save.entries[number] = Entry(entry.path, entry.value, _Kept(source, kept.get(number, [])))
            else:
                if id(source.flat) not in holds:
                    holds[id(source.flat)] = Hold(source.flat)
                held = holds[id(source.flat)].add(source)
                save.entries[number] = Entry(entry.path, entry.value, held)
        for hold in holds.values():
            hold.flat.hold = hold
        return list(holds.values())

    def _copied(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies in one buffer that the next save uses again: fresh memory costs its page faults every time."""
        sizes = [-(-t.numel() * t.element_size() // 64) * 64 for t in tensors]
        if self._staging.numel() < sum(sizes):
            self._staging = torch.empty(0, dtype=torch.uint8)
            device = tensors[0].device if tensors else torch.device("cpu")
            self._staging = host_empty(sum(sizes), torch.uint8, device)
        result: list[Tensor] = []
        start = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            nbytes = tensor.numel() * tensor.element_size()
            copied = self._staging[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
            result.append(copied.copy_(tensor, non_blocking=True))
            start += size
        if any(t.is_cuda for t in tensors):
            torch.cuda.current_stream().synchronize()
        return result


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _deep_copied(write: Any) -> Any:
    """``functools.partial`` with its arguments as they are now: callbacks go on changing what they gave."""
    return type(write)(write.func, write.args[0], copy.deepcopy(write.args[1]), *write.args[2:])


class _Kept(Source):
    """A source whose boxes were copied."""

    def __init__(self, source: Source, boxes: list[Values]) -> None:
        super().__init__(source.flat, source.slot, source.read)
        self._boxes = boxes

    @override
    def boxes(self) -> Iterator[Values]:
        yield from self._boxes


class _Held(Source):
    """A source whose boxes are read when the save comes to them, or were copied aside before they changed."""

    def __init__(self, source: Source, hold: Hold) -> None:
        super().__init__(source.flat, source.slot, source.read, at_rest=True)
        self._hold = hold
        self._ranges = list(source.ranges())
        self._aside: dict[int, Tensor] = {}
        self.left = set(range(len(self._ranges)))
        """Boxes that the save has not read yet."""

    @override
    def boxes(self) -> Iterator[Values]:
        """Each box under the hold's lock, as a copy: the update may come while it is written."""
        for number, (box, start, stop) in enumerate(self._ranges):
            with self._hold.lock:
                values = self._aside.pop(number, None)
                if values is None:
                    values = self.read(start, stop).detach().to("cpu", copy=True)
                self.left.discard(number)
                self._hold.lock.notify_all()
            yield from self.placed(box, values)

    def copy_aside(self) -> None:
        """Copy what has not been read yet."""
        for number in self.left:
            _, start, stop = self._ranges[number]
            self._aside[number] = self.read(start, stop).detach().to("cpu", copy=True)


class Hold:
    """What a save still has to read of one flat buffer."""

    def __init__(self, flat: Flat) -> None:
        """On ``flat``, whose states rest in host memory or on a drive."""
        self.flat = flat
        self.lock = threading.Condition()
        self._sources: list[_Held] = []
        self._finished = False

    def add(self, source: Source) -> Source:
        """Hold one more value."""
        held = _Held(source, self)
        self._sources.append(held)
        return held

    def release(self) -> None:
        """The buffer's states are about to change: see to it that the save does not notice."""
        with self.lock:
            if not self.flat.rest.is_resident("master"):
                self.lock.wait_for(lambda: self._finished or not any(s.left for s in self._sources))
            elif not self._finished:
                for source in self._sources:
                    source.copy_aside()
            self.flat.hold = None

    def finish(self) -> None:
        """The save is over."""
        with self.lock:
            self._finished = True
            if self.flat.hold is self:
                self.flat.hold = None
            self.lock.notify_all()


class StoreExchange:
    """Exchanges values through the rendezvous store: a thread must not use the collectives of another.

    Whoever reaches the store's port can write to it, so what is read from it is JSON and nothing else.
    """

    def __init__(self, prefix: str, rank: int, world_size: int, abandoned: threading.Event) -> None:
        """One per save; ``prefix`` is the same on every rank, and no other save has it."""
        self._prefix, self._rank, self._world_size, self._abandoned = prefix, rank, world_size, abandoned
        self._store = default_store().clone() if world_size > 1 else None
        self._round = 0

    def __call__(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's value, in rank order.

        Raises:
            CheckpointError: the other ranks are gone, or a value is not JSON.
        """
        if self._store is None:
            return [value]
        keys = [f"{self._prefix}/{self._round}/{r}" for r in range(self._world_size)]
        self._round += 1
        self._store.set(keys[self._rank], json.dumps(value))
        while not self._store.check(keys):
            if self._abandoned.is_set():
                raise CheckpointError("another rank ended while a checkpoint was saved in the background.")
            time.sleep(_POLL_S)
        try:
            return [json.loads(self._store.get(key)) for key in keys]
        except ValueError as error:
            raise CheckpointError(f"another rank's report about a save cannot be read: {error}.") from error

    def forget(self) -> None:
        """Remove this rank's words from the store."""
        for number in range(self._round if self._store is not None else 0):
            self._store.delete_key(f"{self._prefix}/{number}/{self._rank}")  # type: ignore[union-attr]
