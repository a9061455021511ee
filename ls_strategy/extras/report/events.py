"""Collect the events of a run besides training: restarts, skipped steps, preemption, values that are not numbers."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ls_strategy.extras.report.run import Run
from ls_strategy.extras.report.series import Series

_MOST = 200  # events of one kind; further ones are counted


@dataclass(frozen=True)
class Event:
    """One event of a run."""

    step: int | None
    time: float | None  # seconds since 1970
    what: str
    detail: str
    is_restart: bool = False  # whether charts mark it


def events_of(run: Run) -> list[Event]:
    """Return the events in the order of their steps."""
    found = [*_of_file(run), *_sessions(run), *_elastic(run), *_skipped(run), *_not_finite(run), *_checkpoints(run)]
    return sorted(found, key=lambda e: (e.step if e.step is not None else -1, e.time or 0.0))


def restarts_of(run: Run) -> list[int]:
    """Return the steps at which charts mark a restart."""
    found = [*_of_file(run), *_sessions(run), *_elastic(run)]
    return [event.step for event in found if event.is_restart and event.step is not None]


def moment(seconds: float | None) -> str:
    """Return a time for readers, in UTC; empty if it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


def _of_file(run: Run) -> Iterator[Event]:
    number = 0
    open_since: float | None = None
    for line in run.lines:
        step = line.get("step")
        step = step if isinstance(step, int) else None
        if line["event"] == "start":
            if open_since is not None:
                yield Event(None, None, "ended without a word", "the process before the next start was killed, perhaps")
            number += 1
            detail = f"{line.get('world_size')} ranks on {line.get('device')}, {line.get('precision')}"
            yield Event(step, line["time"], "start" if number == 1 else "restart", detail, number > 1)
            open_since = line["time"]
        elif line["event"] == "end":
            yield Event(step, line["time"], "end", "the fit ended normally")
            open_since = None
        elif line["event"] == "error":
            what = {"Preempted": "preemption", "KeyboardInterrupt": "interrupted"}.get(str(line.get("type")), "error")
            yield Event(step, line["time"], what, f"{line.get('type')}: {line.get('message')}")
            open_since = None
        elif line["event"] in ("slow rank", "rank no longer slow"):
            rank = f"rank {line.get('rank')} ({line.get('about')})"
            detail = f"{rank}, most in {line.get('phase')}, since step {line.get('since')}"
            yield Event(step, line["time"], line["event"], detail)


def _sessions(run: Run) -> Iterator[Event]:
    for first, before in run.repeated:
        detail = f"steps {first} to {before} had been logged before; the charts show them as logged last"
        yield Event(first, None, "steps repeated", detail, not run.lines)
    if not run.lines and len(run.sessions) > 1:
        for begin, _ in run.sessions[1:]:
            yield Event(None, begin, "restart", "another process went on with this log")


def _elastic(run: Run) -> Iterator[Event]:
    seconds, repeated, ranks = (run.get(f"elastic/{name}") for name in ("seconds", "repeated_steps", "ranks"))
    for i, (step, value) in enumerate(seconds.points() if seconds is not None else ()):
        detail = f"{value:.1f} s from the last finished step to the next one"
        if repeated is not None and i < len(repeated):
            detail += f", {repeated.values[i]:.0f} steps repeated"
        if ranks is not None and i < len(ranks):
            detail += f", on {ranks.values[i]:.0f} ranks"
        yield Event(step, _time_at(seconds, i), "elastic restart", detail, True)
    left = run.get("elastic/left_out")
    for i, (step, rank) in enumerate(left.points() if left is not None else ()):
        detail = f"rank {rank:.0f}: CorruptionCheck has found a rank of its node wrong twice"
        yield Event(step, _time_at(left, i), "left out", detail)


def _time_at(series: Series | None, i: int) -> float | None:
    return None if series is None or not math.isfinite(series.times[i]) else series.times[i]


def _skipped(run: Run) -> Iterator[Event]:
    yield from _counted(run, "zero/skipped_steps", "steps skipped", "after an overflow in fp16")
    yield from _counted(run, "zero_spikes/skipped_steps", "steps left out", "by SpikeGuard")
    yield from _counted(run, "zero_corruption/found", "wrong values", "found by CorruptionCheck")


def _counted(run: Run, tag: str, what: str, why: str) -> Iterator[Event]:
    """Yield an event wherever a count has grown."""
    series = run.get(tag)
    before = count = 0.0
    for i, (step, value) in enumerate(series.points() if series is not None else ()):
        if value > before:
            count += 1
            if count <= _MOST:
                detail = f"{value - before:.0f} {why} since the value before; {value:.0f} in all"
                yield Event(step, _time_at(series, i), what, detail)
        before = value
    if count > _MOST:
        yield Event(None, None, what, f"{count - _MOST:.0f} more times")


def _not_finite(run: Run) -> Iterator[Event]:
    for tag, series in run.scalars.items():
        bad = [(step, value) for step, value in series.points() if not math.isfinite(value)]
        if bad:
            step, value = bad[0]
            yield Event(step, None, "not a number", f"{tag} is {value:g}, the first of {len(bad)} such values")


def _checkpoints(run: Run) -> Iterator[Event]:
    for each in run.checkpoints[-_MOST:]:
        detail = f"{each.name}{f' ({each.layout})' if each.layout else ''}"
        yield Event(each.step, each.saved_at, "checkpoint", detail)
