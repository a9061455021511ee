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


def after(seconds: float, act: Callable[[], Any], name: str) -> Callable[[], None]:
    """Call ``act`` on a thread when the clock has gone on by ``seconds``. Returns what cancels it."""
    end, cancelled = clock() + seconds, threading.Event()

    def wait() -> None:
        while not cancelled.wait(max(min(end - clock(), 1.0), 0.01)):
            if clock() >= end:
                act()
                return

    thread = threading.Thread(target=wait, name=name, daemon=True)
    thread.start()

    def cancel() -> None:
        cancelled.set()
        thread.join()

    return cancel
