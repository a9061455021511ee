"""Loss of the GPT recipe on real text with AdamW's moments in fp32, bf16 and 8 bits, several seeds each.

``python -m benchmarks.moments --record benchmarks/records/moments.json``

A seed decides initial weights and order of the text, the same for every format, so losses are compared in pairs. What a
difference is worth is judged by the spread of the fp32 runs over seeds.
"""

from __future__ import annotations

import functools
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks import record
from ls_strategy.lightning.strategy import ZeROStrategy
from recipes.gpt.corpus import CorpusConfig
from recipes.gpt.data import TextData
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig

MINUTES = 5
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--seeds", "1", "--steps", "2")

FORMATS = ("fp32", "bf16", "int8")
NETWORK: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "width": 64}
LAST = 50
"""Steps at the end whose mean loss is the final loss."""


class Losses(pl.Callback):
    """Training loss of every step."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep it."""
        self.values.append(outputs["loss"].detach().clone())


def train(strategy: ZeROStrategy, seed: int, steps: int, cache: Path, precision: Any = "32-true") -> dict[str, float]:
    """One run on one rank; final, mean and validation loss in nats per byte."""
    pl.seed_everything(seed, verbose=False)
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    block = 128
    data = TextData(
        corpus=CorpusConfig(max_bytes=4_000_000, cache_dir=str(cache)),
        block_size=block, batch_size=8, val_crops=128, seed=seed,
    )  # fmt: skip
    module = GPTModule(
        GPTConfig(vocab_size=256, block_size=block, **NETWORK),
        OptimConfig(lr=3e-3, warmup_steps=30),
        SampleConfig(max_new_tokens=0),
    )
    trainer.fit(module, data)
    values = torch.stack(losses.values).tolist()
    return {
        "final": statistics.fmean(values[-LAST:]),
        "mean": statistics.fmean(values),
        "val": float(trainer.callback_metrics["val/loss"]),
    }


def with_moments(steps: int, moments: str, seed: int, cache: Path) -> dict[str, float]:
    """One run with AdamW's moments in this format."""
    return train(ZeROStrategy(1, precision={"moments": moments}), seed, steps, cache)  # type: ignore[arg-type]


def compare(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Per format and loss: mean over seeds, mean difference to the first format in pairs, its spread over seeds."""
    result: dict[str, dict[str, float]] = {}
    first = next(iter(runs.values()))
    for name, losses in runs.items():
        row: dict[str, float] = {}
        for kind in ("final", "mean", "val"):
            trusted = [r[kind] for r in first]
            pairs = [r[kind] - t for r, t in zip(losses, trusted, strict=True)]
            row[kind] = round(statistics.fmean(r[kind] for r in losses), 4)
            row[f"{kind}_difference"] = round(statistics.fmean(pairs), 4)
            row[f"{kind}_noise"] = round(statistics.stdev(trusted), 4) if len(trusted) > 1 else 0.0
        result[name] = row
    return result


def measure(
    formats: Sequence[str], run: Callable[[str, int, Path], dict[str, float]], seeds: int
) -> dict[str, list[dict[str, float]]]:
    """Every format and seed, in turns; ``run`` trains with a format, a seed and a folder for the text."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    runs: dict[str, list[dict[str, float]]] = {m: [] for m in formats}
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(1, seeds + 1):
            for name in formats:
                runs[name].append(run(name, seed, Path(cache)))
    return runs


def print_table(table: dict[str, dict[str, float]]) -> None:
    """Losses of each format, their difference to the first one's, and its spread over seeds."""
    first = next(iter(table))
    width = max(map(len, table))
    kinds = ("final", "mean", "val")
    print(" " * width + "".join(f"{k:>10}{'- ' + first:>12}{'noise':>8}" for k in kinds))
    for name, row in table.items():
        cells = (f"{row[k]:>10.4f}{row[k + '_difference']:>+12.4f}{row[k + '_noise']:>8.4f}" for k in kinds)
        print(f"{name:{width}}" + "".join(cells))


def main() -> None:
    """Parse, measure, print a table, write the record."""
    parser = record.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each format")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    args = parser.parse_args()
    runs = measure(FORMATS, functools.partial(with_moments, args.steps), args.seeds)
    table = compare(runs)
    print_table(table)
    found = {
        **record.header("moments"), "network": NETWORK, "steps": args.steps, "results": table, "runs": runs,
    }  # fmt: skip
    record.write(args.record, found)


if __name__ == "__main__":
    main()
