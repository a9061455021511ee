"""Step time and bytes with as many virtual ranks as there are ranks, against the same run without virtual ranks.

``python -m benchmarks.virtual_ranks --record benchmarks/records/virtual_ranks.json``

Whole Trainers on two ranks, interleaved in one run as in `benchmarks.trainer_time`: the GPT recipe's model with
dropout, clipping by norm and a logged loss.

``zero2``, ``zero3``  without virtual ranks
``virtual``           the same with ``parallel.virtual_ranks=2``: gradients are added in the order of a tree, and norms
                      exactly
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import record
from benchmarks.contest import against, turns
from benchmarks.language import gpt, random_tokens
from benchmarks.step_time import SIZES
from benchmarks.trainer_time import Clock
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.trainers import bare_trainer, quiet

MINUTES = 8
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--rounds", "2", "--steps", "4", "--size", "1M", "--batch", "1", "--block", "32")

STAGES = (2, 3)


def strategy_of(stage: int, *, virtual: bool) -> ZeROStrategy:
    """What is given to the Trainer."""
    return ZeROStrategy(stage, parallel={"virtual_ranks": 2} if virtual else {})  # type: ignore[arg-type]


def run_rank(rank: int, world_size: int, args: dict[str, Any]) -> Any:
    """Measure on one rank; returns seconds by stage, contender and round, and bytes sent per step."""
    quiet()
    torch.set_num_threads(1)
    steps, batch, block = args["steps"], args["batch"], args["block"]
    data = random_tokens(steps * batch * world_size, block)
    names = [f"zero{stage}{kind}" for stage in STAGES for kind in ("", " virtual")]
    times: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, int] = {}
    for _, name in turns(names, args["rounds"]):
        pl.seed_everything(0, verbose=False)
        module = gpt({**SIZES[args["size"]], "dropout": 0.1}, block, total_steps=steps)
        clock, strategy = Clock(), strategy_of(int(name[4]), virtual="virtual" in name)
        trainer = bare_trainer(strategy, world_size, max_steps=steps, gradient_clip_val=1.0, callbacks=[clock])
        trainer.fit(module, DataLoader(data, batch_size=batch))
        times[name].append(statistics.median(clock.seconds))
        counted = strategy.traffic.bytes
        sent[name] = (counted["reduce_scatter"] + counted["all_gather"]) // steps
        del trainer, module, strategy
        gc.collect()
    return times, sent


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=12, rounds_help="Trainers per contender")
    parser.add_argument("--steps", type=int, default=8, help="steps per Trainer")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--size", default="10M", choices=sorted(SIZES), help="parameters of the model")
    args = parser.parse_args()
    options = {k: v for k, v in vars(args).items() if k != "record"}
    times, sent = spawn(run_rank, 2, options, timeout_s=3600, init_process_group=False)[0]
    results: dict[str, Any] = {}
    for stage in STAGES:
        plain, virtual = f"zero{stage}", f"zero{stage} virtual"
        row = against({name: times[name] for name in (plain, virtual)}, plain)[virtual]
        results[plain] = {**row, "bytes": sent[virtual] / sent[plain]}
        print(f"{plain}: x {row['ratio']:.3f} [{row['ratio_q1']:.3f}, {row['ratio_q3']:.3f}], bytes x", end=" ")
        print(f"{results[plain]['bytes']:.4f}")
    record.write(args.record, {**record.header("virtual_ranks"), **options, "results": results})


if __name__ == "__main__":
    main()
