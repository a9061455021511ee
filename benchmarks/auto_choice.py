"""What ``zero_auto`` chooses against every candidate, measured: whole Trainers on four ranks, three models.

``python -m benchmarks.auto_choice --record benchmarks/records/auto_choice.json``

``gpt``   the GPT recipe's network: much of everything
``wide``  wide layers and few samples: updates and traffic take most of the time
``conv``  the CIFAR recipe's ResNet: computation takes nearly all of it

One fit with ``zero_auto`` per model says what it would take and what every candidate was predicted to take. Then every
candidate that fits is trained, in turns, in the same processes. What is reported are the quartiles over rounds of the
time of the choice over that of the candidate with the smallest median.
"""

from __future__ import annotations

import gc
import logging
import statistics
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from benchmarks.contest import quartiles, ratios, turns
from benchmarks.trainer_time import Clock, module_of

MINUTES = 12
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--rounds", "1", "--steps", "4", "--models", "wide", "--width", "64")


class Block(nn.Module):
    """A wide layer."""

    def __init__(self, width: int) -> None:
        """Of ``width`` inputs and outputs."""
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        return x + torch.relu(self.linear(self.norm(x)))


class Wide(pl.LightningModule):
    """Ten wide layers."""

    def __init__(self, width: int) -> None:
        """Build."""
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Regress to zero."""
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()

    def configure_optimizers(self) -> Any:
        """AdamW."""
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
    """Median seconds of a step."""
    module, data = made(model, width, 4 * steps * world_size)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    trainer.fit(module, data)
    del trainer, module
    gc.collect()
    return statistics.median(clock.seconds)


def run_rank(rank: int, world_size: int, model: str, width: int, rounds: int, steps: int) -> Any:
    """The choice, all predictions, and seconds by candidate and round."""
    from ls_strategy.extras.planner import fit as planner_fit
    from ls_strategy.extras.planner.choice import Choice
    from ls_strategy.lightning.strategy import ZeROStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    choices: list[Choice] = []
    plain = planner_fit.choose

    def choose(*args: Any) -> Choice:
        choices.append(plain(*args))
        return choices[0]

    planner_fit.choose = choose
    fit("zero_auto", model, width, 4, world_size)
    (choice,) = choices
    possible = {f.candidate.name: f for f in choice.forecasts if f.fits and not f.traffic.drive}
    times: dict[str, list[float]] = {name: [] for name in possible}
    for _, name in turns(list(possible), rounds):
        strategy = ZeROStrategy(**possible[name].candidate.arguments())
        times[name].append(fit(strategy, model, width, steps, world_size))
    predicted = {name: f.seconds[0] for name, f in possible.items() if f.seconds is not None}
    return choice.candidate.name, predicted, times


def main() -> None:
    """Parse, measure, print a table, write the record."""
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=6, rounds_help="Trainers per candidate")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine")
    parser.add_argument("--models", nargs="+", default=["gpt", "wide", "conv"], choices=["gpt", "wide", "conv"])
    parser.add_argument("--steps", type=int, default=10, help="steps per Trainer")
    parser.add_argument("--width", type=int, default=768, help="of the wide layers")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for model in args.models:
        chosen, predicted, times = spawn(
            run_rank, args.ranks, model, args.width, args.rounds, args.steps, timeout_s=3600, init_process_group=False
        )[0]
        medians = {name: statistics.median(each) for name, each in times.items()}
        best = min(medians, key=lambda name: medians[name])
        low, middle, high = quartiles(ratios(times[chosen], times[best]))
        results[model] = {
            "chosen": chosen, "fastest": best, "ratio": middle, "ratio_q1": low, "ratio_q3": high,
            "seconds": {
                name: {"measured": round(medians[name], 4), "predicted": round(predicted[name], 4)} for name in medians
            },
        }  # fmt: skip
        print(f"\n{model}: chose {chosen}, fastest {best}: x {middle} [{low}, {high}]")
        for name in sorted(medians, key=lambda name: medians[name]):
            print(f"{name:50}{medians[name]:>10.4f} s measured {predicted[name]:>10.4f} s predicted")
    record.write(
        args.record, {**record.header("auto_choice"), "ranks": args.ranks, "rounds": args.rounds, "results": results}
    )


if __name__ == "__main__":
    main()
