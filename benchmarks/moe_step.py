"""Step of the MoE recipe over that of its dense twin of equal work per token, whole Trainers taking turns in one run.

``python -m benchmarks.moe_step --record benchmarks/records/moe_step.json``

Each token visits as many weights in every contender: two of eight experts of half the dense width, or the dense MLP.
Every round builds and runs one Trainer per contender in the same processes and takes the median of its later steps;
what is reported are the quartiles over rounds of the ratio to the dense twin.
"""

from __future__ import annotations

import statistics
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import record
from benchmarks.contest import against, turns
from benchmarks.language import random_tokens
from benchmarks.trainer_time import Clock
from ls_strategy.config import ZeroStage
from tests.trainers import bare_trainer, quiet

MINUTES = 4
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--rounds", "1", "--steps", "4", "--batch", "1", "--block", "32", "--width", "64", "--layers", "2")

EXPERTS: dict[str, dict[str, Any]] = {
    "dense": {"every": 0},
    "capacity": {"num_experts": [8], "k": 2},
    "dropless": {"num_experts": [8], "k": 2, "drop_tokens": False},
}


def run_rank(rank: int, ranks: int, sizes: dict[str, int], rounds: int, steps: int, stage: ZeroStage) -> Any:
    """Measure on one rank: seconds by contender and round, and the last losses."""
    from ls_strategy import ZeROStrategy
    from recipes.gpt.model import OptimConfig, SampleConfig
    from recipes.gpt.network import GPTConfig
    from recipes.moe.model import MoEGPTModule
    from recipes.moe.network import MoEConfig

    quiet()
    torch.set_num_threads(1)
    data = random_tokens(steps * sizes["batch"] * ranks, sizes["block"])
    config = GPTConfig(
        vocab_size=256, block_size=sizes["block"], num_layers=sizes["layers"], num_heads=4, width=sizes["width"]
    )
    times: dict[str, list[float]] = {name: [] for name in EXPERTS}
    losses: dict[str, float] = {}
    for counts, name in turns(list(EXPERTS), rounds, uncounted=1):
        pl.seed_everything(0, verbose=False)
        module = MoEGPTModule(
            config, MoEConfig(**EXPERTS[name]), OptimConfig(warmup_steps=2), SampleConfig(max_new_tokens=0)
        )
        clock = Clock()
        trainer = bare_trainer(
            ZeROStrategy(stage=stage, parallel={"expert": 1 if name == "dense" else ranks}),
            ranks,
            max_steps=steps,
            callbacks=[clock],
        )
        trainer.fit(module, DataLoader(data, batch_size=sizes["batch"]))
        if counts:
            times[name].append(statistics.median(clock.seconds))
        losses[name] = float(trainer.callback_metrics["train/loss"])
    return times, losses


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=7, rounds_help="Trainers per contender")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine; experts are divided over all")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=8, help="steps per Trainer")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("batch", "block", "width", "layers")}
    times, losses = spawn(
        run_rank, args.ranks, sizes, args.rounds, args.steps, args.stage, timeout_s=3600, init_process_group=False
    )[0]
    table = against(times, "dense")
    found = {
        **record.header("moe_step"), "ranks": args.ranks, "stage": args.stage, **sizes,
        "results": {"contenders": table, "losses": losses},
    }  # fmt: skip
    for name, row in table.items():
        print(
            f"{name:9} {row['median_s']:8.4f} s  x {row['ratio']:.3f}  [{row['ratio_q1']:.3f}, {row['ratio_q3']:.3f}]"
        )
    record.write(args.record, found)


if __name__ == "__main__":
    main()
