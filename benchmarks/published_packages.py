"""Programs of published packages under DDP and under this package's strategies: are the losses DDP's?

``python -m benchmarks.published_packages --record benchmarks/records/published_packages.json``

Each program of `benchmarks.published` is what its package's documentation shows; only the strategy's name changes. Two
CPU ranks, every training loss of rank 0. The optimizer's kernel rounds differently from torch's, so losses differ by
rounding errors that training amplifies. How much, a run of DDP shows whose weights were changed by a unit in the last
place at the start (``nudged``).
Packages that are not installed are left out: ``pip install chemprop pytorch-forecasting litgpt lightly pytorch-tabular
neuralforecast``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import record
from benchmarks.published.losses import MARK, NUDGE
from benchmarks.record import ROOT

MINUTES = 12
SPREAD = "none: a loss is a number that repeats"
SEEDS = "1"
QUICK = ("--programs", "none")

PROGRAMS: dict[str, tuple[str, str, str, str]] = {
    "chemprop_regression": ("chemprop", "lightning", "chemprop", "ddp"),
    "forecasting_tft": ("pytorch-forecasting", "lightning", "pytorch_forecasting", "ddp_find_unused_parameters_true"),
    "litgpt_pretrain": ("litgpt", "lightning", "litgpt", "ddp"),
    "lightly_simclr": ("lightly", "pytorch_lightning", "lightly", "ddp"),
    "tabular_gate": ("pytorch-tabular", "pytorch_lightning", "pytorch_tabular", "ddp"),
    "neuralforecast_nhits": ("neuralforecast", "pytorch_lightning", "neuralforecast", "ddp"),
}
"""Package, the Lightning package that it imports, its module, and the strategy that is trusted, by program."""

STRATEGIES = ("zero1", "zero2", "zero3", "zero3_offload")
FEW = 5  # steps that count as early


def losses(program: str, strategy: str, *, nudged: bool = False) -> list[float]:
    """Every training loss of rank 0. ``nudged``: from weights that differ in the last place.

    Raises:
        RuntimeError: the program failed.
    """
    command = [sys.executable, "-m", f"benchmarks.published.{program}", strategy]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), NUDGE: str(int(nudged))}
    with tempfile.TemporaryDirectory() as folder:  # some packages leave files in the working directory
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not found:
        raise RuntimeError(f"{program} {strategy}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return json.loads(found[-1].removeprefix(MARK))


def difference(ours: list[float], trusted: list[float]) -> float:
    """Return the largest relative difference of two losses of the same step."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, trusted, strict=True))


def measure(program: str) -> dict[str, Any]:
    package, host, _, trusted_strategy = PROGRAMS[program]
    trusted = losses(program, trusted_strategy)
    found: dict[str, Any] = {
        "package": package, "version": importlib.metadata.version(package), "lightning": host,
        "trusted": trusted_strategy, "steps": len(trusted), "first": trusted[0], "last": trusted[-1],
        "early": {}, "all": {},
    }  # fmt: skip
    for strategy in ("nudged", *STRATEGIES):
        ours = losses(program, strategy) if strategy != "nudged" else losses(program, trusted_strategy, nudged=True)
        found["early"][strategy] = difference(ours[:FEW], trusted[:FEW])
        found["all"][strategy] = difference(ours, trusted)
        print(f"{program} {strategy}: {found['early'][strategy]:.1e} {found['all'][strategy]:.1e}", flush=True)
    return found


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--programs", nargs="+", choices=[*PROGRAMS, "none"], default=list(PROGRAMS))
    args = parser.parse_args()
    wanted = [name for name in args.programs if name != "none" and importlib.util.find_spec(PROGRAMS[name][2])]
    results = {name: measure(name) for name in wanted} or {"none": "no package of these is installed"}
    record.write(args.record, {**record.header("published_packages"), "results": results})


if __name__ == "__main__":
    main()
