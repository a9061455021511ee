"""Step time of virtual ranks on one rank that is three times as slow as the other, against the ideal split.

``python -m benchmarks.virtual_shares --record benchmarks/records/virtual_shares.json``

Whole Trainers on two ranks with four virtual ranks at stage 2, interleaved in one run: the GPT recipe's model with
dropout, clipping by norm and a logged loss.

``full speed``   both ranks at full speed, two virtual ranks each: the time ``T`` of what is to be computed
``even``         rank 0 may use a third of a core, two virtual ranks each
``shares``       rank 0 may use a third of a core, ``virtual_ranks_per_rank: [1, 3]``

Together the slow and the fast rank have two thirds of the speed of two fast ones, so the ideal split takes ``1.5 T``;
the others are stated relative to it, round by round. A control group limits the slow rank where this user may make one;
elsewhere a process stops it for two thirds of the time (the record says which, under ``throttled_by``).
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import record
from benchmarks.contest import quartiles, ratios, turns
from benchmarks.language import gpt, random_tokens
from benchmarks.step_time import SIZES
from benchmarks.trainer_time import Clock
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.trainers import bare_trainer, quiet

MINUTES = 8
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--rounds", "2", "--steps", "4", "--size", "1M", "--batch", "1", "--block", "32")

VIRTUAL = 4
SLOWER = 3
CONTENDERS = ("full speed", "even", "shares")
_PERIOD_US = 100_000
_STOPS = f"""
import os, signal, time
pid = os.getppid()
try:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep({0.02 * (SLOWER - 1)})
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
finally:
    os.kill(pid, signal.SIGCONT)
"""


class Throttle:
    """Lets this process run at a third of its speed."""

    def __init__(self) -> None:
        """Make a control group, if this user may."""
        self._group = Path(f"/sys/fs/cgroup/cpu/ls_bench_{os.getpid()}")
        self._stops: Any = None
        try:
            self._group.mkdir()
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(_PERIOD_US // SLOWER))
            self.by = "cpu.cfs_quota_us of a control group"
        except OSError:
            self.by = "stopping the process for two thirds of the time"

    def begin(self) -> None:
        if self.by.startswith("cpu"):
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            self._stops = subprocess.Popen([sys.executable, "-c", _STOPS])

    def end(self) -> None:
        if self.by.startswith("cpu"):
            (self._group.parent / "cgroup.procs").write_text(str(os.getpid()))
        elif self._stops is not None:
            self._stops.terminate()
            self._stops.wait()
            self._stops = None

    def close(self) -> None:
        """Remove the control group."""
        self.end()
        if self.by.startswith("cpu"):
            self._group.rmdir()


def run_rank(rank: int, world_size: int, args: dict[str, Any]) -> Any:
    """Measure on one rank; returns seconds by contender and round, and what throttled the slow one."""
    quiet()
    torch.set_num_threads(1)
    steps, batch, block = args["steps"], args["batch"], args["block"]
    data = random_tokens(steps * batch * VIRTUAL, block)
    throttle = Throttle() if rank == 0 else None
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _, name in turns(CONTENDERS, args["rounds"]):
        pl.seed_everything(0, verbose=False)
        module = gpt({**SIZES[args["size"]], "dropout": 0.1}, block, total_steps=steps)
        parallel: dict[str, Any] = {"virtual_ranks": VIRTUAL}
        if name == "shares":
            parallel["virtual_ranks_per_rank"] = [1, SLOWER]
        clock = Clock()
        trainer = bare_trainer(
            ZeROStrategy(2, parallel=parallel), world_size, max_steps=steps, gradient_clip_val=1.0, callbacks=[clock]
        )
        if throttle is not None and name != "full speed":
            throttle.begin()
        trainer.fit(module, DataLoader(data, batch_size=batch))
        if throttle is not None:
            throttle.end()
        times[name].append(statistics.median(clock.seconds))
        del trainer, module
        gc.collect()
    if throttle is not None:
        throttle.close()
    return times, None if throttle is None else throttle.by


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=12, rounds_help="Trainers per contender")
    parser.add_argument("--steps", type=int, default=8, help="steps per Trainer")
    parser.add_argument("--batch", type=int, default=4, help="sequences per virtual rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--size", default="10M", choices=sorted(SIZES), help="parameters of the model")
    args = parser.parse_args()
    options = {k: v for k, v in vars(args).items() if k != "record"}
    times, throttled_by = spawn(run_rank, 2, options, timeout_s=3600, init_process_group=False)[0]
    ideal = [(1 + 1) / (1 + 1 / SLOWER) * each for each in times["full speed"]]
    results: dict[str, Any] = {}
    for name in CONTENDERS[1:]:
        low, middle, high = quartiles(ratios(times[name], ideal))
        results[name] = {"ratio": middle, "ratio_q1": low, "ratio_q3": high}
        print(f"{name}: x {middle:.3f} [{low:.3f}, {high:.3f}] of the ideal split")
    results["full_speed_s"] = round(statistics.median(times["full speed"]), 6)
    header = record.header("virtual_shares")
    record.write(args.record, {**header, **options, "throttled_by": throttled_by, "results": results})


if __name__ == "__main__":
    main()
