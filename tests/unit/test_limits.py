"""Limits of tests on a busy machine, which its load average is told to be, and on an idle one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from ls_strategy.testing import RankTimeoutError, spawn
from tests import limits


@pytest.fixture(params=["idle", "busy"])
def busy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    load = 5.0 * limits.processors() if request.param == "busy" else 0.0
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    return request.param == "busy"


def test_the_clock(busy: bool) -> None:
    began, at = limits.clock(), time.monotonic()
    time.sleep(0.5)
    went, passed = limits.clock() - began, time.monotonic() - at
    assert went == pytest.approx(passed / 5 if busy else passed, rel=0.2)


def test_nothing_makes_it_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e9, 0.0, 0.0))
    began = limits.clock()
    time.sleep(0.5)
    assert limits.clock() - began >= 0.5 / limits._SLOWEST


@pytest.mark.wide
def test_subprocesses(busy: bool) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(1)"]
    if busy:
        subprocess.run(command, timeout=0.75, check=True)
        return
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(command, timeout=0.75, check=True)


def sleep(rank: int, world_size: int, seconds: float) -> int:
    time.sleep(seconds)
    return rank


@pytest.mark.sample(1)
def test_ranks(busy: bool) -> None:
    if busy:
        assert spawn(sleep, 2, 6.0, timeout_s=4, init_process_group=False) == [0, 1]
        return
    with pytest.raises(RankTimeoutError, match=r"(?s)no report within 1 s.*test_limits\.py.* in sleep|still starting"):
        spawn(sleep, 2, 60.0, timeout_s=1, init_process_group=False)


def test_alarms() -> None:
    """The later one is set first, and one is cancelled."""
    rang, last = [], threading.Event()
    limits.after(0.3, lambda: (rang.append("later"), last.set()))
    cancel = limits.after(0.1, lambda: rang.append("cancelled"))
    limits.after(0.05, lambda: rang.append("soon"))
    cancel()
    assert last.wait(limits.wall(20))
    assert rang == ["soon", "later"]


@pytest.mark.wide
@pytest.mark.timeout(1)
def test_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest-timeout would end the process."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1e9, 0.0, 0.0))
    time.sleep(1.5)
