"""Loss of the GPT recipe on real text with AdamW's moments in fp32, bf16 and 8 bits, several seeds each.

``python -m benchmarks.moments --record benchmarks/records/moments.json``

A seed decides initial weights and order of the text, the same for every format, so losses are compared in pairs. What a
difference is worth is judged by the spread of the fp32 runs over seeds.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks import record
from benchmarks.language import fit, gpt, text
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.trainers import quiet

MINUTES = 5
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--seeds", "1", "--steps", "2")

FORMATS = ("fp32", "bf16", "int8")
KINDS = ("final", "mean", "val")
NETWORK: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "width": 64}
BLOCK = 128
LAST = 50  # steps at the end whose mean loss is the final loss


class Losses(pl.Callback):
    """Training loss of every step."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].detach().clone())

    def means(self, trainer: Any) -> dict[str, float]:
        """Return the `KINDS` of a fit that is over, in nats per byte."""
        values = torch.stack(self.values).tolist()
        val = float(trainer.callback_metrics["val/loss"])
        return {"final": statistics.fmean(values[-LAST:]), "mean": statistics.fmean(values), "val": val}


def train(strategy: ZeROStrategy, seed: int, steps: int, cache: Path, **trainer: Any) -> dict[str, float]:
    """One run on one rank; final, mean and validation loss in nats per byte."""
    pl.seed_everything(seed, verbose=False)
    losses = Losses()
    module = gpt(NETWORK, BLOCK, lr=3e-3, warmup_steps=30)
    data = text(cache, seed, block=BLOCK, batch=8, short=True)
    return losses.means(fit(module, data, strategy, steps, callbacks=[losses], **trainer))


def with_moments(steps: int, moments: str, seed: int, cache: Path) -> dict[str, float]:
    """One run with AdamW's moments in this format."""
    return train(ZeROStrategy(1, precision={"moments": moments}), seed, steps, cache)  # type: ignore[arg-type]


def compare(runs: dict[str, list[dict[str, float]]], baseline: str = "fp32") -> dict[str, dict[str, float]]:
    """Per format and loss: mean over seeds, mean difference to the baseline in pairs, and its spread over seeds."""
    result: dict[str, dict[str, float]] = {}
    for form, losses in runs.items():
        row: dict[str, float] = {}
        for kind in KINDS:
            trusted = [r[kind] for r in runs[baseline]]
            pairs = [r[kind] - t for r, t in zip(losses, trusted, strict=True)]
            row[kind] = round(statistics.fmean(r[kind] for r in losses), 4)
            row[f"{kind}_difference"] = round(statistics.fmean(pairs), 4)
            row[f"{kind}_noise"] = round(statistics.stdev(trusted), 4) if len(trusted) > 1 else 0.0
        result[form] = row
    return result


def show(table: dict[str, dict[str, float]], baseline: str = "fp32") -> None:
    width = max(map(len, table)) + 2
    print(" " * width + "".join(f"{k:>10}{'- ' + baseline:>10}{'noise':>8}" for k in KINDS))
    for form, row in table.items():
        cells = (f"{row[k]:>10.4f}{row[k + '_difference']:>+10.4f}{row[k + '_noise']:>8.4f}" for k in KINDS)
        print(f"{form:{width}}" + "".join(cells))


Run = Callable[[int, str, int, Path], dict[str, float]]
"""Trains so many steps with a format, a seed and a folder for the text."""


def measure(formats: Sequence[str], run: Run, *, seeds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Train every format and seed, in turns."""
    quiet()
    runs: dict[str, list[dict[str, float]]] = {m: [] for m in formats}
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(1, seeds + 1):
            for each in formats:
                runs[each].append(run(steps, each, seed, Path(cache)))
    return runs


def bench(name: str, doc: str | None, formats: Sequence[str], run: Run, *, steps: int, baseline: str = "fp32") -> None:
    """Parse, `measure`, print a table, and write the record."""
    parser = record.parser(doc)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each format")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    args = parser.parse_args()
    runs = measure(formats, run, seeds=args.seeds, steps=args.steps)
    table = compare(runs, baseline)
    show(table, baseline)
    found = {**record.header(name), "network": NETWORK, "steps": args.steps, "results": table, "runs": runs}
    record.write(args.record, found)


def main() -> None:
    bench("moments", __doc__, FORMATS, with_moments, steps=400)


if __name__ == "__main__":
    main()
