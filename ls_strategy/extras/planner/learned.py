"""What runs on this machine have measured, in a small file of the cache, and the speeds that this teaches.

::

    zero_auto ── StepWork, Speeds, measured phases ──> measured_steps.json ──> corrected Speeds ──> the next plan

A correction is a factor of all speeds, and one for each group in `GROUPS`: the likeliest ones, if speeds that were
measured by themselves are right up to `_SPREAD`. So what no run tells apart stays as it was measured. Where the device
is the host, calls are as slow as computation. Runs of other models come first, and those of the same model correct the
result.

Environment:
    LS_STRATEGY_LEARN: ``0``: nothing is read or written.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ls_strategy import __version__
from ls_strategy import device as dev
from ls_strategy.extras.planner.speeds import Speeds
from ls_strategy.extras.planner.work import StepWork, Work
from ls_strategy.host.pytorch import rank_zero_warn
from ls_strategy.ops._build import cache_dir
from ls_strategy.ops._trust import locked, reason_against
from ls_strategy.tiers.threads import usable_cores

SWITCH = "LS_STRATEGY_LEARN"  # environment variable that turns learning off
GROUPS: dict[str, tuple[str, ...]] = {
    "device": ("flops", "touch"),
    "host": ("operation", "block", "context", "policy", "handover"),
    "traffic": ("link", "message", "wait"),
    "bus": ("bus",),
    "update": ("update", "host_update"),
}
"""Speeds that a factor corrects together, by the part of `Phase` that they make."""

_TOGETHER = "all"
"""A factor of all groups: training shares cores, caches and memory with itself, and a machine with other work."""

_SPREAD = {_TOGETHER: 0.5, "device": 0.7, "host": 0.4, "traffic": 0.4, "bus": 0.4, "update": 0.4}
"""By how much speeds that were measured by themselves are off: standard deviations of logarithms. What a model computes
is seldom as fast as the one product of matrices that is measured."""

_STEP_SPREAD = 0.03  # the same of measured steps
_PHASE_SPREAD = 0.25
"""Of measured phases, as a share of the step: ranks wait for each other sometimes in one, and sometimes in another. A
short phase that they wait in takes many times what it would."""

_OUTLIER = 2.0  # spreads beyond which a step counts as disturbed
_MOST = math.log(10)  # a factor is at most 10, and at least a tenth
_AGING = 0.8  # the weight of a run over that of the next one
_RECENT = 8  # runs whose speeds are averaged with those that are measured now


@dataclass(frozen=True)
class MeasuredRun:
    """One run."""

    at: float  # seconds since the epoch
    machine: str
    workload: str
    name: str
    work: StepWork
    speeds: Speeds  # as they were measured when the run began
    # ``step``, and if they are known ``forward``, ``backward``, ``optimizer`` and ``rest``.
    seconds: Mapping[str, float]


def is_on() -> bool:
    """Return whether runs are learned from."""
    return os.environ.get(SWITCH) != "0"


def machine_of(device: torch.device, ranks: int, ranks_per_node: int, precision: str) -> str:
    """Return what has to be equal for runs to say something about each other."""
    where = f"{dev.name(device)}, {_processor()}, {usable_cores():g} cores"
    versions = f"torch {torch.__version__}, ls_strategy {__version__}"
    return f"{where}; {ranks} ranks, {min(ranks, ranks_per_node)} per node; {precision}; {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())


def workload_of(module: object, numel: int, work: StepWork) -> str:
    """Return what runs of the same model and batch have in common; ``work``: of any candidate."""
    return f"{type(module).__name__}, {numel} parameters, {work.forward.flops} FLOPs in forward"


# --- corrections ------------------------------------------------------------------------------------------------------


def corrected(now: Speeds | None, runs: Sequence[MeasuredRun], workload: str) -> Speeds:
    """Return the speeds of this machine for a workload.

    Args:
        now: what was measured now; None: nothing.
        runs: of this machine, the oldest first; at least one, if nothing was measured now.
        workload: see `workload_of`.
    """
    base = _typical([*([] if now is None else [now]), *(run.speeds for run in runs[-_RECENT:])])
    own = [run for run in runs if run.workload == workload]
    factors = _fitted(base, [run for run in runs if run.workload != workload], dict.fromkeys(_SPREAD, 0.0))
    factors = _fitted(base, own, factors)
    if not runs:
        return base
    rests = [run.seconds["rest"] for run in (own or runs) if "rest" in run.seconds]
    return replace(_scaled(base, factors), rest=statistics.median(rests[-_RECENT:]) if rests else 0.0)


@dataclass(frozen=True)
class Lesson:
    """What runs have taught for one workload."""

    workload: str
    now: Speeds | None  # as they were measured now; None: nothing was
    speeds: Speeds  # corrected
    runs: int = 0  # earlier runs on this machine that have corrected them
    own: int = 0  # of these, runs of the same model and batch

    def lines(self) -> list[str]:
        """Return what to say about earlier runs: a line, or none."""
        if not self.runs:
            return []
        return [
            f"Speeds were corrected by {self.runs} earlier run(s) on this machine, {self.own} of this model and batch: "
            f"{path()}. To remove them: ls-strategy plan --forget."
        ]


def taught(now: Speeds | None, runs: Sequence[MeasuredRun], workload: str) -> Lesson:
    """Return the speeds for a workload; see `corrected`."""
    own = sum(run.workload == workload for run in runs)
    return Lesson(workload, now, corrected(now, runs, workload), len(runs), own)


def path() -> Path:
    """Return the file with measured runs."""
    return cache_dir() / "measured_steps.json"


def _typical(each: Sequence[Speeds]) -> Speeds:
    """Return the median of every speed."""
    numbers = [f.name for f in fields(Speeds) if f.name != "overlaps"]
    return replace(each[0], **{name: statistics.median_low([getattr(s, name) for s in each]) for name in numbers})


def _scaled(speeds: Speeds, factors: Mapping[str, float]) -> Speeds:
    """Return speeds at which work takes longer: ``exp(factors["all"])`` times, and by group ``exp(factors[group])``."""
    per_second = ("flops", "touch", "link", "bus", "update", "host_update")
    changed: dict[str, float] = {}
    for group, names in GROUPS.items():
        factor = factors[_TOGETHER] + factors[group]
        if group == "host" and not speeds.overlaps:
            factor += factors["device"]  # the same cores call and compute
        factor = max(min(factor, _MOST), -_MOST)
        for name in names:
            changed[name] = getattr(speeds, name) * math.exp(-factor if name in per_second else factor)
    return replace(speeds, **changed)


def _fitted(base: Speeds, runs: Sequence[MeasuredRun], prior: dict[str, float]) -> dict[str, float]:
    """Return the likeliest logarithms of factors, by damped Gauss-Newton steps from ``prior``."""
    if not runs:
        return prior
    names, factors = list(_SPREAD), dict(prior)
    for _ in range(30):
        here = _residuals(base, runs, factors, prior)
        columns = []
        for name in names:
            there = _residuals(base, runs, {**factors, name: factors[name] + 1e-4}, prior)
            columns.append([(b - a) / 1e-4 for a, b in zip(here, there, strict=True)])
        slopes = torch.tensor(columns, dtype=torch.float64).T
        change = torch.linalg.lstsq(slopes, -torch.tensor(here, dtype=torch.float64)[:, None], driver="gelsd").solution
        steps = [max(min(float(step), 0.5), -0.5) for step in change[:, 0]]
        factors = {n: max(min(factors[n] + s, _MOST), -_MOST) for n, s in zip(names, steps, strict=True)}
        if max(map(abs, steps)) < 1e-6:
            break
    return factors


def _residuals(
    base: Speeds, runs: Sequence[MeasuredRun], factors: Mapping[str, float], prior: Mapping[str, float]
) -> list[float]:
    """Return differences of logarithms over their spreads: of measured times, and of factors to those before."""
    found = [(factors[group] - prior[group]) / spread for group, spread in _SPREAD.items()]
    speeds = _scaled(base, factors)
    for age, run in enumerate(reversed(runs)):
        weight = math.sqrt(_AGING**age)
        phases = {name: phase.seconds(overlaps=base.overlaps) for name, phase in speeds.phases(run.work).items()}
        step = run.seconds["step"] - run.seconds.get("rest", 0.0)
        found.append(weight * _bounded(_log_ratio(speeds.seconds(run.work), step) / _STEP_SPREAD))
        apart = [s - run.seconds[name] for name, s in phases.items() if name in run.seconds]
        found += [weight * seconds / step / _PHASE_SPREAD for seconds in apart]
    return found


def _bounded(residual: float) -> float:
    """Return a residual whose square grows like Huber's loss: one run on a busy machine does not outvote the others."""
    size = abs(residual)
    return residual if size <= _OUTLIER else math.copysign(math.sqrt(2 * _OUTLIER * size - _OUTLIER**2), residual)


def _log_ratio(predicted: float, measured: float) -> float:
    """Return how far two times are apart; 0 where one of them is not known."""
    return math.log(predicted) - math.log(measured) if predicted > 0 and measured > 0 else 0.0


# --- measured beside predicted ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseTimes:
    """One row: seconds per step."""

    phase: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Better:
    """An option that would have helped."""

    name: str
    seconds: float  # predicted for a step, by what the run has taught
    yaml: str  # the Trainer's option, on one line


@dataclass(frozen=True)
class Comparison:
    """Measured beside predicted times of a run, and the option that would have helped most."""

    name: str
    # ``forward``, ``backward``, ``optimizer``, ``rest`` as far as they were measured, and ``step``.
    rows: tuple[PhaseTimes, ...]
    better: Better | None  # none: no candidate is clearly faster

    def lines(self) -> list[str]:
        """Return it for the log, in three lines at most."""
        cells = [f"{row.phase} {1e3 * row.measured:.3g} ({1e3 * row.predicted:.3g})" for row in self.rows]
        lines = [f"{self.name}: measured ms per step, and in parentheses predicted: {', '.join(cells)}"]
        if self.better is None:
            return [*lines, "No other strategy is predicted to be clearly faster."]
        gain = f"{self.better.name} would have helped most: {1e3 * self.better.seconds:.3g} ms are predicted."
        return [*lines, gain, f"  strategy: {self.better.yaml}"]


def compared(run: MeasuredRun, predicted: Speeds, better: Better | None) -> Comparison:
    """Return a run beside what was predicted for it at ``predicted``."""
    phases = predicted.phases(run.work)
    expected = {name: phase.seconds(overlaps=predicted.overlaps) for name, phase in phases.items()}
    expected |= {"rest": predicted.rest, "step": predicted.seconds(run.work)}
    rows = tuple(PhaseTimes(name, s, run.seconds[name]) for name, s in expected.items() if name in run.seconds)
    return Comparison(run.name, rows, better)


# --- the file with measured runs: ``measured_steps.json`` in the cache of this user -----------------------------------

# A file that others could have written, or that is damaged, is ignored with one line in the log: it is no more than a
# hint. Writers take a lock, add to what is there, and rename a complete file.


_FORMAT = 1
_MOST_RUNS = 64  # runs that are kept; the oldest are dropped
_MOST_BYTES = 1 << 20  # a larger file is not one of ours
_ROUNDING = 0.01  # relative, of times that are means of the same steps
_PATIENCE_S = 5.0  # time to wait for another process that writes. A run that is not kept is no loss.


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
