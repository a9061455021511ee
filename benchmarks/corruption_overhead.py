"""What `CorruptionCheck` costs per step: one run of the GPT recipe in which several settings take turns with nothing.

``python -m benchmarks.corruption_overhead --record benchmarks/records/corruption_overhead.json``

The same Trainer trains the same model all the time. For some steps one of the callbacks is there, for as many none is.
A turn has a multiple of 100 steps, so that each setting checks as often as it says; those with more than one step
between two checks also keep batches, and copy what trains after every check. Ratios are those of turns next to each
other: of the wall clock, and of the CPU seconds of rank 0 with all its threads.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import record
from benchmarks.contest import against, turns
from benchmarks.language import gpt, random_tokens
from benchmarks.step_time import SIZES
from tests.trainers import bare_trainer, quiet

MINUTES = 10
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--size", "1M", "--rounds", "1", "--steps", "10", "--every", "1", "5", "--batch", "1", "--block", "32")

WITHOUT = "without"


class Alternating(pl.Callback):
    """A `CorruptionCheck` per setting, of which one at most is there."""

    def __init__(self, every: list[int], rounds: int, steps: int) -> None:
        """``steps`` to a turn; the first round does not count."""
        from ls_strategy import CorruptionCheck

        self._checks = {f"every={n}": CorruptionCheck(n) for n in every}
        names = [WITHOUT, *self._checks]
        self.wall: dict[str, list[float]] = {name: [] for name in names}
        self.cpu: dict[str, list[float]] = {name: [] for name in names}
        self._turns = list(turns(names, rounds, uncounted=1))
        self._steps = steps
        self._turn = -1
        self._began = (0.0, 0.0)

    @property
    def total_steps(self) -> int:
        """Of all turns, and one more, because the last one of a fit is always checked."""
        return len(self._turns) * self._steps + 1

    @property
    def _check(self) -> Any:
        name = self._turns[self._turn][1] if 0 <= self._turn < len(self._turns) else WITHOUT
        return self._checks.get(name)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._next(trainer, pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """For the check, if it is there."""
        if self._check is not None:
            self._check.on_after_backward(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """For the check, if it is there."""
        if self._check is not None:
            self._check.on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """For the check; and at the end of a turn, the next one."""
        if self._check is not None:
            self._check.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step % self._steps == 0:
            counts, name = self._turns[self._turn]
            if counts:
                self.wall[name].append((time.perf_counter() - self._began[0]) / self._steps)
                self.cpu[name].append((time.process_time() - self._began[1]) / self._steps)
            self._next(trainer, pl_module)

    def _next(self, trainer: Any, pl_module: Any) -> None:
        if self._check is not None:
            assert not self._check.found
            self._check.release()
        self._turn += 1
        if self._check is not None:
            self._check.on_train_start(trainer, pl_module)
        self._began = (time.perf_counter(), time.process_time())


def run_rank(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    """Measure on one rank; returns seconds per step of every turn, wall and CPU."""
    quiet()
    torch.set_num_threads(1)
    clock = Alternating(options["every"], options["rounds"], options["steps"])
    batch, block = options["batch"], options["block"]
    data = random_tokens((clock.total_steps + 1) * batch * world_size, block)
    pl.seed_everything(0, verbose=False)
    module = gpt(SIZES[options["size"]], block, warmup_steps=2)
    trainer = bare_trainer(options["strategy"], world_size, max_steps=clock.total_steps, callbacks=[clock])
    trainer.fit(module, DataLoader(data, batch_size=batch))
    return clock.wall, clock.cpu


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=6, rounds_help="turns with each setting")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--size", default="1M", choices=sorted(SIZES), help="model size")
    parser.add_argument("--strategies", nargs="+", default=["zero1", "zero3"], help="Lightning's names")
    parser.add_argument("--every", nargs="+", type=int, default=[1, 10, 100], help="steps from one check to the next")
    parser.add_argument("--steps", type=int, default=100, help="of a turn")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=64, help="tokens per sequence")
    args = parser.parse_args()
    found: dict[str, Any] = {**record.header("corruption_overhead"), "ranks": args.ranks, "size": args.size}
    found |= {"batch": args.batch, "block": args.block, "steps_per_turn": args.steps, "results": {}}
    for strategy in args.strategies:
        options = {k: vars(args)[k] for k in ("every", "rounds", "size", "steps", "batch", "block")}
        options["strategy"] = strategy
        wall, cpu = spawn(
            run_rank, args.ranks, options, timeout_s=7200, init_process_group=False, env={"OMP_NUM_THREADS": "1"}
        )[0]
        found["results"][strategy] = {"wall": against(wall, WITHOUT), "cpu": against(cpu, WITHOUT)}
        for kind, every in itertools.product(("wall", "cpu"), args.every):
            row = found["results"][strategy][kind][f"every={every}"]
            around = f"x {row['ratio']:.3f} [{row['ratio_q1']:.3f}, {row['ratio_q3']:.3f}] of without it"
            print(f"{strategy} {kind:5} every={every:<4} {row['median_s']:.4f} s per step, {around}")
    record.write(args.record, found)


if __name__ == "__main__":
    main()
