"""The report: one HTML file that is well-formed XML too, has no script, and loads nothing from elsewhere.

Jinja escapes whatever comes from files: ``templates/report.html`` marks nothing as safe but the charts, which
matplotlib has escaped.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ls_strategy.extras.report.charts import DARK_LINES, FILLS, LINES
from ls_strategy.extras.report.events import events_of, moment
from ls_strategy.extras.report.numbers import allowed, number
from ls_strategy.extras.report.panels import Details, Panel, Table, most, panels_of, unit_of
from ls_strategy.extras.report.run import Run

MARK = '<meta name="generator" content="ls-strategy report"/>'
"""By which a file is known as a report, so that no other file is overwritten."""

_IMAGES = {
    "zero_time/step": "What each rank did in one step: phases, waits, messages and copies over milliseconds",
    "zero_memory/step": "Memory by kind over one step, on the rank that had the most",
    "zero_pipeline/timeline": "What each pipeline stage did in one step, over milliseconds",
    "zero_stragglers/ranks": "How much longer than others each rank takes without its waits, by phase",
    "zero_experts/load": "Tokens routed to each expert, by layer",
}
_MOST_IMAGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Image:
    """An image that a callback has logged."""

    about: str
    where: str
    data: str  # in base64
    width: int
    height: int


def page(runs: Sequence[Run], *, now: float | None = None) -> str:
    """Return the report of one run, or the comparison of several. Needs matplotlib and Jinja."""
    import jinja2

    now = time.time() if now is None else now
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("ls_strategy.extras.report"), autoescape=True, finalize=_finalize,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):  # of logged values
        panels = [_summary(runs, now), *panels_of(runs), _steps(runs), _events(runs), _configuration(runs)]
    return templates.get_template("report.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs", now=moment(now), mark=MARK,
        panels=[panel for panel in panels if panel.parts or panel.missing],
        light=LINES, dark=DARK_LINES, fills=FILLS,
    )  # fmt: skip


def _finalize(value: Any) -> Any:
    """Return what stands in the page. ``value`` keeps its type, which says whether it is escaped already."""
    return type(value)(allowed(value)) if isinstance(value, str) else value


# --- summary ----------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run], now: float) -> Panel:
    panel = Panel("Summary", "summary")
    facts = [_facts(run, now) for run in runs]
    if len(runs) == 1:
        panel.parts.append(Table(["", "value"], list(facts[0].items()), "The run"))
    else:
        rows = [[run.name, *cells.values()] for run, cells in zip(runs, facts, strict=True)]
        panel.parts.append(Table(["run", *facts[0]], rows, "The runs", 2))
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        panel.missing += [f"{prefix}{problem}" for problem in run.problems]
        if not run.scalars:
            panel.missing.append(f"{prefix}no scalar has been logged yet.")
        elif not any(tag.startswith("zero") for tag in run.scalars):
            panel.missing.append(
                f"{prefix}the run had no Monitor, so speed, memory, traffic and times are missing. Add "
                "callbacks=[ls_strategy.Monitor()] to the Trainer."
            )
    return panel


def _facts(run: Run, now: float) -> dict[str, str]:
    """Return what the summary says of a run."""
    losses = [s for tag, s in run.scalars.items() if "loss" in tag.lower() and not tag.startswith("zero")]
    longest = max(losses, key=len, default=None)
    rate, rate_unit = _median(run, "zero/tokens_per_s"), "tokens/s"
    if rate is None:
        rate, rate_unit = _median(run, "zero/samples_per_s"), "samples/s"
    mfu = _median(run, "zero/mfu")
    start = _start(run)
    return {
        "state": run.state(now),
        "last step": "" if run.last_step is None else f"{run.last_step:,}",
        "last loss": "" if longest is None else number(longest.values[-1]),
        "speed": "" if rate is None else f"{number(rate)} {rate_unit} (median)",
        "MFU": "" if mfu is None else f"{number(100 * mfu, 3)} % (median)",
        "memory of rank 0": _peak(run),
        "ranks": str(start.get("world_size", "")),
        "device": str(start.get("device", "")),
        "precision": str(start.get("precision", "")),
        "last written": f"{moment(run.last_written)} UTC" if run.last_written else "",
    }


def _median(run: Run, tag: str) -> float | None:
    series = run.get(tag)
    values = [] if series is None else series.finite()
    return float(np.median(values)) if len(values) else None


def _peak(run: Run) -> str:
    """Return the most memory: the peak on CUDA, otherwise the states."""
    memory = run.memory()
    if "peak" in memory:
        nbytes, what = most(memory["peak"]), "peak"
    else:
        nbytes, what = sum(most(s) for kind, s in memory.items() if kind != "activations"), "model states"
    name, size = unit_of([nbytes])
    return f"{number(nbytes / size)} {name} ({what})" if nbytes else ""


# --- images, events, configuration ------------------------------------------------------------------------------------


def _steps(runs: Sequence[Run]) -> Panel:
    panel = Panel("One step", "step", "The last images that the callbacks have logged.")
    for run in runs:
        for tag, about in _IMAGES.items():
            image = run.images.get(tag)
            if image is None or len(image.data) > _MOST_IMAGE_BYTES or not image.data.startswith(b"\x89PNG"):
                continue
            where = f"{run.name}, step {image.step}" if len(runs) > 1 else f"step {image.step}"
            data = base64.b64encode(image.data).decode()
            panel.parts.append(Image(about, where, data, image.width, image.height))
    if not panel.parts:
        panel.missing.append(
            "No image of a step was logged. Monitor logs them with TensorBoardLogger, after half a logging interval "
            "(log_every_n_steps)."
        )
    return panel


def _events(runs: Sequence[Run]) -> Panel:
    panel = Panel(
        "Events", "events", "Starts and ends, restarts, skipped steps, values that are no numbers, checkpoints."
    )
    several = len(runs) > 1
    rows = [
        [*([run.name] if several else []), event.what, "" if event.step is None else f"{event.step:,}",
         moment(event.time), event.detail]
        for run in runs for event in events_of(run)
    ]  # fmt: skip
    if rows:
        head = [*(["run"] if several else []), "event", "step", "time, UTC", "details"]
        panel.parts.append(Table(head, rows, "Events"))
    for run in runs:
        if not run.lines:
            prefix = f"{run.name}: " if several else ""
            panel.missing.append(
                f"{prefix}when the run was started and ended, and by which versions, is written by Monitor."
            )
    return panel


def _configuration(runs: Sequence[Run]) -> Panel:
    panel, several = Panel("Configuration and versions", "configuration"), len(runs) > 1
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    if names:
        rows = [[name, *(run.versions.get(name, "") for run in runs)] for name in names]
        panel.parts.append(Table(["package", *(run.name for run in runs)], rows, "Versions"))
    options = [dict(flatten(_start(run).get("options"))) for run in runs]
    keys = dict.fromkeys(key for each in options for key in each)
    rows = [[key, *(each.get(key, "") for each in options)] for key in keys]
    rows = [row for row in rows if not several or len(set(row[1:])) > 1]
    if rows:
        caption = f"Options of the strategy{' that differ' if several else ''}"
        table = Table(["option", *([run.name for run in runs] if several else ["value"])], rows, caption)
        panel.parts.append(Details(caption, table=table, open=several))
    for run in runs:
        for name, content in run.configs.items():
            panel.parts.append(Details(f"{run.name}: {name}" if several else name, content))
    if not any(run.configs for run in runs):
        panel.missing.append(
            "There is no hparams.yaml or config.yaml. LightningCLI writes the latter, and self.save_hyperparameters() "
            "the former."
        )
    return panel


def _start(run: Run) -> dict[str, Any]:
    return next((line for line in reversed(run.lines) if line["event"] == "start"), {})


def flatten(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Iterate over the leaves of nested mappings, as ``a.b`` and text."""
    if isinstance(value, dict) and value and depth < 16:
        for key, each in value.items():
            yield from flatten(each, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value, default=str)
