"""Seconds of every step in which this rank did not wait for others, by phase. Nothing here waits for the device.

::

    phases     | data | forward                | backward        | optimizer |
    waits              ~~~~        ~~                  ~~~~            ~~~      for other ranks, on the training thread
    own time   | data | forward less its waits | ...                            what makes the others wait

Ranks of synchronous training take equally long for a step: those that are fast wait. Only own times tell them apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, Protocol

from ls_strategy import device as dev

_PENDING = 64
"""Steps whose events may be outstanding on an accelerator; older ones are dropped."""


class _Clock(Protocol):
    on_device: bool

    def now(self) -> Any: ...


class OwnTime:
    """The own times of steps. Entered as a context manager around each wait for other ranks; waits may nest."""

    def __init__(self, clock: _Clock) -> None:
        """``clock``: of the device's computation, see `ls_strategy.spans.recorder.Clock`."""
        self.on = False
        """Whether the current step is measured."""
        self._clock = clock
        self._waits = 0
        self._phase = ""
        self._changes: list[tuple[Any, str]] = []
        """The phase from each time on; empty while the rank waits."""
        self._ended: deque[tuple[int, list[tuple[Any, str]]]] = deque(maxlen=_PENDING)

    def begin(self, phase: str) -> None:
        """Begin a step, in ``phase``."""
        self.on, self._phase = True, phase
        self._changes = [(self._clock.now(), "" if self._waits else phase)]

    def change(self, at: Any, phase: str) -> None:
        """Note that ``phase`` runs from the time ``at`` on."""
        self._phase = phase
        if not self._waits:
            self._changes.append((at, phase))

    def __enter__(self) -> None:
        self._waits += 1
        if self._waits == 1 and self.on:
            self._changes.append((self._clock.now(), ""))

    def __exit__(self, *_: object) -> None:
        self._waits -= 1
        if self._waits == 0 and self.on:
            self._changes.append((self._clock.now(), self._phase))

    def end(self, step: int | None) -> None:
        """End the step. ``step``: its number; None: it does not count."""
        if self.on and step is not None:
            self._changes.append((self._clock.now(), ""))
            self._ended.append((step, self._changes))
        self.on, self._changes = False, []

    def take(self) -> list[tuple[int, Mapping[str, float]]]:
        """Return number and seconds by phase of the steps that ended, as far as the device has computed them."""
        taken: list[tuple[int, Mapping[str, float]]] = []
        while self._ended and (not self._clock.on_device or self._ended[0][1][-1][0].query()):
            step, changes = self._ended.popleft()
            with suppress(RuntimeError):  # an event in a stream of the user's, which is later than the one that ends
                taken.append((step, self._seconds(changes)))
        return taken

    def _seconds(self, changes: list[tuple[Any, str]]) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for (begin, phase), (end, _) in pairwise(changes):
            if phase:
                passed = dev.seconds_between(begin, end) if self._clock.on_device else end - begin
                seconds[phase] = seconds.get(phase, 0.0) + passed
        return seconds
