"""A clock for time limits: it goes more slowly where more work waits than there are processors.

A limit of 100 s means 100 s of a machine that runs nothing else. `conftest` puts this clock under the limits of
`spawn`, of ``subprocess`` and of pytest-timeout, so that no test has to know how busy the machine is. What hangs on an
idle machine still ends after its limit, and on the busiest one after `_SLOWEST` times that.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

_SLOWEST = 10.0


def processors() -> int:
    return len(os.sched_getaffinity(0))


def slowness() -> float:
    """How many times longer work takes than alone, by the mean number of processes that want to run."""
    return min(max(os.getloadavg()[0] / processors(), 1.0), _SLOWEST)


def wall(seconds: float) -> float:
    """Return what ``seconds`` of a machine that runs nothing else are on one as busy as this is now."""
    return seconds * slowness()


class Clock:
    """Seconds since some moment, as ``time.monotonic``, on a machine that runs nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at = self._now = time.monotonic()

    def __call__(self) -> float:
        with self._lock:
            at = time.monotonic()
            self._now += (at - self._at) / slowness()
            self._at = at
            return self._now


clock = Clock()


def install() -> None:
    """Put the clock under the limits of ``subprocess`` and of `spawn`."""
    import ls_strategy.testing

    subprocess._time = clock  # type: ignore[attr-defined]
    ls_strategy.testing.clock = clock


class _Alarms:
    """One thread that waits for the ends of all limits: starting and joining one takes as long as many a test."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[object, tuple[float, Callable[[], Any]]] = {}
        self._thread = threading.Thread()

    def add(self, end: float, act: Callable[[], Any]) -> Callable[[], None]:
        key = object()
        with self._changed:
            self._due[key] = end, act
            if not self._thread.is_alive():  # nor in a fork of the process that started it
                self._thread = threading.Thread(target=self._wait, name="limits", daemon=True)
                self._thread.start()
            elif end - clock() < _POLL_S:
                self._changed.notify()
        return partial(self._cancel, key)

    def _cancel(self, key: object) -> None:
        with self._changed:
            self._due.pop(key, None)

    def _wait(self) -> None:
        while True:
            with self._changed:
                now = clock()
                over = [self._due.pop(key)[1] for key, (end, _) in list(self._due.items()) if end <= now]
                if not over:
                    first = min((end for end, _ in self._due.values()), default=now + _POLL_S)
                    self._changed.wait(min(max(first - now, 0.01), _POLL_S))
            for act in over:
                act()


_POLL_S = 1.0
_alarms = _Alarms()


def after(seconds: float, act: Callable[[], Any]) -> Callable[[], None]:
    """Call ``act`` on a thread when the clock has gone on by ``seconds``. Returns what cancels it."""
    return _alarms.add(clock() + seconds, act)
