"""Random numbers of the virtual ranks of one process: a stream for each, put in place where it draws.

::

    begin of an epoch    iterators are made: `begin_epoch`        a checkpoint has both states, because a run that
    every batch          fetched and stepped inside `as_rank`     continues inside an epoch makes its iterators first

The one invariant: what a virtual rank draws depends neither on the rank that computes it nor on the other ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ls_strategy.checkpoint.random import RandomStream

VIRTUAL = "virtual_ranks"
"""Under which a checkpoint has what every virtual rank has of its own: random states, and states of loaders."""


class VirtualRandom:
    """The streams of the virtual ranks of this process."""

    def __init__(self) -> None:
        self._streams: dict[int, RandomStream] = {}
        """By virtual rank."""
        self._at_epoch: dict[int, RandomStream] = {}
        """The same before the iterators over the training data were made."""
        self._resumed: dict[str, Any] | None = None
        """What a checkpoint holds of them, until iterators are made."""
        self._continued: dict[int, RandomStream] | None = None
        """From the iterators of an epoch to its first batch: the random numbers of a run that continues inside it."""
        self._creating: dict[int, RandomStream] = {}
        """For the iterators of an epoch inside which the run continues."""
        self._goes_on = False
        """Whether the epoch is the first one of a run that continues."""
        self._early: RandomStream | None = None
        """While iterators are made before the run begins: where this process stood."""
        self.current: int | None = None
        """The virtual rank that draws now."""
        self.keeps: Callable[[], bool] | None = None
        """Whether what is drawn counts: not in a sanity check. None: it does."""

    def begin_run(self, *, fitting: bool) -> None:
        """Begin a fit or an evaluation without streams."""
        self._streams.clear()
        self._creating.clear()
        self.current = self._continued = None
        if not fitting:
            self._resumed = None

    @contextmanager
    def as_rank(self, rank: int | None) -> Generator[None, None, None]:
        """Draw the random numbers of a virtual rank inside. None: none of them, and what is drawn does not count."""
        if self._early is not None:
            self._early.put()
        if self._early is not None or self.current is not None:  # or hooks inside a step
            yield
            return
        outside = RandomStream()
        keeps = rank is not None and (self.keeps is None or self.keeps())
        if rank is not None and keeps:
            self._streams.setdefault(rank, RandomStream()).put()
        self.current = -1 if rank is None else rank
        try:
            yield
        finally:
            self.current = None
            if rank is not None and keeps:
                self._streams[rank].take()
            outside.put()

    def mark(self) -> Callable[[], None]:
        """Return a function that lets the virtual ranks draw again what they draw from now on."""
        return partial(self.put_back, self.copied())

    def copied(self) -> dict[int, RandomStream]:
        """Return what the virtual ranks of this process draw from, as it is now."""
        return {rank: copy.copy(stream) for rank, stream in self._streams.items()}

    def put_back(self, streams: Mapping[int, RandomStream]) -> None:
        """Let virtual ranks draw from copies of ``streams``, which may be those of another process."""
        self._streams.clear()
        self._streams.update((rank, copy.copy(stream)) for rank, stream in streams.items())

    def saved(self) -> dict[str, Any]:
        """Return the states of this process's virtual ranks, for a checkpoint."""
        return {
            str(rank): {
                "now": stream.saved(),
                "epoch": self._at_epoch[rank].saved() if rank in self._at_epoch else None,
            }
            for rank, stream in self._streams.items()
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what all ranks have saved, at the first batch."""
        self._resumed = dict(saved)

    def begin_epoch(self, ranks: Sequence[int], *, inside: bool) -> None:
        """Go back to where the run made its iterators. ``inside``: the run continues inside an epoch.

        Called by the first of several loaders; until `before_batch` the others find the same states.
        """
        if self._continued is not None:
            return
        saved, self._resumed = self._resumed or {}, None
        states = {rank: saved[str(rank)] for rank in ranks if str(rank) in saved}
        for rank, state in states.items():
            before = state["epoch"] if inside else None
            self._streams[rank] = RandomStream.of(before or state["now"])
        now, self._goes_on = RandomStream(), bool(states)
        self._at_epoch = {rank: copy.copy(self._streams.get(rank, now)) for rank in ranks}
        self._continued = {rank: RandomStream.of(state["now"]) for rank, state in states.items() if inside}
        self._creating = {rank: copy.copy(self._at_epoch[rank]) for rank in self._continued}

    def make_early(self, ranks: Sequence[int], make: Callable[[], Any]) -> Any:
        """Make iterators before the run begins, because user code asks for the number of batches.

        There are no streams yet, so every virtual rank draws the same, and this process draws it once, as under DDP.
        """
        self._early = RandomStream()
        self._at_epoch = {rank: copy.copy(self._early) for rank in ranks}
        try:
            return make()
        finally:
            self._early = None

    @contextmanager
    def creating(self, rank: int, *, stays: bool) -> Generator[None, None, None]:
        """Surround the creation of an iterator, which may be at the first batch that it is asked for.

        ``stays``: the unbroken run has made it in its first epoch, because its workers stay.
        """
        if self._early is not None:
            yield
            return
        stream, outside = self._creating.get(rank), RandomStream()
        if stream is not None:
            stream.put()
        try:
            yield
        finally:
            if stream is not None:
                stream.take()
            if stream is not None or (stays and self._goes_on):
                outside.put()

    def before_batch(self) -> None:
        """Continue with the random numbers that the run had after it had made its iterators."""
        if self._continued is not None:
            self._streams.update(self._continued)
            self._continued = None
