"""Sort scalars into charts, and describe how a missing one is logged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ls_strategy.extras.report.charts import Bar, Chart, Line, draw, draw_bars, draw_stacked
from ls_strategy.extras.report.events import restarts_of
from ls_strategy.extras.report.markup import number, table, text
from ls_strategy.extras.report.run import Run
from ls_strategy.extras.report.series import Series

MOST_LINES = 8
"""Lines of a chart; further ones go into the next chart."""

_MOST_OTHERS = 36
"""Charts of scalars that no other panel shows."""

_MONITOR = "Add callbacks=[ls_strategy.Monitor()] to the Trainer to log it."
_PHASES = ("forward", "backward", "optimizer", "data", "other")
_KINDS = {
    "parameters": 1, "masters": 0, "optimizer": 2, "gradients": 5, "gathered": 7, "communication": 3, "activations": 6
}  # fmt: skip
"""Kinds of memory from the bottom of a stack, with their colors in `style`: those of Monitor's image."""

_KIND_NAMES = {
    "masters": "master weights", "optimizer": "moments (optimizer)", "gathered": "gathered parameters",
    "communication": "communication buffers", "activations": "activations and other", "process": "process, resident",
    "allocated": "allocated on the device", "offloaded": "offloaded activations",
}  # fmt: skip
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))


@dataclass
class Panel:
    """A section of the report."""

    title: str
    anchor: str
    about: str = ""
    parts: list[str] = field(default_factory=list)
    """Figures and tables."""

    missing: list[str] = field(default_factory=list)
    """What is not there, and how to get it."""


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return all panels of scalars."""
    shown: set[str] = set()
    return [
        _training(runs, shown), _speed(runs, shown), _time(runs), _memory(runs), _traffic(runs, shown),
        _experts(runs, shown), _others(runs, shown),
    ]  # fmt: skip


def tags_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of all scalars, in alphabetical order."""
    return sorted({tag for run in runs for tag in run.scalars})


def _is_own(tag: str) -> bool:
    """Return whether this package logged the scalar."""
    return re.match(r"(zero|elastic)(_[a-z_]+)?/", tag) is not None


# --- charts of some tags ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Look:
    """Appearance of a chart of scalars: unit, axis and note."""

    unit: str
    may_be_log: bool = False
    from_zero: bool = False
    factor: float = 1.0
    note: str = ""


def _charts(
    runs: Sequence[Run], title: str, tags: Sequence[str], look: _Look, name: Callable[[str], str] = str
) -> list[str]:
    """Draw the tags of one run in one chart, or each tag of several runs in a chart of its own."""
    if len(runs) > 1:
        charts = []
        for tag in tags:
            lines = [(run.name, run.scalars[tag]) for run in runs if tag in run.scalars]
            charts.append(_chart(f"{title}: {name(tag)}" if len(tags) > 1 else title, lines, look, runs))
        return charts
    lines = [(name(tag), runs[0].scalars[tag]) for tag in tags]
    return [_chart(title, lines[i : i + MOST_LINES], look, runs) for i in range(0, len(lines), MOST_LINES)]


def _chart(title: str, lines: Sequence[tuple[str, Series]], look: _Look, runs: Sequence[Run]) -> str:
    if len(lines) > MOST_LINES:
        pieces = [lines[i : i + MOST_LINES] for i in range(0, len(lines), MOST_LINES)]
        return "\n".join(_chart(f"{title} ({i + 1} of {len(pieces)})", p, look, runs) for i, p in enumerate(pieces))
    drawn = [Line(each, series if look.factor == 1 else series.scaled(look.factor)) for each, series in lines]
    return draw(Chart(title, look.unit, drawn, look.may_be_log, look.from_zero, _restarts(runs), look.note))


def _restarts(runs: Sequence[Run]) -> list[int]:
    """Return the steps of restarts, which charts of a single run mark."""
    if len(runs) > 1:
        return []
    return restarts_of(runs[0])


# --- panels -----------------------------------------------------------------------------------------------------------


def _training(runs: Sequence[Run], shown: set[str]) -> Panel:
    panel = Panel("Training", "training")
    for add in (_loss, _rate, _gradients):
        add(panel, runs, shown)
    return panel


def _loss(panel: Panel, runs: Sequence[Run], shown: set[str]) -> None:
    tags = [t for t in tags_of(runs) if "loss" in t.lower() and not _is_own(t)]
    shown |= set(tags)
    panel.parts += _charts(runs, "Loss", tags, _Look("loss", may_be_log=True))
    if not tags:
        panel.missing.append(
            'No scalar with "loss" in its name was logged. Call self.log("train/loss", loss) in training_step.'
        )


def _rate(panel: Panel, runs: Sequence[Run], shown: set[str]) -> None:
    tags = [
        t for t in tags_of(runs) if not _is_own(t) and re.search(r"(^|[/_-])(lr|learning_rate)([/_-]|$)", t.lower())
    ]
    tags = [t for t in tags if not re.search(r"momentum|weight_decay", t)]
    shown |= set(tags)
    panel.parts += _charts(runs, "Learning rate", tags, _Look("learning rate", from_zero=True))
    if not tags:
        panel.missing.append(
            "The learning rate was not logged. Add Lightning's LearningRateMonitor() to the callbacks."
        )


def _speed(runs: Sequence[Run], shown: set[str]) -> Panel:
    panel = Panel("Speed", "speed", "Samples and tokens of all ranks, data loading included.")
    rows = (("zero/tokens_per_s", "Tokens per second", _Look("tokens per second", from_zero=True)),
            ("zero/samples_per_s", "Samples per second", _Look("samples per second", from_zero=True)),
            ("zero/mfu", "Model FLOP utilization", _Look("MFU, %", from_zero=True, factor=100)))  # fmt: skip
    for tag, title, look in rows:
        shown.add(tag)
        if any(tag in run.scalars for run in runs):
            panel.parts += _charts(runs, title, [tag], look, lambda _, title=title: title)
    if not any("zero/samples_per_s" in run.scalars for run in runs):
        steps = [(run.name, series) for run in runs if (series := steps_per_s(run)) is not None]
        if steps:
            note = "From the times at which values were logged."
            panel.parts.append(
                _chart("Steps per second", steps, _Look("steps per second", from_zero=True, note=note), runs)
            )
        panel.missing.append(f"Samples per second were not logged. {_MONITOR}")
    if not any("zero/mfu" in run.scalars for run in runs):
        panel.missing.append(
            "MFU was not logged. It needs Monitor, flops_per_token() or flops_per_sample() in the module, and a known "
            "peak of the device: Monitor(peak_tflops=...)."
        )
    return panel


def steps_per_s(run: Run, most: int = 200) -> Series | None:
    """Return steps per second by the times of the log, over at most ``most`` ranges; None where it has no times."""
    series = max(run.scalars.values(), key=len, default=None)
    if series is None or len(series) < 3 or not all(map(math.isfinite, series.times)):
        return None
    found, every = Series(), max(len(series) // most, 1)
    marks = range(0, len(series), every)
    for before, after in pairwise(marks):
        steps, seconds = series.steps[after] - series.steps[before], series.times[after] - series.times[before]
        if steps > 0 and seconds > 0:
            found.add(series.steps[after], steps / seconds)
    return found if len(found) else None


def _mean(series: Series | None) -> float | None:
    """Return the mean without the first interval, in which things are compiled; None without a value."""
    values = [] if series is None else series.finite()
    values = values[1:] or values
    return math.fsum(values) / len(values) if values else None


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
    bars = [Bar(run.name, [_mean(run.get(f"zero_time/{p}_ms")) or 0.0 for p in _PHASES]) for run in measured]
    panel.parts.append(draw_bars("Time of a step by phase", "ms per optimizer step", _PHASES, bars))
    rows = []
    for run in measured:
        step = _mean(run.get("zero_time/step_ms")) or math.nan
        for tag, name in _time_rows():
            value = _mean(run.get(tag))
            if value is not None:
                rows.append(
                    [*([run.name] if len(runs) > 1 else []), name, number(value), f"{100 * value / step:.1f} %"]
                )
    head = [*(["run"] if len(runs) > 1 else []), "part of a step", "ms", "share"]
    panel.parts.append(table(head, rows, "Time of a step", len(head) - 2, card=True))
    if len(runs) == 1:
        lines = [Line(p, s) for p in _PHASES if (s := runs[0].get(f"zero_time/{p}_ms")) is not None]
        panel.parts.append(
            draw_stacked(Chart("Time of a step over the run", "ms per step", lines, restarts=_restarts(runs)), "step")
        )
    else:
        panel.parts += _charts(runs, "Time of a step", ["zero_time/step_ms"], _Look("ms per step", from_zero=True))
    return panel


def _time_rows() -> list[tuple[str, str]]:
    rows = [("zero_time/step_ms", "step"), *((f"zero_time/{p}_ms", p) for p in _PHASES)]
    for kind in ("communication", "copies"):
        rows += [(f"zero_time/{kind}_exposed_ms", f"waiting for {kind}"),
                 (f"zero_time/{kind}_hidden_ms", f"{kind}, overlapped with computation")]  # fmt: skip
    return [*rows, ("zero/exposed_update_ms", "waiting for offloaded updates")]


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
    name, size = unit_of([v for _, memory in found for s in memory.values() for v in s.values])
    if len(runs) == 1:
        memory = {kind: series.scaled(1 / size) for kind, series in found[0][1].items()}
        lines = [
            Line(_KIND_NAMES.get(kind, kind), memory[kind], fill) for kind, fill in _KINDS.items() if kind in memory
        ]
        about = "" if "activations" in memory else "Activations are measured on CUDA only."
        if lines:
            panel.parts.append(
                draw_stacked(
                    Chart("Memory by kind, at the end of a step", name, lines, restarts=_restarts(runs), note=about),
                    "sum",
                )
            )
        if "peak" in memory:
            panel.parts.append(
                _chart("Peak of allocated memory", [("peak", memory["peak"])], _Look(name, from_zero=True), runs)
            )
    else:
        for kind in ("peak", *_KINDS):
            lines_of = [(run.name, memory[kind].scaled(1 / size)) for run, memory in found if kind in memory]
            if lines_of:
                panel.parts.append(
                    _chart(f"Memory: {_KIND_NAMES.get(kind, kind)}", lines_of, _Look(name, from_zero=True), runs)
                )
    panel.parts += [part for run, _ in found if (part := _phases_table(run, several=len(runs) > 1))]
    return panel


def _phases_table(run: Run, *, several: bool) -> str:
    """Return the largest bytes by kind after each phase; empty where they are not logged."""
    phases = {where: run.memory(where) for where in ("forward", "backward", "optimizer")}
    kinds = [k for k in (*_KINDS, "allocated", "offloaded", "process") if any(k in found for found in phases.values())]
    most = {(k, w): max(s.finite(), default=0.0) for w, found in phases.items() for k, s in found.items()}
    if not kinds:
        return ""
    name, size = unit_of([v for (kind, _), v in most.items() if kind != "process"])
    rows = [
        [_KIND_NAMES.get(k, k), *(number(most[k, w] / size) if (k, w) in most else "" for w in phases)] for k in kinds
    ]
    caption = f"Most memory after each phase of a step, {name}{f': {run.name}' if several else ''}"
    return table(["kind", *(f"after {where}, {name}" for where in phases)], rows, caption, 1, card=True)


def _traffic(runs: Sequence[Run], shown: set[str]) -> Panel:
    panel = Panel("Traffic", "traffic", "What rank 0 sent, and what it copied between the device, the host and NVMe.")
    tags = [t for t in tags_of(runs) if t.startswith("zero_traffic/") or t == "zero/sent_mib_per_step"]
    shown |= set(tags)
    sent = [t for t in tags if t.endswith("_mib_per_step")]
    speed = [t for t in tags if t.endswith("_gb_per_s")]

    def name(tag: str) -> str:
        return re.sub(r"_(mib_per_step|gb_per_s)$", "", tag.partition("/")[2]).replace("_", " ")

    panel.parts += _charts(runs, "Bytes per step", sent, _Look("MiB per step", from_zero=True), name)
    panel.parts += _charts(runs, "Speed while in flight", speed, _Look("GB/s", from_zero=True), name)
    if not tags:
        panel.missing.append(f"Traffic was not logged. {_MONITOR}")
    return panel


def _gradients(panel: Panel, runs: Sequence[Run], shown: set[str]) -> None:
    tags = tags_of(runs)
    norms = [t for t in tags if t.startswith("zero/grad_norm") or (not _is_own(t) and "grad_norm" in t.lower())]
    scale = [t for t in tags if t == "zero/loss_scale"]
    shown |= {*norms, *scale, "zero/skipped_steps"}
    panel.parts += _charts(runs, "Gradient norm", norms, _Look("norm before clipping", may_be_log=True))
    panel.parts += _charts(runs, "Loss scale", scale, _Look("loss scale", may_be_log=True))
    if any("zero/skipped_steps" in run.scalars for run in runs):
        panel.parts += _charts(runs, "Skipped steps", ["zero/skipped_steps"], _Look("steps", from_zero=True))
    if not norms:
        panel.missing.append(f"The gradient norm was not logged. {_MONITOR}")


def _experts(runs: Sequence[Run], shown: set[str]) -> Panel:
    panel = Panel("Experts", "experts")
    tags = [t for t in tags_of(runs) if t.startswith("zero_experts/")]
    shown |= set(tags)
    for tag in tags:
        name = tag.partition("/")[2].replace("_", " ")
        panel.parts += _charts(runs, f"Experts: {name}", [tag], _Look(name, from_zero=True), lambda _, name=name: name)
    return panel


def _others(runs: Sequence[Run], shown: set[str]) -> Panel:
    panel = Panel("Other scalars", "others")
    tags = [t for t in tags_of(runs) if t not in shown and not _is_own(t) and t not in ("epoch", "hp_metric")]
    for tag in tags[:_MOST_OTHERS]:
        panel.parts += _charts(runs, tag, [tag], _Look("value"))
    if len(tags) > _MOST_OTHERS:
        names = text(", ".join(tags[_MOST_OTHERS:]))
        panel.parts.append(
            f"<details><summary>{len(tags) - _MOST_OTHERS} more scalars</summary><p>{names}</p></details>"
        )
    return panel
