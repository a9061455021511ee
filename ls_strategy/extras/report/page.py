"""The report: one HTML file that is well-formed XML too, has no script, and loads nothing from elsewhere."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ls_strategy.extras.report.events import events_of, moment
from ls_strategy.extras.report.markup import attribute, number, table, text
from ls_strategy.extras.report.panels import Panel, panels_of, unit_of
from ls_strategy.extras.report.run import Run
from ls_strategy.extras.report.series import Series
from ls_strategy.extras.report.style import CSS

MARK = '<meta name="generator" content="ls-strategy report"/>'
"""By which a file is known as a report, so that no other file is overwritten."""

_IMAGES = {
    "zero_time/step": "What each rank did in one step: phases, waits, messages and copies over milliseconds",
    "zero_memory/step": "Memory by kind over one step, on the rank that had the most",
    "zero_pipeline/timeline": "What each pipeline stage did in one step, over milliseconds",
    "zero_experts/load": "Tokens routed to each expert, by layer",
}
_MOST_IMAGE_BYTES = 4 << 20
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[Run], *, now: float | None = None) -> str:
    """Return the report of one run, or the comparison of several."""
    now = time.time() if now is None else now
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    panels = [_summary(runs, now), *panels_of(runs), _steps(runs), _events(runs), _configuration(runs)]
    shown = [panel for panel in panels if panel.parts or panel.missing]
    links = "".join(f'<li><a href="#{p.anchor}">{text(p.title)}</a></li>' for p in shown)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en" xmlns="http://www.w3.org/1999/xhtml">',
            "<head>",
            '<meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>',
            MARK,
            f"<title>{text(title)} - run report</title>",
            f"<style>{CSS}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#summary">Skip to the summary</a>',
            f"<header><h1>{text(title)}</h1></header>",
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
            "<main>",
            *(_section(panel) for panel in shown),
            "</main>",
            f"<footer>Written by <code>ls-strategy report</code> on {moment(now)} UTC. All times are UTC.</footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _section(panel: Panel) -> str:
    about = f"<p>{text(panel.about)}</p>" if panel.about else ""
    missing = "".join(f'<p class="missing">{text(each)}</p>' for each in panel.missing)
    parts = "\n".join(panel.parts)
    grid = f'<div class="grid-of-figures">{parts}</div>' if parts else ""
    head = f'<h2 id="{panel.anchor}">{text(panel.title)}</h2>'
    return f'<section aria-labelledby="{panel.anchor}">{head}{about}{grid}{missing}</section>'


# --- summary ----------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[Run], now: float) -> Panel:
    panel = Panel("Summary", "summary")
    rows = [[run.name, *cells.values()] for run in runs for cells in [_facts(run, now)]]
    head = ["run", *_facts(runs[0], now)]
    if len(runs) == 1:
        panel.parts.append(table(["", "value"], list(zip(head[1:], rows[0][1:], strict=True)), "The run"))
    else:
        panel.parts.append(table(head, rows, "The runs", 2))
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
    steps = run.last_step
    rate = run.get("zero/tokens_per_s") or run.get("zero/samples_per_s")
    rate_unit = "tokens/s" if run.get("zero/tokens_per_s") is not None else "samples/s"
    mfu, memory = run.get("zero/mfu"), run.memory()
    start = next((line for line in reversed(run.lines) if line["event"] == "start"), {})
    return {
        "state": run.state(now),
        "last step": "" if steps is None else f"{steps:,}",
        "last loss": "" if longest is None else number(longest.values[-1]),
        "speed": "" if rate is None else f"{number(_middle(rate))} {rate_unit} (median)",
        "MFU": "" if mfu is None else f"{number(100 * (_middle(mfu) or 0.0), 3)} % (median)",
        "memory of rank 0": _peak(memory),
        "ranks": str(start.get("world_size", "")),
        "device": str(start.get("device", "")),
        "precision": str(start.get("precision", "")),
        "last written": f"{moment(run.last_written)} UTC" if run.last_written else "",
    }


def _middle(series: Series) -> float | None:
    values = sorted(series.finite())
    return values[len(values) // 2] if values else None


def _peak(memory: dict[str, Series]) -> str:
    """Return the most memory: the peak on CUDA, otherwise the states."""
    if "peak" in memory:
        most, what = max(memory["peak"].finite(), default=0.0), "peak"
    else:
        most = sum(max(series.finite(), default=0.0) for kind, series in memory.items() if kind != "activations")
        what = "model states"
    name, size = unit_of([most])
    return f"{number(most / size)} {name} ({what})" if most else ""


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
            panel.parts.append(
                f'<figure class="wide"><figcaption>{text(about)}, {text(where)}</figcaption>'
                f'<div class="scroll" tabindex="0" role="region" aria-label="{attribute(about)}">'
                f'<img src="data:image/png;base64,{data}" alt="{attribute(about)}" width="{image.width}" '
                f'height="{image.height}"/></div></figure>'
            )
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
    rows = []
    for run in runs:
        for event in events_of(run):
            step = "" if event.step is None else f"{event.step:,}"
            cells = [event.what, step, moment(event.time), event.detail]
            rows.append([*([run.name] if len(runs) > 1 else []), *cells])
    if rows:
        head = [*(["run"] if len(runs) > 1 else []), "event", "step", "time, UTC", "details"]
        panel.parts.append(table(head, rows, "Events"))
    for run in runs:
        if not run.lines:
            prefix = f"{run.name}: " if len(runs) > 1 else ""
            panel.missing.append(
                f"{prefix}when the run was started and ended, and by which versions, is written by Monitor."
            )
    return panel


def _configuration(runs: Sequence[Run]) -> Panel:
    panel = Panel("Configuration and versions", "configuration")
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    if names:
        rows = [[name, *(run.versions.get(name, "") for run in runs)] for name in names]
        panel.parts.append(table(["package", *(run.name for run in runs)], rows, "Versions"))
    options = {run.name: dict(flatten(start.get("options"))) for run in runs for start in _starts(run)}
    rows = list(_differences(runs, options) if len(runs) > 1 else options.get(runs[0].name, {}).items())
    if rows:
        opened = ' open="open"' if len(runs) > 1 else ""
        caption = "Options of the strategy" if len(runs) == 1 else "Options of the strategy that differ"
        panel.parts.append(
            f"<details{opened}><summary>{caption}</summary>"
            + table(["option", *([run.name for run in runs] if len(runs) > 1 else ["value"])], rows, caption)
            + "</details>"
        )
    for run in runs:
        for name, content in run.configs.items():
            label = f"{run.name}: {name}" if len(runs) > 1 else name
            panel.parts.append(
                f'<details><summary>{text(label)}</summary><pre tabindex="0">{text(content)}</pre></details>'
            )
    if not any(run.configs for run in runs):
        panel.missing.append(
            "There is no hparams.yaml or config.yaml. LightningCLI writes the latter, and self.save_hyperparameters() "
            "the former."
        )
    return panel


def _starts(run: Run) -> list[dict[str, Any]]:
    return [line for line in run.lines if line["event"] == "start"][-1:]


def flatten(value: Any, prefix: str = "", depth: int = 0) -> Iterable[tuple[str, str]]:
    """Iterate over the leaves of nested mappings, as ``a.b`` and text."""
    if isinstance(value, dict) and value and depth < 16:
        for key, each in value.items():
            yield from flatten(each, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value, default=str)


def _differences(runs: Sequence[Run], options: dict[str, dict[str, str]]) -> Iterable[list[str]]:
    for key in dict.fromkeys(key for each in options.values() for key in each):
        row = [options.get(run.name, {}).get(key, "") for run in runs]
        if len(set(row)) > 1:
            yield [key, *row]
