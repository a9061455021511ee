"""`Run`: everything that a folder of logs says, read once."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ls_strategy.extras.report import csv_file, events_file
from ls_strategy.extras.report.events_file import Image
from ls_strategy.extras.report.find import EVENTS, METRICS
from ls_strategy.extras.report.series import Series
from ls_strategy.extras.run_file import RUN_FILE, read_lines

_CONFIGS = ("hparams.yaml", "config.yaml")
_LONGEST_CONFIG = 200_000
_BYTES = {"gib": 1 << 30, "mib": 1 << 20, "kib": 1 << 10}
_EVERYWHERE = {"epoch", "hp_metric"}  # scalars of Lightning's loggers, which tests and validations write as well
_RECENT_S = 600.0  # a run whose files are younger may still be running


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in the folder."""

    name: str
    step: int | None
    saved_at: float
    layout: str  # what saved it; empty for files of Lightning


@dataclass
class Run:
    """One run."""

    name: str
    folder: Path
    scalars: dict[str, Series] = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)
    """Text of the configuration's files, by name."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Of ``zero_run.jsonl``."""

    sessions: list[tuple[float, float]] = field(default_factory=list)
    """Time of the first and last event of every process that has written."""

    repeated: list[tuple[int, int]] = field(default_factory=list)
    """Step from which a later process went on, and the last step of the one before it."""

    problems: list[str] = field(default_factory=list)
    """Why something could not be read."""

    last_written: float = 0.0

    def get(self, tag: str) -> Series | None:
        """Return a scalar."""
        return self.scalars.get(tag)

    def memory(self, where: str = "") -> dict[str, Series]:
        """Return bytes by kind: at the end of intervals, or after the phase ``where``."""
        start = f"zero_memory_after_{where}_" if where else "zero_memory_"
        found: dict[str, Series] = {}
        for tag, series in self.scalars.items():
            group, _, kind = tag.partition("/")
            unit = group.removeprefix(start)
            if group.startswith(start) and unit in _BYTES:
                found[kind] = series.scaled(_BYTES[unit])
        return found

    @property
    def last_step(self) -> int | None:
        """The last step of any scalar."""
        return max((series.steps[-1] for series in self.scalars.values() if len(series)), default=None)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of packages when the run was started last; empty if `Monitor` did not note them."""
        starts = [line for line in self.lines if line["event"] == "start"]
        versions = starts[-1].get("versions") if starts else None
        return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}

    def state(self, now: float | None = None) -> str:
        """Say whether the run has ended."""
        recent = (time.time() if now is None else now) - self.last_written < _RECENT_S
        if not self.lines and self._did_all_steps():
            return "finished"
        if not self.lines:
            return "perhaps still running" if recent else "unknown"
        last = self.lines[-1]
        if last["event"] == "end":
            return "finished"
        if last["event"] == "error":
            return {"Preempted": "preempted", "KeyboardInterrupt": "interrupted"}.get(str(last.get("type")), "failed")
        return "running" if recent else "ended without a word (killed?)"

    def _did_all_steps(self) -> bool:
        """Return whether the log or a checkpoint has reached the number of steps in LightningCLI's configuration."""
        import yaml

        try:
            most = yaml.safe_load(self.configs.get("config.yaml", ""))["trainer"]["max_steps"]
        except (yaml.YAMLError, RecursionError, ValueError, TypeError, KeyError):
            return False
        logged = -1 if self.last_step is None else self.last_step
        done = max([logged + 1, *(c.step for c in self.checkpoints if c.step is not None)])  # the log counts from 0
        return isinstance(most, int) and 0 < most <= done


def read(folder: Path, name: str, progress: Callable[[str], None] = lambda text: None) -> Run:
    """Read a run. What is damaged is left out and noted.

    Raises:
        ConfigError: there are event files, and the package tensorboard is missing.
    """
    run = Run(name, folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    events = [path for path in files if path.name.startswith(EVENTS)]
    for path in events:
        progress(f"reading {path}")
    _merge(run, [events_file.read(path) for path in events])
    if (folder / METRICS).is_file():
        progress(f"reading {folder / METRICS}")
        scalars, problem = csv_file.read(folder / METRICS)
        for tag, series in scalars.items():
            run.scalars.setdefault(tag, series)
        if problem:
            run.problems.append(f"{METRICS}: {problem}")
    for series in run.scalars.values():
        series.sort()
    run.scalars = {tag: series for tag, series in run.scalars.items() if len(series)}
    if (folder / RUN_FILE).is_file():
        run.lines, damaged = read_lines(folder / RUN_FILE)
        if damaged:
            run.problems.append(f"{RUN_FILE}: {damaged} lines are damaged and left out")
    run.configs = {file: _text(folder / file) for file in _CONFIGS if (folder / file).is_file()}
    run.checkpoints = _checkpoints(folder / "checkpoints")
    run.last_written = max((path.stat().st_mtime for path in files if path.name in (METRICS, RUN_FILE)), default=0.0)
    run.last_written = max([run.last_written, *(path.stat().st_mtime for path in events)])
    return run


def _merge(run: Run, files: list[events_file.EventFile]) -> None:
    """Add files in the order in which their processes began. A later process overrides the steps that it repeats."""
    for file in sorted(files, key=lambda each: each.started or 0.0):
        if file.problem:
            run.problems.append(f"{file.path.name}: {file.problem}")
        if file.started is not None and file.ended is not None and (file.scalars or file.images):
            run.sessions.append((file.started, file.ended))
        first = min((s.steps[0] for s in file.scalars.values()), default=None)
        before = run.last_step
        if first is not None and before is not None and any(t in run.scalars for t in file.scalars):
            both = (file.scalars.keys() & run.scalars.keys()) - _EVERYWHERE
            if sum(run.scalars[tag].cut_from(first) for tag in both):
                run.repeated.append((first, before))
        for tag, series in file.scalars.items():
            kept = run.scalars.setdefault(tag, Series())
            for step, value, at in zip(series.steps, series.values, series.times, strict=True):
                kept.add(step, value, at)
        run.images |= file.images


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    cut = f"\n... {len(text) - _LONGEST_CONFIG} characters are left out"
    return text if len(text) <= _LONGEST_CONFIG else text[:_LONGEST_CONFIG] + cut


def _checkpoints(folder: Path) -> list[Checkpoint]:
    if not folder.is_dir():
        return []
    found = [c for path in sorted(folder.iterdir()) if (c := _checkpoint(path)) is not None]
    return sorted(found, key=lambda each: (each.saved_at, each.name))


def _checkpoint(path: Path) -> Checkpoint | None:
    if path.is_file() and path.suffix == ".ckpt":
        step = re.search(r"(?:^|[-_])step=(\d{1,18})(?:[-_.]|$)", path.name)  # as ModelCheckpoint names files
        return Checkpoint(path.name, None if step is None else int(step[1]), path.stat().st_mtime, "")
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return None
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
        layout = ", ".join(f"{key} {value}" for key, value in dict(found.get("layout") or {}).items())
        saved_at = float(found.get("saved_at") or math.nan)
        return Checkpoint(path.name, int(found["step"]), saved_at, layout)
    except (ValueError, TypeError, KeyError, RecursionError):
        return Checkpoint(path.name, None, manifest.stat().st_mtime, "its manifest is damaged")
