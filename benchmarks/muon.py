"""Validation loss of the GPT recipe with Muon and with AdamW: equal steps, several learning rates and seeds each.

``python -m benchmarks.muon --record benchmarks/records/muon.json``

A seed decides initial weights and order of the text, so losses are compared in pairs: of every contender and rate with
AdamW at its best rate. The record is written after every seed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks import record
from benchmarks.language import fit, gpt, text
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.trainers import quiet

MINUTES = 10
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--seeds", "1", "--steps", "2")

NETWORK: dict[str, Any] = {"num_layers": 4, "num_heads": 4, "width": 64}
BLOCK, BATCH = 128, 16
CONTENDERS: dict[str, dict[str, Any]] = {
    "adamw, 3e-3": {"lr": 3e-3},
    "adamw, 1e-2": {"lr": 1e-2},
    "muon, 2e-2": {"name": "muon", "lr": 1e-2, "muon_lr": 2e-2},
    "muon, 4e-2": {"name": "muon", "lr": 1e-2, "muon_lr": 4e-2},
}
"""Options of `OptimConfig`, by contender and learning rate of the matrices."""


def train(contender: str, seed: int, steps: int, cache: Path) -> dict[str, float]:
    """One run; validation loss in nats per byte, and seconds."""
    pl.seed_everything(seed, verbose=False)
    module = gpt(NETWORK, BLOCK, warmup_steps=50, **CONTENDERS[contender])
    start = time.perf_counter()
    trainer = fit(module, text(cache, seed, block=BLOCK, batch=BATCH), ZeROStrategy(1), steps)
    return {"val": float(trainer.callback_metrics["val/loss"]), "seconds": round(time.perf_counter() - start, 1)}


Runs = dict[str, dict[str, dict[str, float]]]


def compare(runs: Runs) -> dict[str, dict[str, float]]:
    """Per contender and rate: the mean over seeds, and how far it is below AdamW at its best rate, in pairs."""
    result: dict[str, dict[str, float]] = {}
    means = {name: statistics.fmean(r["val"] for r in by_seed.values()) for name, by_seed in runs.items()}
    trusted = runs[min((name for name in runs if name.startswith("adamw")), key=lambda name: means[name])]
    for contender, by_seed in runs.items():
        margins = [trusted[seed]["val"] - run["val"] for seed, run in by_seed.items()]
        result[contender] = {
            "seeds": len(by_seed),
            "val": round(means[contender], 4),
            "margin": round(statistics.fmean(margins), 4),
            "margin_spread": round(statistics.stdev(margins), 4) if len(margins) > 1 else 0.0,
            "smallest_margin": round(min(margins), 4),
        }
    return result


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each contender")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    args = parser.parse_args()
    quiet()
    runs: Runs = {}
    found: dict[str, Any] = {
        **record.header("muon"), "network": NETWORK, "steps": args.steps, "tokens": args.steps * BATCH * BLOCK,
        "contenders": CONTENDERS, "results": {}, "runs": runs,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(1, args.seeds + 1):
            for contender in CONTENDERS:
                run = train(contender, seed, args.steps, Path(cache))
                runs.setdefault(contender, {})[str(seed)] = run
                print(f"{contender}, seed {seed}: {run}", flush=True)
            found["results"] = compare(runs)
            record.write(args.record, found)
    for contender, row in found["results"].items():
        print(contender, row)


if __name__ == "__main__":
    main()
