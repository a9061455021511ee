"""What `Monitor` costs: one run of the GPT recipe in which it takes turns with nothing.

``python -m benchmarks.monitor_overhead --record benchmarks/records/monitor_overhead.json``

The same Trainer trains the same model all the time. For some steps the callback is there, with everything that it does
once per logging interval, for as many it is not. Ratios are those of turns next to each other: of the wall clock, and
of the CPU seconds of rank 0 with all its threads, which do not see what else the machine does. ``inside`` is the part
of the training thread's CPU seconds that its hooks and notes take, read off around each: exact where ratios are noisy,
but blind for what they make others wait.

In some turns it also draws the images of one step. What they take of the training thread is the difference to turns
without, and their share at the default interval is that of the images of one step in so many.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from benchmarks import record
from benchmarks.contest import against, spread, turns
from benchmarks.language import gpt, random_tokens
from benchmarks.step_time import SIZES
from tests.trainers import quiet

MINUTES = 12
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--size", "1M", "--rounds", "2", "--steps", "2", "--batch", "1", "--block", "32")

WITH, WITHOUT, IMAGES = "with", "without", "images"


class Inside:
    """CPU seconds of this thread in some methods; one that another of them calls counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._thread = threading.get_ident()

    def watch(self, owner: Any, *names: str) -> None:
        """Count calls of these methods of an object or class from now on."""
        for name in names:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._depth, began = 1, time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth = 0
                self.seconds += time.thread_time() - began

        return counted


class Alternating(pl.Callback):
    """A `Monitor` that is there in every other turn."""

    def __init__(self, rounds: int, steps: int) -> None:
        """``steps`` to a turn; the first round does not count."""
        from ls_strategy import Monitor
        from ls_strategy.spans import SpanRecorder

        self.monitor = Monitor(peak_tflops=1.0)
        # Seconds of the training thread in each turn with the monitor.
        self.inside: dict[str, list[float]] = {WITH: [], IMAGES: []}
        self.thread: list[float] = []  # seconds of the training thread in each turn
        self._account = Inside()
        self._account.watch(self.monitor, "on_train_batch_end", "on_before_optimizer_step")
        self._account.watch(SpanRecorder, "enter", "leave", "sample", "follow")
        self.wall: dict[str, list[float]] = {WITH: [], WITHOUT: [], IMAGES: []}
        self.cpu: dict[str, list[float]] = {WITH: [], WITHOUT: [], IMAGES: []}
        self._turns = list(turns([WITHOUT, WITH, IMAGES], rounds, uncounted=1))
        self._steps = steps
        self._turn = -1
        self._began = (0.0, 0.0, 0.0)

    @property
    def total_steps(self) -> int:
        """Of all turns."""
        return len(self._turns) * self._steps

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._next(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """For the monitor, if it is there."""
        if self._monitors:
            self.monitor.on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """For the monitor; and at the end of a turn, the next one."""
        if self._monitors:
            self.monitor.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step % self._steps == 0:
            counts, name = self._turns[self._turn]
            if counts:
                self.wall[name].append((time.perf_counter() - self._began[0]) / self._steps)
                self.cpu[name].append((time.process_time() - self._began[1]) / self._steps)
                self.thread.append(time.thread_time() - self._began[2])
                if name != WITHOUT:
                    self.inside[name].append(self._account.seconds)
            self._next(trainer, pl_module)

    @property
    def _monitors(self) -> bool:
        return 0 <= self._turn < len(self._turns) and self._turns[self._turn][1] != WITHOUT

    def _next(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.teardown(trainer, pl_module, "fit")
        self._turn += 1
        if self._monitors:
            self.monitor.on_train_start(trainer, pl_module)
            self.monitor._figures._on &= self._turns[self._turn][1] == IMAGES
        self._account.seconds = 0.0
        self._began = (time.perf_counter(), time.process_time(), time.thread_time())


def run_rank(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    """Measure on one rank; returns seconds per step of every turn, wall and CPU."""
    quiet()
    torch.set_num_threads(1)
    clock = Alternating(options["rounds"], options["steps"])
    batch, block = options["batch"], options["block"]
    data = random_tokens(clock.total_steps * batch * world_size, block)
    pl.seed_everything(0, verbose=False)
    module = gpt(SIZES[options["size"]], block, warmup_steps=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=options["strategy"],
            max_steps=clock.total_steps,
            log_every_n_steps=options["steps"],
            logger=TensorBoardLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock],
        )
        trainer.fit(module, DataLoader(data, batch_size=batch))
    return clock.wall, clock.cpu, clock.inside, clock.thread


def per_image(inside: dict[str, list[float]], thread: list[float], steps: int) -> dict[str, Any]:
    """Return what the images of one step cost the training thread, and the share of one in ``Monitor``'s interval."""
    from ls_strategy import Monitor

    every = inspect.signature(Monitor).parameters["picture_every_n_steps"].default
    step_s = statistics.median(thread) / steps
    seconds = [images - without for images, without in zip(inside[IMAGES], inside[WITH], strict=True)]
    shares = [each / (every * step_s) for each in seconds]
    return {"seconds": spread(seconds, 5), "every_n_steps": every, "share": spread(shares, 6)}


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=30, rounds_help="turns with and without it")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--size", default="5M", choices=sorted(SIZES), help="model size")
    parser.add_argument("--strategies", nargs="+", default=["zero1", "zero3"], help="Lightning's names")
    parser.add_argument("--steps", type=int, default=10, help="of a turn, and of a logging interval; Lightning's is 50")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    args = parser.parse_args()
    found: dict[str, Any] = {**record.header("monitor_overhead"), "ranks": args.ranks, "size": args.size}
    found |= {"batch": args.batch, "block": args.block, "steps_per_interval": args.steps, "results": {}}
    for strategy in args.strategies:
        options = {**{k: vars(args)[k] for k in ("rounds", "size", "steps", "batch", "block")}, "strategy": strategy}
        wall, cpu, inside, thread = spawn(
            run_rank, args.ranks, options, timeout_s=7200, init_process_group=False, env={"OMP_NUM_THREADS": "1"}
        )[0]
        found["results"][strategy] = {"wall": against(wall, WITHOUT), "cpu": against(cpu, WITHOUT)}
        turn_s = statistics.median(thread)
        found["results"][strategy]["inside"] = spread([seconds / turn_s for seconds in inside[WITH]], 5)
        found["results"][strategy]["image"] = image = per_image(inside, thread, args.steps)
        for kind, name in itertools.product(("wall", "cpu"), (WITH, IMAGES)):
            row = found["results"][strategy][kind][name]
            around = f"x {row['ratio']:.3f} [{row['ratio_q1']:.3f}, {row['ratio_q3']:.3f}] of without it"
            print(f"{strategy} {kind:5} {name:7} {row['median_s']:.4f} s per step, {around}")
        share = 100 * found["results"][strategy]["inside"]["median"]
        print(f"{strategy} inside hooks and notes: {share:.2f} % of CPU time")
        each, of_all = image["seconds"]["median"], 100 * image["share"]["median"]
        print(f"{strategy} images of a step: {each:.3f} s, {of_all:.3f} % of {image['every_n_steps']} steps")
    record.write(args.record, found)


if __name__ == "__main__":
    main()
