"""Folders of runs as loggers and `Monitor` leave them, for tests of ``ls-strategy report``."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

Scalars = Mapping[str, Sequence[float]]
"""Values by tag; the first one is of step 10, the next ones follow every 10 steps."""

PHASES = ("forward", "backward", "optimizer", "data", "other")


def monitored(count: int = 40) -> dict[str, list[float]]:
    """What a run with a loss, a learning rate and `Monitor` logs."""
    wave = [1 + 0.1 * math.sin(i) for i in range(count)]
    kinds = {"parameters": 2.0, "masters": 4.0, "optimizer": 8.0, "gradients": 4.0, "communication": 0.5}
    found = {
        "train/loss": [6 * math.exp(-i / 15) + 0.2 * w for i, w in enumerate(wave)],
        "val/loss": [6 * math.exp(-i / 15) + 0.4 for i in range(count)],
        "lr-AdamW": [1e-3 * min(i / 10, 1) for i in range(count)],
        "zero/grad_norm": [w / 2 for w in wave],
        "zero/tokens_per_s": [12_000 * w for w in wave],
        "zero/samples_per_s": [12 * w for w in wave],
        "zero/mfu": [0.4 * w for w in wave],
        "zero/sent_mib_per_step": [3.0] * count,
        "zero/skipped_steps": [float(i > 20) for i in range(count)],
        "zero_spikes/skipped_steps": [float(i > 10) for i in range(count)],
        "zero_traffic/all_gather_mib_per_step": [2.0] * count,
        "zero_traffic/communication_gb_per_s": wave,
        "zero_time/step_ms": [150 * w for w in wave],
        "zero_time/communication_exposed_ms": [12.0] * count,
        "zero_time/communication_hidden_ms": [30.0] * count,
    }
    found |= {f"zero_time/{phase}_ms": [30 * w for w in wave] for phase in PHASES}
    found |= {f"zero_memory_gib/{kind}": [value] * count for kind, value in kinds.items()}
    found |= {
        f"zero_memory_after_{where}_gib/{kind}": [value * factor] * count
        for kind, value in kinds.items()
        for where, factor in (("forward", 1.1), ("backward", 1.4), ("optimizer", 1.0))
    }
    return found


def steps_of(values: Sequence[float]) -> range:
    return range(10, 10 * len(values) + 10, 10)


def tensorboard(folder: Path, scalars: Scalars, *, image: Any = None, first: int = 0) -> Path:
    """Write one event file, as TensorBoardLogger does, and return its path."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    before = set(folder.glob("events*"))
    writer = SummaryWriter(str(folder))
    for tag, values in scalars.items():
        for step, value in zip(steps_of(values), values, strict=True):
            writer.add_scalar(tag, value, first + step)
    if image is not None:
        writer.add_image("zero_time/step", image, 20)
    writer.close()
    (path,) = set(folder.glob("events*")) - before
    return path


def csv_log(folder: Path, scalars: Scalars) -> Path:
    """Write ``metrics.csv``, as CSVLogger does."""
    folder.mkdir(parents=True, exist_ok=True)
    count = max(len(values) for values in scalars.values())
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["epoch", *scalars, "step"])
        for i in range(count):
            writer.writerow([0, *(v[i] if i < len(v) else "" for v in scalars.values()), 10 * i + 10])
    return folder / "metrics.csv"


def run_file(folder: Path, *events: dict[str, Any]) -> None:
    """Write ``zero_run.jsonl``."""
    lines = [json.dumps({"time": 1.7e9 + 60 * i, **event}) for i, event in enumerate(events)]
    (folder / "zero_run.jsonl").write_text("".join(f"{line}\n" for line in lines))


def start(step: int = 0, **fields: Any) -> dict[str, Any]:
    """A line of a start."""
    return {
        "event": "start", "step": step, "world_size": 2, "device": "cpu", "precision": "bf16-true",
        "versions": {"torch": "2.14.0"}, "options": {"stage": 2, "sharding": {"hpz": None}}, **fields,
    }  # fmt: skip
