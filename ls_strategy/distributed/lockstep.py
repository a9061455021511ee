"""Keeps ranks at the same batch: detects a rank that runs out of batches, and stops all ranks at the same one.

The one invariant: a rank that waits for another one also checks whether that rank will still come.

::

    step n     write "batch n, last: yes/no" to the store (no wait), then run it
    the end    before the last batch, or when the loop ends: meet ─┬─ all ranks are here: continue
                                                                   └─ a rank has a batch that others lack: DataError

To meet is an all-reduce on a separate process group. While a rank waits for it, it reads the notes in the store.

Where finished ranks wait for the others (``uneven="join"``), all ranks take turns: before every batch each says what
it has. That is the same all-reduce, so a rank that leaves the loop alone meets the others' next turn, and all raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy._torch import default_store
from ls_strategy.distributed.comm import Comm, process_group
from ls_strategy.errors import DataError, PlanError

REQUEUE, STOP = 1, 2
"""What a signal requests: a checkpoint and a requeue by SLURM, or the end of the run."""

_CHECK_EVERY_S = 0.5
"""Seconds between two agreements on the requests of signals, rounded to whole batches."""

_MAX_BATCHES_BETWEEN_CHECKS = 16
"""Limits the delay if batches become slow after their number was chosen."""

_PATIENCE_S = 20.0
"""Seconds that a rank that left in the middle of a step waits for the others to do the same."""

_LOOK_EVERY_S = (0.25, 2.0)
"""Seconds between two reads of the store: at first, and at most."""

TURN_NUMBERS = 4
"""Numbers that a rank says in a turn."""

_SHARED_NUMBERS = 6
"""Numbers of `Lockstep._values` that are not one rank's own."""


@dataclass
class LoaderPass:
    """One pass over a loader: a training epoch, a validation."""

    number: int
    """The same on all ranks."""

    what: str
    limit: str
    """The Trainer's option that limits its batches."""

    is_last: Callable[[], bool]
    """Whether the fetched batch is the loader's last one, as far as the loader knows."""

    started: int = 0
    completed: int = 0
    last: bool = False
    met: bool = False


class Lockstep:
    """Compares this rank's progress with the other ranks'. One per process group; steps and rounds are collective."""

    def __init__(self, comm: Comm) -> None:
        """Create a process group. Collective.

        Args:
            comm: over all ranks.
        """
        self._comm = comm
        self._rounds: list[LoaderPass] = []
        self._count = 0
        self._stop = self._requeue = False
        self._due = 1
        self._batches = 0
        self._since = time.perf_counter()
        self._slots = 0
        self.in_flight = False
        """Whether an exception has ended a wait for other ranks, which may not have arrived."""
        if comm.world_size > 1:
            self._store = default_store().clone()  # its own connection: waits on another one block it
            self._keys = [f"ls_strategy/batch/{rank}" for rank in range(comm.world_size)]
            self._store.set(self._keys[comm.rank], "0 0 0")
            self._group: Any = process_group("lockstep", backend=dev.host_backend())
            self._journal = comm.where.journal(self._group.group_name, range(comm.world_size))
            comm.own_open_sockets()

    # rounds ----------------------------------------------------------------------------------------------------------

    def reset(self, *, turns: bool = False) -> None:
        """Forget rounds that an exception ended. Collective.

        Args:
            turns: whether the ranks will call `turn` before every batch.

        Raises:
            PlanError: only some ranks will.
        """
        self._stop = self._requeue = False
        self._rounds.clear()
        self._due = 1
        self._batches = 0
        self._since = time.perf_counter()
        if self._comm.world_size > 1:
            begun = torch.tensor([self._count, turns, not turns])
            with self._waiting("beginning of a run"):
                dist.all_reduce(begun, dist.ReduceOp.MAX, group=self._group)
            self._count = int(begun[0])
            self._comm.where.begin_era()
            if begun[1] and begun[2]:
                raise PlanError(
                    "Got uneven='join' on some ranks only. Give the strategy the same options on all ranks."
                )
            self._slots = TURN_NUMBERS * self._comm.world_size if turns else 0

    def begin(self, what: str, limit: str, is_last: Callable[[], bool]) -> None:
        """Begin a pass over a loader."""
        self._count += 1
        self._rounds.append(LoaderPass(self._count, what, limit, is_last))

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Surround the work on one batch.

        Raises:
            DataError: this is the last batch of this rank, and others have more.
        """
        if self._comm.world_size == 1 or not self._rounds:
            yield
            return
        now = self._rounds[-1]
        now.started += 1
        now.last = now.is_last()
        self._comm.where.batch = now.number, now.started, now.what
        self._note(now, last=now.last)
        if now.last:
            self._meet(now)
        yield
        now.completed = now.started

    def turn(self, said: Sequence[int]) -> list[list[int]]:
        """Return what each rank says before the next batch, by rank. Collective.

        Args:
            said: at most `TURN_NUMBERS` numbers, not negative; the first one not 0.

        Raises:
            DataError: a rank has left the loop.
        """
        if self._comm.world_size == 1:
            return [list(said)]
        now = self._rounds[-1]
        values = self._values(now, meeting=False)
        first = _SHARED_NUMBERS + TURN_NUMBERS * self._comm.rank
        values[first : first + len(said)] = torch.tensor(said)
        with self._waiting(f"next batch of a {now.what}"):
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        self._check(values, now)
        return values[_SHARED_NUMBERS:].view(-1, TURN_NUMBERS).tolist()

    def end(self) -> None:
        """End a pass over a loader: wait for all ranks.

        Raises:
            DataError: others have more batches.
        """
        now = self._rounds.pop() if self._rounds else None
        if now is not None and not now.met and self._comm.world_size > 1:
            self._note(now, last=True)
            self._meet(now)

    def _note(self, now: LoaderPass, *, last: bool) -> None:
        """Tell the other ranks how many batches this one has begun, and whether it has no more."""
        self._store.set(self._keys[self._comm.rank], f"{now.number} {now.started} {int(last)}")

    def _meet(self, now: LoaderPass) -> None:
        now.met = True
        self.in_flight = True
        values = self._values(now, meeting=True)
        with self._waiting(f"end of a {now.what}"):
            work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._wait(work, now)
            work.wait()
        self.in_flight = False
        self._check(values, now)

    @contextmanager
    def _waiting(self, kind: str) -> Generator[None, None, None]:
        """Surround a collective on the group of this class."""
        entry = self._journal.enter(kind)
        with entry, self._comm.naming_failures(), spans.waiting(spans.COMMUNICATION, "batches"):
            yield

    def _wait(self, work: dist.Work, now: LoaderPass) -> None:
        """Wait for the other ranks, and raise if one of them has more batches and will not come."""
        begin = time.monotonic()
        pause, (look_every, slowest) = 0.0005, _LOOK_EVERY_S
        next_look = begin + look_every
        while not work.is_completed():
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() < next_look:
                continue
            # If this rank left in the middle of a step, the others may be about to leave, too.
            patient = now.completed < now.started and not now.last and time.monotonic() < begin + _PATIENCE_S
            ahead = self._ahead(now, of=now.started if patient or now.last else now.completed)
            if ahead:
                raise DataError(_uneven(now, {self._comm.rank: now.started if now.last else now.completed}, ahead))
            look_every = min(2 * look_every, slowest)
            next_look = time.monotonic() + look_every

    def _ahead(self, now: LoaderPass, *, of: int) -> dict[int, int]:
        """Return ranks that have a batch after ``of``, with the least number of batches each is known to have."""
        found: dict[int, int] = {}
        for rank, note in enumerate(self._store.multi_get(self._keys)):
            number, started, last = (int(word) for word in note.decode().split())
            reach = started + (not last and now.last)  # a rank that is not at its last batch has another one
            if rank != self._comm.rank and number == now.number and reach > of:
                found[rank] = reach
        return found

    def _check(self, values: torch.Tensor, now: LoaderPass) -> None:
        """Raise on all ranks if they are not at the same place."""
        met, passing, most, least = values[2:_SHARED_NUMBERS].tolist()
        if not (met and passing) and most == -least:
            return
        went_on = values[_SHARED_NUMBERS::TURN_NUMBERS].tolist()
        if any(went_on) and most == -least:
            raise DataError(_left(now, [rank for rank, on in enumerate(went_on) if not on]))
        counts, ended = {self._comm.rank: now.started}, {self._comm.rank} if now.met else set[int]()
        for rank, note in enumerate(self._store.multi_get(self._keys)):
            number, started, last = (int(word) for word in note.decode().split())
            if number == now.number and rank != self._comm.rank:
                counts[rank] = started
                if last:
                    ended.add(rank)
        if ended and len(set(counts.values())) == 1:  # those that have not ended have another batch
            counts = {rank: count + (rank not in ended) for rank, count in counts.items()}
        fewest = min(counts.values())
        few = {rank: count for rank, count in counts.items() if count == fewest}
        raise DataError(_uneven(now, few, {r: c for r, c in counts.items() if r not in few}))

    # signals ----------------------------------------------------------------------------------------------------------

    def ask(self, what: int) -> None:
        """Record what a signal requests. Safe in a handler."""
        self._stop = self._stop or what == STOP
        self._requeue = self._requeue or what == REQUEUE

    @property
    def asked(self) -> int:
        """Return what signals have requested of this rank: `STOP`, `REQUEUE`, or 0 for nothing."""
        return STOP if self._stop else REQUEUE if self._requeue else 0

    def asked_of_any(self) -> int:
        """Return what a signal has requested of any rank. Collective, at the end of a run."""
        if self._comm.world_size == 1:
            return self.asked
        asked = torch.tensor([self.asked])
        with self._waiting("end of a run"):
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return int(asked)

    def agree(self) -> int:
        """Return what a signal has requested of any rank, about twice a second, and 0 in between. Collective.

        Raises:
            DataError: ranks are not at the same batch.
        """
        if self._comm.world_size == 1:
            return self.asked
        self._batches += 1
        if self._batches < self._due or not self._rounds:
            return 0
        now = self._rounds[-1]
        values = self._values(now, meeting=False)
        with self._waiting("comparison of batches"):
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        self._check(values, now)
        batch_us = max(int(values[1]), 1)
        self._due = min(max(int(_CHECK_EVERY_S * 1e6) // batch_us, 1), _MAX_BATCHES_BETWEEN_CHECKS)
        self._batches = 0
        self._since = time.perf_counter()
        asked = int(values[0])
        if asked == REQUEUE:
            self._requeue = False  # served now; a request to stop that came since then stays
        return asked

    def _values(self, now: LoaderPass, *, meeting: bool) -> torch.Tensor:
        """Return what ranks compare by maximum: request, batch time, meeting?, passing?, batch, -batch."""
        batch_us = int(1e6 * (time.perf_counter() - self._since) / max(self._batches, 1))
        place = now.number << 32 | now.started
        shared = [self.asked, batch_us, meeting, not meeting, place, -place]
        return torch.tensor([*shared, *[0] * self._slots], dtype=torch.int64)


_PREDICTION = (
    " Lightning's sampler for prediction does not pad the data: at stage 3 repeat samples until their number is a "
    "multiple of devices * batch_size, or predict with ZeROStrategy(stage=2) or devices=1."
)


def _uneven(now: LoaderPass, few: dict[int, int], more: dict[int, int]) -> str:
    """Return the message: how many batches which rank has, and the cure."""
    fewest = min(few.values())
    others = f"{_counts(more)} or more" if more else "another number on the other ranks"
    return (
        f"Got {_counts(few)} in this {now.what}, and {others}. Ranks wait for each other in every step, "
        "so all need the same number. Let a DistributedSampler split the data (Lightning inserts one unless "
        "use_distributed_sampler=False), let an IterableDataset yield as many batches on every rank, set "
        f'Trainer({now.limit}={max(fewest, 1)}), or use all batches there are with ZeROStrategy(uneven="join").'
        + (_PREDICTION if now.what == "prediction" else "")
    )


def _left(now: LoaderPass, ranks: list[int]) -> str:
    """Return the message for ranks that have ended a pass while others take their next turn."""
    who = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    return (
        f"Got the end of this {now.what} on {who} after batch {now.started}, where other ranks go on. With "
        "uneven='join' all ranks end it together, when the last one has no more batches. Set trainer.should_stop on "
        "all ranks in the same batch, and return -1 from on_train_batch_start on all of them or on none."
    )


def _counts(ranks: dict[int, int]) -> str:
    """Return counts as text: ``3 batches on rank 0 and 4 batches on ranks 1, 2``."""
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(ranks.items()):
        by_count.setdefault(count, []).append(rank)
    return " and ".join(
        f"{count} batch{'' if count == 1 else 'es'} on rank{'' if len(who) == 1 else 's'} {', '.join(map(str, who))}"
        for count, who in sorted(by_count.items())
    )
