"""Loss of the GPT recipe on real text where weights and gradients are sent in few bits, several seeds each.

``python -m benchmarks.quantized_traffic --record benchmarks/records/quantized_traffic.json``

Two emulated nodes of two ranks, stage 3, with a second copy of the parameters in each node. A seed decides initial
weights and order of the text, the same for every format, so losses are compared in pairs. What a difference is worth is
judged by the spread of the exact runs over seeds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks import record
from benchmarks.language import fit, gpt, text
from benchmarks.moments import BLOCK, NETWORK, Losses, compare, show
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.trainers import quiet

MINUTES = 6
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--seeds", "1", "--steps", "2")

FORMATS: dict[str, dict[str, Any]] = {
    "exact": {},
    "weights int8, gradients int8": {"quantized_gathers": "int8", "quantized_gradients": "int8"},
    "weights int8, gradients int4": {"quantized_gathers": "int8", "quantized_gradients": "int4"},
}


def train(form: str, seed: int, steps: int, cache: Path) -> dict[str, float]:
    """One run; final, mean and validation loss in nats per byte, and what rounding changes over all steps."""
    pl.seed_everything(seed, verbose=False)
    losses = Losses()
    strategy = ZeROStrategy(3, sharding={"min_unit_numel": 0, "hpz": "node", **FORMATS[form]})  # type: ignore[arg-type]
    errors = Errors()
    module, data = gpt(NETWORK, BLOCK, lr=3e-3, warmup_steps=30), text(cache, seed, block=BLOCK, batch=2, short=True)
    trainer = fit(module, data, strategy, steps, 2, num_nodes=2, callbacks=[losses, errors])
    assert trainer.global_step == steps
    return {**losses.means(trainer), **errors.found}


class Errors(pl.Callback):
    """What the strategy has measured of rounding when training ends: of the weights then, of gradients in all steps."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ask for it. Collective."""
        strategy = trainer.strategy
        if strategy.config.sharding.quantized_gathers is not None:
            self.found["gather_error"] = strategy.gather_error()
        if strategy.config.sharding.quantized_gradients is not None:
            self.found["gradient_error"] = strategy.gradient_error()


def of_rank(rank: int, world_size: int, seeds: int, steps: int, cache: Path) -> dict[str, list[dict[str, float]]]:
    """Every format and seed, in turns."""
    quiet()
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    runs: dict[str, list[dict[str, float]]] = {form: [] for form in FORMATS}
    for seed in range(1, seeds + 1):
        for form in FORMATS:
            runs[form].append(train(form, seed, steps, cache))
            if rank == 0:
                print(seed, form, runs[form][-1], flush=True)
    return runs


def measure(seeds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Run all, and return the mean of the ranks' losses."""
    with tempfile.TemporaryDirectory() as cache:
        ranks = spawn(of_rank, 4, seeds, steps, Path(cache), init_process_group=False, timeout_s=7200)
    return {
        form: [
            {kind: statistics.fmean(rank[form][i][kind] for rank in ranks) for kind in ranks[0][form][i]}
            for i in range(seeds)
        ]
        for form in FORMATS
    }


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """`compare` with the exact runs, and what rounding changes."""
    result = compare(runs, "exact")
    for form, found in runs.items():
        for kind in ("gather_error", "gradient_error"):
            result[form][kind] = round(statistics.fmean(r.get(kind, 0.0) for r in found), 4)
    return result


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each format")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    args = parser.parse_args()
    runs = measure(args.seeds, args.steps)
    table = compared(runs)
    show(table, "exact")
    found = {
        **record.header("quantized_traffic"), "network": NETWORK, "steps": args.steps, "results": table, "runs": runs,
    }  # fmt: skip
    record.write(args.record, found)


if __name__ == "__main__":
    main()
