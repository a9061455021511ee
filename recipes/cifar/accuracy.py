"""Compare the accuracy of the same training under several strategies, and record it as JSON.

``python -m recipes.cifar.accuracy --data_dir data --strategies ddp zero1 zero2 zero3 --seeds 1 --record record.json``

Reports the accuracy after the last epoch, since choosing the best epoch would use the test images. Existing runs of the
record are kept, and new runs are added, if command, machine and versions are the same. A file that holds something else
is refused.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from ls_strategy.testing import spawn
from recipes.cifar.main import main as run_recipe

CONFIGS = Path(__file__).parent / "configs"
RANKS = 2
UNLIKE = "no record of the same command, machine and versions"
STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3")


def overlay_args(strategy: str) -> list[str]:
    """Return the configuration files of ``strategy`` as arguments of the recipe; zero0 is base.yaml itself."""
    files = [CONFIGS / "base.yaml"] + ([] if strategy == "zero0" else [CONFIGS / f"{strategy}.yaml"])
    return [f"--config={file}" for file in files]


def fit(rank: int, world_size: int, args: list[str]) -> dict[str, float]:
    """Run the recipe on one rank, and return its last metrics."""
    trainer = run_recipe(["fit", f"--trainer.devices={world_size}", *args]).trainer
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def measure(strategy: str, seed: int, data_dir: str, extra: list[str], *, timeout_s: float) -> float:
    """Return the test accuracy after the last epoch, on two CPU ranks."""
    with tempfile.TemporaryDirectory() as runs:
        args = [
            *overlay_args(strategy),
            f"--seed_everything={seed}",
            f"--data.data_dir={data_dir}",
            f"--trainer.logger.init_args.save_dir={runs}",
            "--trainer.enable_progress_bar=false",
            *extra,
        ]
        first, *others = spawn(fit, RANKS, args, init_process_group=False, timeout_s=timeout_s)
    assert all(other["val/accuracy"] == first["val/accuracy"] for other in others)
    return first["val/accuracy"]


def surroundings() -> dict[str, Any]:
    """Return versions and hardware."""
    names = ("torch", "lightning", "torchmetrics", "numpy")
    models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "versions": {"python": platform.python_version(), **{n: importlib.metadata.version(n) for n in names}},
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _earlier(path: Path) -> dict[str, Any] | None:
    """Return a record, or None if the file is something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def spread(results: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return what is known about the variation of accuracies, and the seeds."""
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed}, key=int)
    known = "over seeds" if len(seeds) > 1 else "unknown: one seed, one run of each strategy"
    return {"spread": known, "seeds": ", ".join(seeds)}


def table(record: dict[str, Any]) -> str:
    """Return the record's accuracies as a Markdown table in percent: one row per strategy, one column per seed."""
    results: dict[str, dict[str, float]] = record["results"]
    seeds = sorted({seed for of_seed in results.values() for seed in of_seed}, key=int)
    lines = ["| strategy | " + " | ".join(f"seed {seed}" for seed in seeds) + " |", "|---" * (1 + len(seeds)) + "|"]
    for strategy in STRATEGIES:
        if strategy in results:
            cells = [f"{100 * results[strategy][s]:.1f} %" if s in results[strategy] else "-" for s in seeds]
            lines.append(f"| `{strategy}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="data", help="folder that contains cifar-10-batches-py")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["ddp", "zero1", "zero2", "zero3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--record", type=Path, required=True, help="JSON file to create or extend")
    parser.add_argument("--timeout_s", type=float, default=3600, help="time limit of one run")
    given, extra = parser.parse_known_args()
    record: dict[str, Any] = {
        "benchmark": "cifar_accuracy",
        "command": " ".join(
            [
                "python -m recipes.cifar.accuracy --data_dir DATA --strategies STRATEGY --seeds SEED --record FILE",
                *extra,
            ]
        ),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": _commit(),
        **surroundings(),
        "ranks": RANKS,
        "results": {},
        "seconds": {},
    }
    if given.record.exists():
        before = _earlier(given.record)
        same = ("benchmark", "command", "versions", "cpu", "cores", "ranks")
        differs = ["another file"] if before is None else [key for key in same if before.get(key) != record[key]]
        if before is None or differs:
            parser.error(f"Got --record {given.record}, which is {UNLIKE}: {', '.join(differs)}. Give a new file.")
        record |= {key: before[key] for key in ("results", "seconds")}
    given.record.parent.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        for strategy in given.strategies:
            start = time.perf_counter()
            accuracy = measure(strategy, seed, given.data_dir, extra, timeout_s=given.timeout_s)
            record["results"].setdefault(strategy, {})[str(seed)] = round(accuracy, 4)
            record["seconds"].setdefault(strategy, {})[str(seed)] = round(time.perf_counter() - start)
            print(f"{strategy} seed {seed}: accuracy {accuracy:.4f}")
            record |= spread(record["results"])
            given.record.write_text(json.dumps(record, indent=2) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
