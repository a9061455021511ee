"""Step time with snapshots in memory as often as ``ElasticTraining`` chooses, against none.

``python -m benchmarks.snapshots --record benchmarks/records/snapshots.json``

Whole Trainers on two ranks at stage 2, interleaved in one run: the GPT recipe's model with dropout and clipping.
Ratios are of the time from the first step's end to the last one's, so they include what training waits for, and what
the thread that writes takes away from it; and of the CPU time of all threads in between, which other programs on the
machine change less. Both ranks share one memory, so no copy goes to another node.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import record
from benchmarks.contest import quartiles, ratios, turns
from benchmarks.language import gpt, random_tokens
from benchmarks.step_time import SIZES
from ls_strategy import ElasticTraining, ZeROStrategy
from tests.trainers import bare_trainer, quiet

MINUTES = 10
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--rounds", "2", "--steps", "4", "--size", "1M", "--batch", "1", "--block", "32")

CONTENDERS = ("none", "snapshots")


class Clock(pl.Callback):
    """Seconds from the end of the first step to the end of the last one, and CPU time of this process in between."""

    def __init__(self) -> None:
        self.begin = self.seconds = 0.0
        self.cpu_begin = self.cpu = 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if trainer.global_step == 1:
            self.begin, self.cpu_begin = time.perf_counter(), time.process_time()
        self.seconds, self.cpu = time.perf_counter() - self.begin, time.process_time() - self.cpu_begin


def run_rank(rank: int, world_size: int, args: dict[str, Any]) -> Any:
    """Measure on one rank; returns seconds and CPU time by contender and round, and snapshots per run."""
    quiet()
    torch.set_num_threads(1)
    steps, batch, block = args["steps"], args["batch"], args["block"]
    data = random_tokens(steps * batch * world_size, block)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    used: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    taken: list[int] = []
    for number, name in turns(CONTENDERS, args["rounds"]):
        pl.seed_everything(0, verbose=False)
        module = gpt({**SIZES[args["size"]], "dropout": 0.1}, block, total_steps=steps)
        elastic = ElasticTraining(run=f"bench-{os.getppid()}-{number}", memory=args["memory"])
        clock = Clock()
        trainer = bare_trainer(
            ZeROStrategy(2),
            world_size,
            max_steps=steps,
            gradient_clip_val=1.0,
            callbacks=[clock, elastic] if name == "snapshots" else [clock],
        )
        trainer.fit(module, DataLoader(data, batch_size=batch))
        times[name].append(clock.seconds)
        used[name].append(clock.cpu)
        if name == "snapshots":
            taken.append(elastic.taken)
        del trainer, module
        gc.collect()
    return times, used, taken


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=8, rounds_help="Trainers per contender")
    parser.add_argument("--steps", type=int, default=60, help="steps per Trainer")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--size", default="10M", choices=sorted(SIZES), help="parameters of the model")
    args = parser.parse_args()
    options = {k: v for k, v in vars(args).items() if k != "record"}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as memory:
        spawned = {**options, "memory": memory}
        times, used, taken = spawn(run_rank, 2, spawned, timeout_s=3600, init_process_group=False)[0]
    low, middle, high = quartiles(ratios(times["snapshots"], times["none"]))
    cpu_low, cpu, cpu_high = quartiles(ratios(used["snapshots"], used["none"]))
    results = {
        "ratio": middle, "ratio_q1": low, "ratio_q3": high, "cpu": cpu, "cpu_q1": cpu_low, "cpu_q3": cpu_high,
        "snapshots": statistics.median(taken), "steps_per_snapshot": round(args.steps / statistics.median(taken), 1),
    }  # fmt: skip
    print(f"CPU time x {cpu:.4f} [{cpu_low:.4f}, {cpu_high:.4f}]")
    print(f"x {middle:.4f} [{low:.4f}, {high:.4f}] with {results['snapshots']} snapshots in {args.steps} steps")
    record.write(args.record, {**record.header("snapshots"), **options, "results": results})


if __name__ == "__main__":
    main()
