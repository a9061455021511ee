"""Loss of the GPT recipe on real text where weights and gradients are sent in few bits, several seeds each.

``python -m benchmarks.quantized_traffic --record benchmarks/records/quantized_traffic.json``

Two emulated nodes of two ranks, stage 3, with a second copy of the parameters in each node. A seed decides initial
weights and order of the text, the same for every format, so losses are compared in pairs. What a difference is worth is
judged by the spread of the exact runs over seeds.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks import record
from benchmarks.moments import LAST, NETWORK, Losses
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from recipes.gpt.corpus import CorpusConfig
from recipes.gpt.data import TextData
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig

MINUTES = 6
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--seeds", "1", "--steps", "2")

FORMATS: dict[str, dict[str, Any]] = {
    "exact": {},
    "weights int8, gradients int8": {"quantized_gathers": "int8", "quantized_gradients": "int8"},
    "weights int8, gradients int4": {"quantized_gathers": "int8", "quantized_gradients": "int4"},
}
KINDS = ("final", "mean", "val")


def train(form: str, seed: int, steps: int, cache: Path) -> dict[str, float]:
    """One run; final, mean and validation loss in nats per byte, and what rounding changes over all steps."""
    pl.seed_everything(seed, verbose=False)
    losses = Losses()
    strategy = ZeROStrategy(3, sharding={"min_unit_numel": 0, "hpz": "node", **FORMATS[form]})  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        strategy=strategy,
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses, errors := Errors()],
    )
    block = 128
    data = TextData(
        corpus=CorpusConfig(max_bytes=4_000_000, cache_dir=str(cache)),
        block_size=block, batch_size=2, val_crops=128, seed=seed,
    )  # fmt: skip
    module = GPTModule(
        GPTConfig(vocab_size=256, block_size=block, **NETWORK),  # type: ignore[arg-type]
        OptimConfig(lr=3e-3, warmup_steps=30),
        SampleConfig(max_new_tokens=0),
    )
    trainer.fit(module, data)
    assert trainer.global_step == steps
    values = [float(value) for value in losses.values]
    return {
        "final": statistics.fmean(values[-LAST:]),
        "mean": statistics.fmean(values),
        "val": float(trainer.callback_metrics["val/loss"]),
        **errors.found,
    }


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
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
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


def compare(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Per format and loss: mean over seeds, mean difference to exact runs in pairs, and their spread over seeds."""
    result: dict[str, dict[str, float]] = {}
    for form, losses in runs.items():
        row: dict[str, float] = {}
        for kind in KINDS:
            trusted = [r[kind] for r in runs["exact"]]
            pairs = [r[kind] - t for r, t in zip(losses, trusted, strict=True)]
            row[kind] = round(statistics.fmean(r[kind] for r in losses), 4)
            row[f"{kind}_difference"] = round(statistics.fmean(pairs), 4)
            row[f"{kind}_noise"] = round(statistics.stdev(trusted), 4) if len(trusted) > 1 else 0.0
        for kind in ("gather_error", "gradient_error"):
            row[kind] = round(statistics.fmean(r.get(kind, 0.0) for r in losses), 4)
        result[form] = row
    return result


def main() -> None:
    """Parse, measure, print a table, write the record."""
    parser = record.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each format")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    args = parser.parse_args()
    runs = measure(args.seeds, args.steps)
    table = compare(runs)
    print(f"{'':30}" + "".join(f"{k:>10}{'- exact':>10}{'noise':>8}" for k in KINDS))
    for form, row in table.items():
        cells = (f"{row[k]:>10.4f}{row[k + '_difference']:>+10.4f}{row[k + '_noise']:>8.4f}" for k in KINDS)
        print(f"{form:30}" + "".join(cells))
    found = {
        **record.header("quantized_traffic"), "network": NETWORK, "steps": args.steps, "results": table, "runs": runs,
    }  # fmt: skip
    record.write(args.record, found)


if __name__ == "__main__":
    main()
