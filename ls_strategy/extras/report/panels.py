"""Sort scalars into charts, and describe how a missing one is logged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ls_strategy.extras.report.charts import LINES, Chart, Figure, Lines, draw, draw_bars, draw_stacked
from ls_strategy.extras.report.events import restarts_of
from ls_strategy.extras.report.numbers import number
from ls_strategy.extras.report.run import Run
from ls_strategy.extras.report.series import Series

_MOST_OTHERS = 36  # charts of scalars that no other panel shows
_MONITOR = "Add callbacks=[ls_strategy.Monitor()] to the Trainer to log it."
_PHASES = ("forward", "backward", "optimizer", "data", "other")
_KINDS = {
    "parameters": 1, "masters": 0, "optimizer": 2, "gradients": 5, "gathered": 7, "communication": 3, "activations": 6
}  # fmt: skip
"""Kinds of memory from the bottom of a stack, with their places in `FILLS`: the colors of Monitor's image."""

_KIND_NAMES = {
    "masters": "master weights", "optimizer": "moments (optimizer)", "gathered": "gathered parameters",
    "communication": "communication buffers", "activations": "activations and other", "process": "process, resident",
    "allocated": "allocated on the device", "offloaded": "offloaded activations",
}  # fmt: skip
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))


@dataclass(frozen=True)
class Table:
    """Rows of cells, of which the first names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str
    numbers: int = 99  # cells from this one on are right-aligned
    card: bool = False  # whether it stands next to the figures, instead of across the page


@dataclass(frozen=True)
class Details:
    """A text or a table that readers open."""

    title: str
    text: str = ""
    table: Table | None = None
    open: bool = False


@dataclass
class Panel:
    """A section of the report."""

    title: str
    anchor: str
    about: str = ""
    parts: list[Any] = field(default_factory=list)  # objects of classes for which ``report.html`` has a macro, by name
    missing: list[str] = field(default_factory=list)  # what is not there, and how to get it


@dataclass(frozen=True)
class _Scalars:
    """Some scalars, their chart, and what is said where they are missing."""

    chart: Chart
    matches: Callable[[str], object]
    missing: str = ""
    factor: float = 1.0
    name: Callable[[str], str] = str  # makes the name of a line from a tag


def _is_own(tag: str) -> bool:
    """Return whether this package logged the scalar."""
    return re.match(r"(zero|elastic)(_[a-z_]+)?/", tag) is not None


def _is_rate(tag: str) -> bool:
    is_rate = re.search(r"(^|[/_-])(lr|learning_rate)([/_-]|$)", tag.lower())
    return bool(is_rate) and not _is_own(tag) and not re.search(r"momentum|weight_decay", tag)


def _plain(tag: str) -> str:
    return re.sub(r"_(mib_per_step|gb_per_s)$", "", tag.partition("/")[2]).replace("_", " ")


_TRAINING = (
    _Scalars(Chart("Loss", "loss", may_be_log=True), lambda t: "loss" in t.lower() and not _is_own(t),
             'No scalar with "loss" in its name was logged. Call self.log("train/loss", loss) in training_step.'),
    _Scalars(Chart("Learning rate", "learning rate", from_zero=True), _is_rate,
             "The learning rate was not logged. Add Lightning's LearningRateMonitor() to the callbacks."),
    _Scalars(Chart("Gradient norm", "norm before clipping", may_be_log=True),
             lambda t: t.startswith("zero/grad_norm") or (not _is_own(t) and "grad_norm" in t.lower()),
             f"The gradient norm was not logged. {_MONITOR}"),
    _Scalars(Chart("Loss scale", "loss scale", may_be_log=True), "zero/loss_scale".__eq__),
    _Scalars(Chart("Skipped steps", "steps", from_zero=True), "zero/skipped_steps".__eq__),
)  # fmt: skip
_SPEED = (
    _Scalars(Chart("Tokens per second", "tokens per second", from_zero=True), "zero/tokens_per_s".__eq__),
    _Scalars(Chart("Samples per second", "samples per second", from_zero=True), "zero/samples_per_s".__eq__,
             f"Samples per second were not logged. {_MONITOR}"),
    _Scalars(Chart("Model FLOP utilization", "MFU, %", from_zero=True), "zero/mfu".__eq__,
             "MFU was not logged. It needs Monitor, flops_per_token() or flops_per_sample() in the module, and a known "
             "peak of the device: Monitor(peak_tflops=...).", factor=100),
)  # fmt: skip
_TRAFFIC = (
    _Scalars(Chart("Bytes per step", "MiB per step", from_zero=True),
             re.compile(r"(zero_traffic/.*|zero/sent)_mib_per_step$").match, f"Traffic was not logged. {_MONITOR}",
             name=_plain),
    _Scalars(Chart("Speed while in flight", "GB/s", from_zero=True), re.compile(r"zero_traffic/.*_gb_per_s$").match,
             name=_plain),
)  # fmt: skip


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return all panels of scalars."""
    tags = sorted({tag for run in runs for tag in run.scalars})
    training = Panel("Training", "training")
    speed = Panel("Speed", "speed", "Samples and tokens of all ranks, data loading included.")
    traffic = Panel("Traffic", "traffic", "What rank 0 sent, and what it copied between the device, the host and NVMe.")
    shown = {tag for panel, them in ((training, _TRAINING), (speed, _SPEED), (traffic, _TRAFFIC))
             for each in them for tag in _add(panel, runs, tags, each)}  # fmt: skip
    steps = [(run.name, series) for run in runs if (series := steps_per_s(run)) is not None]
    if steps and not any("zero/samples_per_s" in run.scalars for run in runs):
        note = "From the times at which values were logged."
        speed.parts += _charts(Chart("Steps per second", "steps per second", from_zero=True, note=note), steps, runs)
    experts, others = Panel("Experts", "experts"), Panel("Other scalars", "others")
    for tag in tags:
        if tag.startswith("zero_experts/"):
            _add(experts, runs, [tag], _Scalars(Chart(f"Experts: {_plain(tag)}", _plain(tag), from_zero=True), bool,
                                                name=_plain))  # fmt: skip
    left = [t for t in tags if t not in shown and not _is_own(t) and t not in ("epoch", "hp_metric")]
    for tag in left[:_MOST_OTHERS]:
        _add(others, runs, [tag], _Scalars(Chart(tag, "value"), bool))
    if more := left[_MOST_OTHERS:]:
        table = Table(["name"], [[tag] for tag in more], f"{len(more)} more scalars")
        others.parts.append(Details(table.caption, table=table))
    return [training, speed, _time(runs), _memory(runs), traffic, experts, others]


# --- charts of some tags ----------------------------------------------------------------------------------------------


def _add(panel: Panel, runs: Sequence[Run], tags: Sequence[str], them: _Scalars) -> list[str]:
    """Draw the matching tags of one run in one chart, or each tag of several runs in a chart of its own.

    Returns:
        The matching tags.
    """
    tags = [tag for tag in tags if them.matches(tag)]
    if not tags and them.missing:
        panel.missing.append(them.missing)
    if len(runs) == 1:
        lines = [(them.name(tag), runs[0].scalars[tag]) for tag in tags]
        panel.parts += _charts(them.chart, lines, runs, them.factor)
    else:
        for tag in tags:
            title = f"{them.chart.title}: {them.name(tag)}" if len(tags) > 1 else them.chart.title
            lines = [(run.name, run.scalars[tag]) for run in runs if tag in run.scalars]
            panel.parts += _charts(replace(them.chart, title=title), lines, runs, them.factor)
    return tags


def _charts(look: Chart, lines: Lines, runs: Sequence[Run], factor: float = 1.0) -> Iterator[Figure]:
    """Draw as many charts as the lines need to have colors and dashes of their own."""
    pieces = [lines[i : i + len(LINES)] for i in range(0, len(lines), len(LINES))]
    for i, piece in enumerate(pieces):
        drawn = [(name, series.scaled(factor)) for name, series in piece]
        title = f"{look.title} ({i + 1} of {len(pieces)})" if len(pieces) > 1 else look.title
        yield draw(replace(look, title=title, lines=drawn, restarts=_restarts(runs)))


def _restarts(runs: Sequence[Run]) -> list[int]:
    """Return the steps of restarts, which charts of a single run mark."""
    return restarts_of(runs[0]) if len(runs) == 1 else []


def steps_per_s(run: Run, most: int = 200) -> Series | None:
    """Return steps per second by the times of the log, over at most ``most`` ranges; None where it has no times."""
    series = max(run.scalars.values(), key=len, default=None)
    if series is None or len(series) < 3 or not np.isfinite(series.times).all():
        return None
    found = Series()
    for before, after in pairwise(range(0, len(series), max(len(series) // most, 1))):
        steps, seconds = series.steps[after] - series.steps[before], series.times[after] - series.times[before]
        if steps > 0 and seconds > 0:
            found.add(series.steps[after], steps / seconds)
    return found if len(found) else None


# --- time -------------------------------------------------------------------------------------------------------------


def _mean(series: Series | None) -> float | None:
    """Return the mean without the first interval, in which things are compiled; None without a value."""
    values = [] if series is None else series.finite().tolist()
    values = values[1:] or values
    return math.fsum(value / len(values) for value in values) if values else None


def _time(runs: Sequence[Run]) -> Panel:
    panel = Panel(
        "Where the time went", "time",
        "Milliseconds per optimizer step on rank 0, mean over the run without the first interval. The phases add up to "
        "the step; waits for communication and copies are part of them.",
    )  # fmt: skip
    measured = [run for run in runs if "zero_time/step_ms" in run.scalars]
    if not measured:
        panel.missing.append(f"Times were not logged. {_MONITOR}")
        return panel
    bars = [(run.name, [_mean(run.get(f"zero_time/{p}_ms")) or 0.0 for p in _PHASES]) for run in measured]
    panel.parts.append(draw_bars("Time of a step by phase", "ms per optimizer step", _PHASES, bars))
    several = len(runs) > 1
    rows = []
    for run in measured:
        step = _mean(run.get("zero_time/step_ms")) or math.nan
        for tag, name in _time_rows():
            value = _mean(run.get(tag))
            if value is not None:
                rows.append([*([run.name] if several else []), name, number(value), f"{100 * value / step:.1f} %"])
    head = [*(["run"] if several else []), "part of a step", "ms", "share"]
    panel.parts.append(Table(head, rows, "Time of a step", len(head) - 2, card=True))
    for run in runs:
        panel.parts += _plan(run, several=several)
    over = Chart("Time of a step", "ms per step", from_zero=True)
    if several:
        _add(panel, runs, ["zero_time/step_ms"], _Scalars(over, bool))
    elif lines := [(p, s) for p in _PHASES if (s := runs[0].get(f"zero_time/{p}_ms")) is not None]:
        over = replace(over, title="Time of a step over the run", lines=lines, restarts=_restarts(runs))
        panel.parts.append(draw_stacked(over, "step", range(len(lines))))
    return panel


def _plan(run: Run, *, several: bool) -> Iterator[Table | Details]:
    """Yield what ``zero_auto`` had predicted beside what was measured, and the option that would have helped most."""
    plan = next((line for line in reversed(run.lines) if line["event"] == "plan"), None)
    if plan is None:
        return
    name = f"{run.name}: " if several else ""
    try:
        rows = [
            [row["phase"], *(number(1e3 * float(row[k])) for k in ("measured", "predicted"))] for row in plan["rows"]
        ]
        better = plan["better"]
        yield Table(
            ["part of a step", "measured, ms", "predicted, ms"], rows, f"{name}{plan['name']}, as planned", 1, card=True
        )
        if better is not None:
            title = f"{name}{better['name']} would have helped most: {number(1e3 * float(better['seconds']))} ms a step"
            yield Details(title, f"strategy: {better['yaml']}", open=True)
    except (KeyError, TypeError, ValueError):  # somebody else's line
        return


def _time_rows() -> Iterator[tuple[str, str]]:
    yield "zero_time/step_ms", "step"
    yield from ((f"zero_time/{p}_ms", p) for p in _PHASES)
    for kind in ("communication", "copies"):
        yield f"zero_time/{kind}_exposed_ms", f"waiting for {kind}"
        yield f"zero_time/{kind}_hidden_ms", f"{kind}, overlapped with computation"
    yield "zero/exposed_update_ms", "waiting for offloaded updates"


# --- memory -----------------------------------------------------------------------------------------------------------


def unit_of(values: Sequence[float]) -> tuple[str, int]:
    """Return the largest unit of which the largest value has at least one."""
    largest = max([v for v in values if math.isfinite(v)], default=0.0)
    return next(each for each in _UNITS if largest >= each[1] or each[1] == 1)


def _memory(runs: Sequence[Run]) -> Panel:
    panel = Panel("Memory", "memory", "Of rank 0.")
    found = [(run, memory) for run in runs if (memory := run.memory())]
    if not found:
        panel.missing.append(f"Memory was not logged. {_MONITOR}")
        return panel
    name, size = unit_of([most(series) for _, memory in found for series in memory.values()])
    kinds = ("peak", *_KINDS)
    if len(runs) == 1:
        memory, kinds = found[0][1], ("peak",)
        lines = [(_KIND_NAMES.get(kind, kind), memory[kind].scaled(1 / size)) for kind in _KINDS if kind in memory]
        note = "" if "activations" in memory else "Activations are measured on CUDA only."
        stack = Chart("Memory by kind, at the end of a step", name, False, True, note, lines, _restarts(runs))
        if lines:
            panel.parts.append(draw_stacked(stack, "sum", [fill for kind, fill in _KINDS.items() if kind in memory]))
    for kind in kinds:
        of_runs = [(run.name if len(runs) > 1 else kind, memory[kind]) for run, memory in found if kind in memory]
        title = "Peak of allocated memory" if len(runs) == 1 else f"Memory: {_KIND_NAMES.get(kind, kind)}"
        panel.parts += _charts(Chart(title, name, from_zero=True), of_runs, runs, 1 / size)
    panel.parts += [part for run, _ in found for part in _phases_table(run, several=len(runs) > 1)]
    return panel


def most(series: Series) -> float:
    """Return the largest value that is a number; 0 if there is none."""
    return float(series.finite().max(initial=0.0))


def _phases_table(run: Run, *, several: bool) -> Iterator[Table]:
    """Yield the largest bytes by kind after each phase, if they are logged."""
    phases = {where: run.memory(where) for where in ("forward", "backward", "optimizer")}
    kinds = [k for k in (*_KINDS, "allocated", "offloaded", "process") if any(k in found for found in phases.values())]
    largest = {(k, w): most(s) for w, found in phases.items() for k, s in found.items()}
    if kinds:
        name, size = unit_of([v for (kind, _), v in largest.items() if kind != "process"])
        rows = [[_KIND_NAMES.get(k, k), *(number(largest[k, w] / size) if (k, w) in largest else "" for w in phases)]
                for k in kinds]  # fmt: skip
        caption = f"Most memory after each phase of a step, {name}{f': {run.name}' if several else ''}"
        yield Table(["kind", *(f"after {where}, {name}" for where in phases)], rows, caption, 1, card=True)
