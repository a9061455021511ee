"""Records times on the CPU, or in a stream of the device, and converts them to seconds on request."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ls_strategy import device as dev
from ls_strategy.spans.own_time import OwnTime
from ls_strategy.spans.record import COMMUNICATION, OTHER, PHASES, VALIDATION, Span, SpanRecord
from ls_strategy.spans.stamps import Stamper

_NOTHING = nullcontext()

_FOLD_AT = 1024
"""Phase changes that are kept before their seconds are summed."""


class Clock:
    """The clock of one device's computation."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is where the model computes."""
        self.device = device
        self.on_device = dev.is_accelerator(device)

    def now(self, stream: Any = None) -> Any:
        """Return the time: seconds, or on an accelerator an event recorded in ``stream`` (None: the current one)."""
        if not self.on_device:
            return time.perf_counter()
        return dev.record(self.device, stream, timing=True)

    def seconds(self, moments: Iterable[Any]) -> list[float]:
        """Convert times of `now` to seconds of the host's ``time.perf_counter``. Waits for the device."""
        moments = list(moments)
        if not self.on_device or all(isinstance(m, float) for m in moments):
            return moments
        dev.synchronize(self.device)
        last = self.now()
        last.synchronize()
        here = time.perf_counter()  # host and device are synchronized here
        return [m if isinstance(m, float) else here - dev.seconds_between(m, last) for m in moments]


@dataclass
class Note:
    """Something with a duration."""

    category: str
    """`COMMUNICATION` or `COPY`."""

    name: str
    start: Any
    """A time of `Clock`, like all times here until `Window.resolve`."""

    end: Any
    """None while it is in flight."""

    nbytes: int = 0
    moves: bool = True
    """Whether data is in flight."""

    waits: bool = False
    """Whether computation is blocked."""


@dataclass(frozen=True)
class Window:
    """Recording of phases and spans between two times of a clock."""

    clock: Clock
    start: Any
    end: Any
    changes: list[tuple[Any, str]]
    """The phase from each time on; the last one is ``end``."""

    notes: list[Note]
    samples: list[tuple[float, str, dict[str, int]]]
    sent: dict[str, int]

    def resolve(self) -> SpanRecord:
        """Return the record in seconds. Waits for the device."""
        begins = [note.start for note in self.notes]
        ends = [self.end if note.end is None else note.end for note in self.notes]
        # In one call, so that device and host are synchronized once.
        moments = [self.start, self.end, *begins, *ends, *(at for at, _ in self.changes)]
        start, end, *times = self.clock.seconds(moments)
        count = len(self.notes)
        changes = times[2 * count :]
        phases = [
            Span("phase", name, begin, until)
            for (_, name), begin, until in zip(self.changes, changes, changes[1:], strict=False)
            if until > begin
        ]
        spans = [
            Span(n.category, n.name, max(begin, start), min(until, end), n.nbytes * (begin >= start), n.moves, n.waits)
            for n, begin, until in zip(self.notes, times[:count], times[count : 2 * count], strict=True)
            if begin < end and until > start
        ]
        return SpanRecord(start, end, phases, spans, self.samples, self.sent)


class SpanRecorder:
    """Records what this process does between `start` and `stop`."""

    active: ClassVar[SpanRecorder | None] = None
    """The recorder that currently records."""

    def __init__(self, device: torch.device) -> None:
        """``device`` is where the model computes."""
        self.clock = Clock(device)
        self.own_time = OwnTime(self.clock)
        self.detail = False
        """Whether collectives, copies and waits are recorded."""
        self.measure: Callable[[], Mapping[str, int]] | None = None
        """Returns bytes in use by category; called after every phase of a window."""
        self.each_unit = False
        """Call `measure` also before every unit of the model."""
        self.sent: Counter[str] = Counter()
        """Bytes by kind."""
        self.window_start: Any = None
        """None outside of a window."""
        self._notes: list[Note] = []
        self._earlier_notes: list[Note] = []
        """Notes from before the window, which may extend into it."""
        self._samples: list[tuple[float, str, dict[str, int]]] = []
        self._window_changes: list[tuple[Any, str]] = []
        self._stack = [OTHER]
        self._changes: list[tuple[Any, str]] = []
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._side: Any = None
        self._stamper: Stamper | None = None

    def start(self) -> None:
        """Start recording, and replace any other recorder."""
        self._stack = [OTHER]
        self._changes = [(self.clock.now(), OTHER)]
        self._totals.clear()
        SpanRecorder.active = self

    def stop(self) -> None:
        """Stop recording. Idempotent."""
        if SpanRecorder.active is self:
            SpanRecorder.active = None
        self.detail = False
        self.window_start = None
        self.measure = None
        if self._stamper is not None:
            self._stamper.close()
            self._stamper = None

    @property
    def phase(self) -> str:
        """Return the current phase."""
        return self._stack[-1]

    # phases ----------------------------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Start a phase; the enclosing one continues at `leave`. Ignored inside the same phase, or validation."""
        if self._stack[-1] not in (phase, VALIDATION):
            self._stack.append(phase)
            self._change()

    def leave(self, phase: str) -> None:
        """End a phase, and all phases inside it that an exception left open."""
        if phase not in self._stack:
            return
        while self._stack.pop() != phase:
            pass
        self._change()
        self.sample(phase)

    def _change(self) -> None:
        change = (self.clock.now(), self._stack[-1])
        self._changes.append(change)
        if self.own_time.on:
            self.own_time.change(*change)
        if self.window_start is not None:
            self._window_changes.append(change)
        if len(self._changes) > _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        times = self.clock.seconds(at for at, _ in self._changes)
        for (_, name), begin, end in zip(self._changes, times, times[1:], strict=False):
            self._totals[name] += end - begin
        del self._changes[:-1]

    def take_phases(self) -> dict[str, float]:
        """Return the seconds per phase since the last call. They add up to the elapsed time. Waits for the device."""
        self._changes.append((self.clock.now(), self._stack[-1]))
        self._fold()
        taken = {phase: self._totals.pop(phase, 0.0) for phase in (*PHASES, VALIDATION)}
        return taken | dict(self._totals)

    # a window --------------------------------------------------------------------------------------------------------

    def prepare_window(self) -> None:
        """Set ``detail`` some time before `begin_window`, to include what is in flight when the window begins."""
        if not self.detail:
            self._notes = []
            self.detail = True

    def begin_window(self) -> None:
        """Begin a window."""
        self.window_start = self.clock.now()
        self._window_changes = [(self.window_start, self._stack[-1])]
        self._earlier_notes, self._notes = self._notes, []
        self._samples = []
        self.sent.clear()

    def end_window(self) -> Window:
        """Return what was recorded since `begin_window`. Does not wait."""
        start, end, self.window_start = self.window_start, self.clock.now(), None
        changes, notes = [*self._window_changes, (end, "")], [*self._earlier_notes, *self._notes]
        return Window(self.clock, start, end, changes, notes, list(self._samples), dict(self.sent))

    def sample(self, where: str) -> None:
        """Record how much memory is in use."""
        if self.window_start is not None and self.measure is not None:
            self._samples.append((time.perf_counter(), where, dict(self.measure())))

    # what overlaps computation ---------------------------------------------------------------------------------------

    def follow(self, works: Sequence[Any], name: str, nbytes: int) -> Sequence[Any]:
        """Record a collective from now to its end. Returns what to wait for instead of ``works``."""
        note = Note(COMMUNICATION, name, self.clock.now(), None, nbytes)
        self._notes.append(note)
        if not self.clock.on_device:
            self._stamper = self._stamper or Stamper()
            return (self._stamper.follow(works, partial(setattr, note, "end")),)
        self._side = self._side or dev.new_stream(self.clock.device)
        with dev.on(self._side):
            for work in works:
                work.wait()  # only the side stream waits
        note.end = self.clock.now(self._side)
        return works

    def wait(self, category: str, name: str) -> AbstractContextManager[None]:
        """Record a wait of the training thread."""
        own = self.own_time if category == COMMUNICATION and self.own_time.on else _NOTHING
        if not self.detail:
            return own
        return self._noted_wait(
            Note(category, name, self.clock.now(), None, moves=category == COMMUNICATION, waits=True), own
        )

    @contextmanager
    def _noted_wait(self, note: Note, own: AbstractContextManager[None]) -> Generator[None, None, None]:
        with own, self.during(note, self.clock.now):
            yield

    @contextmanager
    def during(self, note: Note, now: Callable[[], Any]) -> Generator[None, None, None]:
        """Record what runs inside."""
        try:
            yield
        finally:
            note.end = now()
            self._notes.append(note)
