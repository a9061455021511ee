"""Validation loss of the MoE recipe against its dense twin: equal work per token, equal tokens, several seeds each.

``python -m benchmarks.moe_quality --record benchmarks/records/moe_quality.json``

A seed decides initial weights and order of the text, so losses are compared in pairs. What a difference is worth is
judged by its own spread over seeds. The record is written after every run: started again, the same command goes on.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks import record
from benchmarks.language import config_of, fit, text
from ls_strategy.lightning.strategy import ZeROStrategy
from recipes.gpt.model import OptimConfig, SampleConfig
from recipes.moe.model import MoEGPTModule
from recipes.moe.network import MoEConfig
from tests.trainers import quiet

MINUTES = 25
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--contenders", "top2", "--seeds", "1", "--steps", "2")

NETWORK: dict[str, Any] = {"num_layers": 4, "num_heads": 4, "width": 64}
BLOCK, BATCH = 128, 16
CONTENDERS: dict[str, dict[str, Any]] = {
    "dense": {"every": 0},
    "top2": {},
    "dropless": {"drop_tokens": False},
    "deepseek": {
        "num_experts": [16], "k": 3, "shared_experts": 1, "drop_tokens": False, "score": "sigmoid",
        "balance_loss": 0.0, "bias_update_rate": 1e-3,
    },
}  # fmt: skip
"""Options of `MoEConfig`. By any of them a token meets as many weights as in the dense network, and the router's."""


def train(contender: str, seed: int, steps: int, cache: Path) -> dict[str, float]:
    """One run; validation loss in nats per byte, parameters, FLOPs per token and seconds."""
    pl.seed_everything(seed, verbose=False)
    module = MoEGPTModule(
        config_of(NETWORK, BLOCK),
        MoEConfig(**CONTENDERS[contender]),
        OptimConfig(lr=3e-3, warmup_steps=100),
        SampleConfig(max_new_tokens=0),
    )
    start = time.perf_counter()
    trainer = fit(module, text(cache, seed, block=BLOCK, batch=BATCH), ZeROStrategy(1), steps)
    return {
        "val": float(trainer.callback_metrics["val/loss"]),
        "parameters": sum(p.numel() for p in module.parameters()),
        "flops_per_token": module.flops_per_token(),
        "seconds": round(time.perf_counter() - start, 1),
    }


Runs = dict[str, dict[str, dict[str, float]]]


def compare(runs: Runs) -> dict[str, dict[str, float]]:
    """Per contender: means over seeds, and how far its loss is below the dense one's, in pairs, with the spread."""
    result: dict[str, dict[str, float]] = {}
    for contender, by_seed in runs.items():
        mine = list(by_seed.values())
        margins = [runs["dense"][seed]["val"] - run["val"] for seed, run in by_seed.items()]
        result[contender] = {
            "seeds": len(mine),
            "val": round(statistics.fmean(r["val"] for r in mine), 4),
            "margin": round(statistics.fmean(margins), 4),
            "margin_spread": round(statistics.stdev(margins), 4) if len(margins) > 1 else 0.0,
            "smallest_margin": round(min(margins), 4),
            "parameters": mine[0]["parameters"],
            "flops_per_token": mine[0]["flops_per_token"],
            "seconds": round(statistics.median(r["seconds"] for r in mine), 1),
        }
    return result


def show(table: dict[str, dict[str, float]]) -> None:
    columns = ("seeds", "val", "margin", "margin_spread", "parameters", "flops_per_token", "seconds")
    print(f"{'':10}" + "".join(f"{c:>17}" for c in columns))
    for contender, row in table.items():
        print(f"{contender:10}" + "".join(f"{row[c]:>17}" for c in columns))


def begin(path: Path | None, steps: int) -> dict[str, Any]:
    """A new record, or the one at ``path`` if the same command made it from the same commit, versions and machine."""
    new: dict[str, Any] = {
        **record.header("moe_quality"), "network": NETWORK, "steps": steps,
        "tokens": steps * BATCH * BLOCK, "contenders": CONTENDERS, "results": {}, "runs": {},
    }  # fmt: skip
    if path is None or not path.exists():
        return new
    before = json.loads(path.read_text())
    same = all(before.get(key) == value for key, value in new.items() if key not in ("date", "results", "runs"))
    return before if same else new


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each contender")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    args = parser.parse_args()
    quiet()
    found = begin(args.record, args.steps)
    runs: Runs = found["runs"]
    with tempfile.TemporaryDirectory() as cache:
        for seed in map(str, range(1, args.seeds + 1)):
            for contender in dict.fromkeys(["dense", *args.contenders]):
                by_seed = runs.setdefault(contender, {})
                if seed not in by_seed:
                    by_seed[seed] = train(contender, int(seed), args.steps, Path(cache))
                    print(f"{contender} seed {seed}: {by_seed[seed]}", flush=True)
                found["results"] = compare(runs)
                record.write(args.record, found)
    show(found["results"])


if __name__ == "__main__":
    main()
