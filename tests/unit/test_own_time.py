"""The own time of a step is that of its phases without waits for other ranks; reading it never waits for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ls_strategy import spans
from ls_strategy.spans import BACKWARD, COMMUNICATION, COPY, FORWARD, OTHER, VALIDATION, SpanRecorder
from ls_strategy.spans import recorder as recorder_file
from ls_strategy.spans.own_time import OwnTime
from tests.clocks import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock(100.0)
    monkeypatch.setattr(recorder_file, "time", made)
    monkeypatch.setattr(spans, "time", made)
    yield made
    if SpanRecorder.active is not None:
        SpanRecorder.active.stop()


def recording() -> SpanRecorder:
    recorder = SpanRecorder(torch.device("cpu"))
    recorder.start()
    recorder.own_time.begin(recorder.phase)
    return recorder


@pytest.mark.parametrize("detail", [False, True])
def test_waits_for_other_ranks_are_not_own_time_and_other_waits_are(clock: Clock, detail: bool) -> None:
    recorder = recording()
    recorder.detail = detail
    clock.wait(1)
    with spans.phase(FORWARD):
        clock.wait(2)
        with spans.waiting(COMMUNICATION):
            clock.wait(4)
            with spans.waiting(COMMUNICATION, "inside"):
                clock.wait(8)
            clock.wait(16)
        with spans.waiting(COPY):
            clock.wait(32)
    with spans.phase(VALIDATION):
        clock.wait(64)
    with spans.phase(BACKWARD), suppress(RuntimeError), spans.waiting(COMMUNICATION):
        clock.wait(128)
        raise RuntimeError
    clock.wait(256)
    recorder.own_time.end(7)
    clock.wait(512)  # between two steps
    assert recorder.own_time.take() == [(7, {OTHER: 257, FORWARD: 34, VALIDATION: 64, BACKWARD: 0})]
    assert recorder.own_time.take() == []


def test_a_phase_that_begins_in_a_wait_counts_from_its_end(clock: Clock) -> None:
    recorder = recording()
    with spans.waiting(COMMUNICATION):
        recorder.enter(BACKWARD)
        clock.wait(1)
    clock.wait(2)
    recorder.leave(BACKWARD)
    recorder.own_time.end(1)
    assert recorder.own_time.take() == [(1, {OTHER: 0, BACKWARD: 2})]


def test_a_step_that_does_not_count_leaves_nothing(clock: Clock) -> None:
    recorder = recording()
    clock.wait(1)
    recorder.own_time.end(None)
    with spans.phase(FORWARD), spans.waiting(COMMUNICATION):
        clock.wait(1)
    recorder.own_time.begin(recorder.phase)
    clock.wait(3)
    recorder.own_time.end(2)
    assert recorder.own_time.take() == [(2, {OTHER: 3})]


class Event:
    """One of a device that computes later than it is told to."""

    def __init__(self, at: float, device: Any) -> None:
        self._at, self._device = at, device

    def query(self) -> bool:
        return self._device.reached >= self._at

    def elapsed_time(self, other: Event) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("both events must be recorded and completed")
        return 1e3 * (other._at - self._at)


def test_steps_of_a_device_are_read_once_it_has_computed_them_and_old_ones_are_dropped() -> None:
    device = SimpleNamespace(reached=0.0, now=0.0)
    own = OwnTime(SimpleNamespace(on_device=True, now=lambda: Event(device.now, device)))  # type: ignore[arg-type]
    for step in range(1, 101):
        own.begin(FORWARD)
        device.now += 3
        with own:
            device.now += 1
        own.end(step)
    assert own.take() == []
    device.reached = 4.0 * 99
    steps = own.take()
    assert [step for step, _ in steps] == list(range(100 - 63, 100))
    assert all(seconds == {FORWARD: 3} for _, seconds in steps)
    device.reached = 400.0
    assert [step for step, _ in own.take()] == [100]
    own.begin(FORWARD)
    own.change(Event(1000.0, device), BACKWARD)  # in a stream that is later
    own.end(101)
    own.begin(FORWARD)
    own.end(102)
    assert [step for step, _ in own.take()] == [102]
