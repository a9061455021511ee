"""The file with measured runs: ``measured_steps.json`` in the cache of this user.

A file that others could have written, or that is damaged, is ignored with one line in the log: it is no more than a
hint. Writers take a lock, add to what is there, and rename a complete file.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ls_strategy.extras.planner.learned import MeasuredRun, path
from ls_strategy.extras.planner.speeds import Speeds
from ls_strategy.extras.planner.work import StepWork, Work
from ls_strategy.host.pytorch import rank_zero_warn
from ls_strategy.ops._trust import locked, reason_against

_FORMAT = 1
_MOST_RUNS = 64
"""Runs that are kept; the oldest are dropped."""

_MOST_BYTES = 1 << 20
"""A larger file is not one of ours."""

_ROUNDING = 0.01
"""Relative, of times that are means of the same steps."""

_PATIENCE_S = 5.0
"""Time to wait for another process that writes. A run that is not kept is no loss."""


def load(machine: str | None = None) -> list[MeasuredRun]:
    """Return the runs of a machine, the oldest first; None: of all machines. A bad file is ignored, with a warning."""
    file = path()
    try:
        if not file.exists():
            return []
        against = reason_against(file)
        if against is not None:
            raise ValueError(against)
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        runs = [_run_of(each) for each in _content(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        rank_zero_warn(
            f"Got {file} with steps that were measured before, but it is ignored: {type(error).__name__}: {error}. "
            "Remove it: ls-strategy plan --forget."
        )
        return []
    return [run for run in runs if machine is None or run.machine == machine]


def add(run: MeasuredRun) -> bool:
    """Add a run to the file. Return whether it could be written; never raises for a bad file or folder."""
    file = path()
    try:
        if reason_against(file.parent) is not None:
            return False
        with locked(file.with_suffix(".lock"), time.monotonic() + _PATIENCE_S):
            runs = [*load(), run][-_MOST_RUNS:]
            text = json.dumps({"format": _FORMAT, "runs": [asdict(each) for each in runs]})
            descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                    opened.write(text)
                Path(temporary).replace(file)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
    except OSError as error:
        rank_zero_warn(f"{file} cannot be written, so the next plan does not know of this run: {error}.")
        return False
    return True


def forget() -> int:
    """Remove the file. Return how many runs it had."""
    count = len(load())
    path().unlink(missing_ok=True)
    return count


def _content(text: str) -> Sequence[Any]:
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("runs"), list):
        raise ValueError(f"it is not of format {_FORMAT}")
    return found["runs"]


def _run_of(found: Mapping[str, Any]) -> MeasuredRun:
    """Return a run from JSON.

    Raises:
        ValueError: something is missing, or is not a number that a measurement can give. So do TypeError and KeyError.
    """
    work = dict(found["work"])
    given: dict[str, Any] = {name: Work(*map(_count, work.pop(name))) for name in ("forward", "backward")}
    given |= {name: bool(work.pop(name)) for name in ("steps_on_host", "gathers")}
    given |= {name: _count(value) for name, value in work.items()}
    speeds = dict(found["speeds"])
    overlaps = bool(speeds.pop("overlaps"))
    if set(speeds) != {f.name for f in fields(Speeds)} - {"overlaps"}:
        raise ValueError("it has other speeds")
    numbers = {name: _number(value) for name, value in speeds.items()}
    if min(numbers[name] for name in ("flops", "touch", "link", "bus", "update", "host_update")) <= 0:
        raise ValueError("it has a speed of 0")
    seconds = {str(name): _number(value) for name, value in dict(found["seconds"]).items()}
    if not 0 < seconds["step"] < math.inf:
        raise ValueError("it has a step without a time")
    if max(seconds.values()) > (1 + _ROUNDING) * seconds["step"]:
        raise ValueError("it has a phase that takes longer than its step")
    done, at = StepWork(**given), Speeds(**numbers, overlaps=overlaps)
    if not 0 < at.seconds(done) < math.inf:
        raise ValueError("it has speeds at which its step takes no time, or for ever")
    return MeasuredRun(
        at=_number(found["at"]),
        machine=str(found["machine"]),
        workload=str(found["workload"]),
        name=str(found["name"]),
        work=done,
        speeds=at,
        seconds=seconds,
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value < 0:
        raise ValueError(f"it has {str(value)[:40]!r} in the place of a number")
    return float(value)


def _count(value: Any) -> int:
    number = _number(value)
    if math.isinf(number):
        raise ValueError("it has a count that is infinite")
    return int(number)
