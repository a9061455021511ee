"""What ``zero_auto`` chooses against every candidate, measured: whole Trainers on four ranks, three models.

``python -m benchmarks.auto_choice --record benchmarks/records/auto_choice.json``; with ``--models gpt --keep`` for one
model at a time, with the others' results as the record has them.

``gpt``   the GPT recipe's network: much of everything
``wide``  wide layers and few samples: updates and traffic take most of the time
``conv``  the CIFAR recipe's ResNet: computation takes nearly all of it

One fit with ``zero_auto`` per model, which knows of no earlier run, says what it would take and what every candidate
was predicted to take. A second one does so with what the first has taught. Then every candidate that fits is trained,
in turns, in the same processes. What is reported are the quartiles over rounds of the time of the choice over that of
the candidate with the smallest median, and Spearman's correlation of predicted and measured times.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from benchmarks.contest import quartiles, ratios, turns
from benchmarks.trainer_time import Clock, module_of
from tests.trainers import bare_trainer, quiet

MINUTES = 12
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--rounds", "1", "--steps", "4", "--models", "wide", "--width", "64")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        return x + torch.relu(self.linear(self.norm(x)))


class Wide(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Regress to zero."""
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def made(model: str, width: int, samples: int) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """A module and its data, of so many samples."""
    from recipes.cifar.model import CIFARModule

    pl.seed_everything(0, verbose=False)
    if model == "gpt":
        tokens = torch.randint(256, (samples, 65))
        batches = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return module_of("zero0", "1M", 64), DataLoader(batches, batch_size=4)
    if model == "conv":
        images = TensorDataset(
            torch.randint(256, (samples, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (samples,))
        )
        return CIFARModule(width=16, augmentation=False), DataLoader(images, batch_size=4)
    return Wide(width), DataLoader(TensorDataset(torch.randn(samples, width)), batch_size=4)


def fit(strategy: Any, model: str, width: int, steps: int, world_size: int) -> float:
    module, data = made(model, width, 4 * steps * world_size)
    clock = Clock()
    trainer = bare_trainer(strategy, world_size, max_steps=steps, callbacks=[clock])
    trainer.fit(module, data)
    del trainer, module
    gc.collect()
    return statistics.median(clock.seconds)


def choices_of(model: str, width: int, steps: int, world_size: int, folder: str) -> list[Any]:
    """What ``zero_auto`` chooses before it has learned, and after one run."""
    from ls_strategy.extras.planner import fit as planner_fit
    from ls_strategy.extras.planner import learned

    learned.cache_dir = lambda: Path(folder)
    choices: list[Any] = []
    plain = planner_fit.choose

    def choose(*args: Any) -> Any:
        choices.append(plain(*args))
        return choices[-1]

    planner_fit.choose = choose
    for _ in range(2):
        fit("zero_auto", model, width, steps, world_size)
    planner_fit.choose = plain
    return choices


def run_rank(rank: int, world_size: int, model: str, width: int, rounds: int, steps: int, folder: str) -> Any:
    """By choice its name and all predictions; and seconds by candidate and round."""
    from ls_strategy.lightning.strategy import ZeROStrategy

    quiet()
    torch.set_num_threads(1)
    choices = choices_of(model, width, 2 * steps, world_size, folder)
    possible = {f.candidate.name: f for f in choices[0].forecasts if f.fits and not f.traffic.drive}
    times: dict[str, list[float]] = {name: [] for name in possible}
    for _, name in turns(list(possible), rounds):
        strategy = ZeROStrategy(**possible[name].candidate.arguments())
        times[name].append(fit(strategy, model, width, steps, world_size))
    predicted = [{f.candidate.name: f.seconds[0] for f in choice.forecasts if f.seconds} for choice in choices]
    return [choice.candidate.name for choice in choices], predicted, times


def ranks_of(values: Sequence[float]) -> list[float]:
    """The place of each in order of size; equal ones share the mean of theirs.

    >>> ranks_of([3.0, 1.0, 3.0, 2.0])
    [2.5, 0.0, 2.5, 1.0]
    """
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 15.0])
    0.5
    """
    return round(statistics.correlation(ranks_of(one), ranks_of(other)), 3)


def result_of(chosen: Sequence[str], predicted: Sequence[dict[str, float]], times: dict[str, list[float]]) -> Any:
    """What the record says of a model."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    best = min(medians, key=lambda name: medians[name])
    found: dict[str, Any] = {"fastest": best}
    for suffix, name, foretold in zip(("_before", ""), chosen, predicted, strict=True):
        low, middle, high = quartiles(ratios(times[name], times[best]))
        found |= {
            f"chosen{suffix}": name, f"ratio{suffix}": middle, f"ratio{suffix}_q1": low, f"ratio{suffix}_q3": high,
            f"rank_correlation{suffix}": rank_correlation(
                list(medians.values()), [round(foretold[name], 4) for name in medians]
            ),
        }  # fmt: skip
    found["seconds"] = {
        name: {
            "measured": round(medians[name], 4), "predicted_before": round(predicted[0][name], 4),
            "predicted": round(predicted[1][name], 4),
        }
        for name in medians
    }  # fmt: skip
    return found


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=6, rounds_help="Trainers per candidate")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine")
    parser.add_argument("--models", nargs="+", default=["gpt", "wide", "conv"], choices=["gpt", "wide", "conv"])
    parser.add_argument("--steps", type=int, default=10, help="steps per Trainer")
    parser.add_argument("--width", type=int, default=768, help="of the wide layers")
    parser.add_argument("--keep", action="store_true", help="keep the record's results of other models")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if args.keep and args.record is not None and Path(args.record).exists():
        results = json.loads(Path(args.record).read_text())["results"]
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            chosen, predicted, times = spawn(
                run_rank, args.ranks, model, args.width, args.rounds, args.steps, folder, timeout_s=3600,
                init_process_group=False,
            )[0]  # fmt: skip
        results[model] = found = result_of(chosen, predicted, times)
        print(f"\n{model}: fastest {found['fastest']}")
        for when, end in (("before", "_before"), ("after", "")):
            spread = f"[{found[f'ratio{end}_q1']}, {found[f'ratio{end}_q3']}]"
            correlation = found[f"rank_correlation{end}"]
            print(
                f"{when}: chose {found[f'chosen{end}']}, x {found[f'ratio{end}']} {spread}, correlation {correlation}"
            )
        for name, row in sorted(found["seconds"].items(), key=lambda item: item[1]["measured"]):
            print(f"{name:56}{row['measured']:>9.4f} s measured, predicted {row['predicted_before']:>9.4f}", end="")
            print(f" before,{row['predicted']:>9.4f} after")
    record.write(
        args.record, {**record.header("auto_choice"), "ranks": args.ranks, "rounds": args.rounds, "results": results}
    )


if __name__ == "__main__":
    main()
