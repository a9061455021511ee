"""Reports where every rank is when one of them waits long for the others, and ends waits that can never end.

::

    rank 0  waits in all_gather of 'blocks.0' ── 20 s ──> asks ─┬─> collects the answers: prints its line, and a verdict
    rank 1  waits in barrier                  <── once a second ┴─> answers: prints its line
            verdict   no two ranks wait for each other: rank 1 is slow, and the wait continues
                      otherwise, seen twice: every rank closes its connections, and its wait raises `OutOfStepError`

The training thread keeps a journal of the collectives of every process group, and of what it waits for, in plain
attributes. A second thread reads them. It asks and answers through the rendezvous store, on a separate connection, and
uses no process group. One rank asks at a time, so that the load grows only linearly with the number of ranks.

The thread lasts from the start of a run to its end. A rank that leaves the run leaves its answer in the store, for
those that still wait for it; after a run, the thread is back for the time of a wait.

The one invariant: a run is ended early only on proof, see `ls_strategy.distributed.watchdog.deadlock.proof`.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ls_strategy import device as dev
from ls_strategy._torch import default_store, world_group
from ls_strategy.distributed.watchdog.deadlock import (
    Answer,
    awaited,
    differing,
    explain,
    explain_end,
    named,
    place,
    proof,
)
from ls_strategy.distributed.watchdog.standing import standing

_RECENT = 64
"""Entries of a journal that are kept for comparison."""

_LOOK_EVERY_S = 1.0
_ASK_AGAIN_S = 5.0

_NO_BATCH: tuple[int, int, str] = (0, 0, "")

_ASKED = "ls_strategy/whereabouts/asked"
_VERDICT = "ls_strategy/whereabouts/verdict"
_LEFT = "ls_strategy/whereabouts/left"
_ENDED = "ended"

_ANY_QUESTION = 1 << 60
"""Number of the question that a rank answers in advance when it ends a run."""


class CollectiveEntry:
    """One collective that this rank has entered; a context that records a wait of the training thread for it."""

    __slots__ = ("_before", "batch", "era", "journal", "kind", "needs", "number", "of", "since")

    def __init__(self, journal: Journal, kind: str, of: str, needs: Sequence[int] | None) -> None:
        where = journal.where
        self.journal = journal
        self.kind = kind
        self.of = of
        self.needs = needs
        self.era = where.era
        self.number = journal.count
        self.since = 0.0
        self.batch = where.batch

    @property
    def tag(self) -> int:
        """Return a number that is the same on two ranks if they enter the same operation at the same batch."""
        return zlib.crc32(f"{self.kind} {self.of} {self.batch}".encode()) & 0x7FFFFFFF

    def __enter__(self) -> None:
        where = self.journal.where
        self._before, self.since, where.waiting = where.waiting, time.monotonic(), self
        if where.resting is not None:
            where.resting.start()

    def __exit__(self, *_: object) -> None:
        """End the wait, also with an exception: the one around it goes on."""
        where = self.journal.where
        where.waiting = self._before
        if where.resting is not None and self._before is None:
            where.resting.rest()


class Journal:
    """The collectives of one process group, in the order in which this rank entered them."""

    def __init__(self, where: Whereabouts, ranks: Sequence[int], name: str = "") -> None:
        """``ranks``: the global ranks of the group; ``name``: the same on all of them."""
        self.where = where
        self.name = name
        self.ranks = tuple(ranks)
        self.count = 0
        self.recent: deque[CollectiveEntry] = deque(maxlen=_RECENT)
        """The last entries. Their tags are computed when a report needs them: NCCL needs none to send."""

    def enter(self, kind: str, of: str = "", needs: Sequence[int] | None = None) -> CollectiveEntry:
        """Record that this rank enters a collective.

        Args:
            kind: of the collective.
            of: what it moves.
            needs: global ranks that must enter it before it returns. None: all ranks of the group.
        """
        self.count += 1
        self.where.progress += 1
        entry = self.where.last = CollectiveEntry(self, kind, of, needs)
        self.recent.append(entry)
        return entry


class Whereabouts:
    """Record of what the training thread does: its batch, collectives and waits. One per default process group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.journals: dict[str, Journal] = {}
        self.era = 0
        self.batch = _NO_BATCH
        """Number of the pass over the data, number of the batch, and kind of pass; equal on ranks at the same place."""
        self.progress = 0
        self.last: CollectiveEntry | None = None
        self.waiting: CollectiveEntry | None = None
        self.left = False
        """Whether this rank has ended the run of this era."""
        self.verdict = ""
        """Why the waits of this run cannot end."""
        self._watch: _Watch | None = None
        self.resting: _Watch | None = None
        """The watch between two runs, when its thread lasts only as long as a wait."""

    def journal(self, name: str, ranks: Sequence[int]) -> Journal:
        """Return the journal of a process group, by a name that is the same on all its ranks."""
        if name not in self.journals:
            self.journals[name] = Journal(self, ranks, name)
        return self.journals[name]

    def begin_era(self) -> None:
        """Restart all counts; call it where all ranks have just synchronised. Collective, but does not wait."""
        self.era += 1
        self.left = False
        self.batch = _NO_BATCH
        for journal in self.journals.values():
            journal.count = 0
            journal.recent.clear()

    def leave(self) -> None:
        """Report that this rank has ended the run, for ranks that still wait for it, and end the thread."""
        self.left = True
        if self.world_size > 1 and world_group() is not None:
            with suppress(RuntimeError, OSError):  # the rank with the store has ended
                default_store().set(f"{_LEFT}/{self.rank}", str(self.era))
        self.resting = self._watch
        if self._watch is not None:
            self._watch.rest()

    def watch(self, after_s: float | None, device: torch.device, end: Callable[[], None]) -> None:
        """Explain waits of the calling thread that last longer than ``after_s``.

        Args:
            after_s: seconds. None: explain none.
            device: the device on which this rank trains.
            end: a method that makes every wait of this rank fail; its object is referenced weakly.
        """
        self.resting = None
        if self._watch is not None and self._watch.goes_on(after_s, device, end):
            return
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if after_s is not None and self.world_size > 1:
            self._watch = _Watch(self, after_s, device, end)
            self._watch.start()

    def read_verdict(self) -> str:
        """Return the verdict, from the store if this rank has not read it yet."""
        if not self.verdict and self.world_size > 1:
            store = default_store()
            if store.check([_VERDICT]):
                self.verdict = store.get(_VERDICT).decode(errors="replace")
        return self.verdict

    def explain_ended(self) -> str:
        """Return why a connection is closed, if this rank waits for ranks that have ended the run."""
        entry = self.waiting
        if entry is None:
            return ""
        others = [r for r in entry.journal.ranks if r != self.rank]
        try:
            store = default_store()
            known = [r for r in others if store.check([f"{_LEFT}/{r}"])]
            gone = [r for r in known if int(store.get(f"{_LEFT}/{r}")) >= entry.era]
        except RuntimeError:  # the rank with the store has ended
            gone = others if self.left else []
        return explain_end(gone, _what(entry, "", None, time.monotonic() - entry.since)) if gone else ""


class _Watch:
    """The thread that asks and answers."""

    def __init__(self, where: Whereabouts, after_s: float, device: torch.device, end: Callable[[], None]) -> None:
        self._where = where
        self._after_s = after_s
        self._device = device
        self._end = weakref.WeakMethod(end)
        self._look_every_s = min(_LOOK_EVERY_S, after_s / 10)
        self._ask_again_s = min(_ASK_AGAIN_S, after_s)
        self._trained_by = threading.get_ident()
        self._world = weakref.ref(world_group())
        self._store = default_store().clone()  # its own connection: waits on another one block it
        self._store.compare_set(_ASKED, "", "0:-1:0")
        self._incident = self._shown = 0
        self._number = -1
        self._last_question = -1e9
        self._next_question = 0.0
        self._progress = (-1, time.monotonic())
        self._suspected: object = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._parted = False
        """Whether the store has the answer that this rank left when it ended a run."""

    def start(self) -> None:
        """Start the thread, unless it runs, or has nothing to say any more. Does not use the store."""
        if self._thread is not None or self._where.verdict or world_group() is not self._world():
            return
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._done,), name="ls_wait_report", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread inside the store when the interpreter ends aborts the process

    def goes_on(self, after_s: float | None, device: torch.device, end: Callable[[], None]) -> bool:
        """Return whether this watch can serve the next run of this process, which has these arguments; start it."""
        if (after_s, device, threading.get_ident()) != (self._after_s, self._device, self._trained_by):
            return False
        self._end = weakref.WeakMethod(end)
        self.start()
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        self._done.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
            self._thread = None

    def rest(self) -> None:
        """End the thread, and leave an answer to all questions in the store: this rank has ended the run."""
        if self._thread is None:
            return
        self.stop()
        if world_group() is self._world() and not self._parted:
            answer = {**self._answer(), "number": _ANY_QUESTION, "late": False, "what": _what(None, "", None, 0.0)}
            with suppress(RuntimeError, OSError):  # the rank with the store has ended
                default_store().set(self._key(self._where.rank), json.dumps(answer))
                self._parted = True

    def _run(self, done: threading.Event) -> None:
        dev.select(self._device)
        begun = False
        while not done.wait(self._look_every_s) and world_group() is self._world():
            try:
                if not begun:
                    self._begin()
                    begun = True
                self._look()
            except (RuntimeError, OSError):  # the rank with the store has ended
                break
        atexit.unregister(self.stop)

    def _begin(self) -> None:
        """Take back the answer that was left, and pass over questions of the past."""
        if self._parted:
            self._parted = False
            self._store.delete_key(self._key(self._where.rank))
        _, self._number, _ = self._read_question()

    def _look(self) -> None:
        asked, number, incident = self._read_question()
        if self._where.verdict:
            self._done.set()
            return
        if number > self._number:
            self._note_question(number, incident)
            self._say(self._answer(), "")
            return
        now = time.monotonic()
        answer = self._answer(only_due=True)
        if answer is None or now < self._next_question:
            return
        fresh = now - self._last_question > 3 * (self._ask_again_s + 1)
        wanted = f"{number + 1}:{self._where.rank}:{incident + fresh}"
        if self._store.compare_set(_ASKED, asked, wanted).decode() == wanted:
            self._note_question(number + 1, incident + fresh)
            self._investigate()

    def _read_question(self) -> tuple[str, int, int]:
        """Return the last question as stored, its number, and its incident's number. A verdict ends the waits."""
        asked = self._store.get(_ASKED).decode()
        if asked == _ENDED:
            self._where.verdict = self._store.get(_VERDICT).decode(errors="replace")
            end = self._end()
            if self._where.waiting is None:  # no wait of this package raises the verdict
                _print(self._where.verdict)
            if end is not None:
                end()
            return asked, 0, 0
        number, _, incident = map(int, asked.split(":"))
        return asked, number, incident

    def _note_question(self, number: int, incident: int) -> None:
        self._number, self._incident, self._last_question = number, incident, time.monotonic()
        self._next_question = self._last_question + self._ask_again_s

    def _key(self, rank: int) -> str:
        return f"ls_strategy/whereabouts/{rank}"

    # this rank --------------------------------------------------------------------------------------------------------

    def _answer(self, *, only_due: bool = False) -> Any:
        """Return this rank's report; None if ``only_due`` and it has not waited for long."""
        where, now = self._where, time.monotonic()
        entry, progress = where.waiting, where.progress
        if self._progress[0] != progress:
            self._progress = (progress, now)
        since = entry.since if entry is not None else self._progress[1]
        late = now - since >= self._after_s
        if only_due and not late:
            return None
        line, call, everyone = standing(self._trained_by)
        # After a wait as long as the caller's, work that a GPU has left is waiting in a collective of NCCL.
        busy = late and entry is None and not call and dev.is_accelerator(self._device)
        on_device = busy and not dev.stream(self._device).query()
        if only_due and entry is None and not call and not on_device:
            return None  # it computes, or sleeps
        wait: Answer | None = None
        if entry is not None and entry.era == where.era:
            wait = {"group": entry.journal.name, "number": entry.number, "needs": entry.needs}
        return {
            "number": self._number,
            "rank": where.rank,
            "era": where.era,
            "progress": progress,
            "late": late,
            "left": where.left,
            "wait": wait,
            "call": f"torch.distributed.{call}" if call and entry is None else "",
            "everyone": everyone and entry is None,
            "what": _what(entry, call, where.last if on_device else None, now - since),
            "batch": where.batch,
            "line": line,
            "journals": {
                name: [j.count, [(e.number, e.tag) for e in list(j.recent)], list(j.ranks)]
                for name, j in list(where.journals.items())
            },
        }

    def _say(self, answer: Answer, waits_for: str) -> None:
        """Store the answer, and print it once per incident."""
        self._store.set(self._key(self._where.rank), json.dumps(answer))
        if self._shown < self._incident:
            self._shown = self._incident
            _print(f"{place(answer)}{waits_for}")

    # all ranks --------------------------------------------------------------------------------------------------------

    def _investigate(self) -> None:
        mine = self._answer()
        self._store.set(self._key(self._where.rank), json.dumps(mine))
        answers = self._collect()
        answers[self._where.rank] = mine
        absent = [r for r in range(self._where.world_size) if r not in answers]
        waits_for = sorted({*awaited(mine, answers), *(differing(mine, answers) if mine["late"] else ()), *absent})
        text = f"; it waits for {named(waits_for)}" if waits_for else ""
        if absent:
            text += f" ({named(absent)} did not answer: ended, stopped, or in code that holds Python's lock)"
        self._say(mine, text)
        guilty = proof(answers)
        seen = [(r, answers[r]["progress"], answers[r]["wait"]) for r in guilty]
        if guilty and seen == self._suspected:
            self._store.set(_VERDICT, explain([answers[r] for r in guilty]))
            self._store.set(_ASKED, _ENDED)
            self._read_question()
        elif guilty:
            self._next_question = 0.0
        self._suspected = seen

    def _collect(self) -> dict[int, Answer]:
        """Return the answers of other ranks to this question that arrive in time."""
        answers: dict[int, Answer] = {}
        left = {r for r in range(self._where.world_size) if r != self._where.rank}
        deadline = time.monotonic() + 2.5 * max(self._look_every_s, 0.2)
        while left and time.monotonic() < deadline and not self._done.wait(self._look_every_s / 4):
            for rank in [r for r in left if self._store.check([self._key(r)])]:
                answer = json.loads(self._store.get(self._key(rank)))
                if answer["number"] >= self._number:
                    answers[rank] = answer
                    left.discard(rank)
        return answers


def _print(text: str) -> None:
    sys.stderr.write(f"ls_strategy: {text}\n")  # in one call: ranks share the terminal
    sys.stderr.flush()


def _what(entry: CollectiveEntry | None, call: str, on_device: CollectiveEntry | None, seconds: float) -> str:
    shown = entry or on_device
    if shown is not None:
        of = f" of {shown.of!r}" if shown.of else ""
        return f"has waited {seconds:.0f} s in {shown.kind}{of}" + (" or before it, on the GPU" if on_device else "")
    return f"is in torch.distributed.{call}" if call else "is in no collective"
