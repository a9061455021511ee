"""Step time as a user sees it: whole Trainers on the GPT recipe, interleaved in one run.

``python -m tests.bench.trainer_time --ranks 1 --sizes 5M 20M --record tests/bench/records/trainer_time_1.json``

Every round builds and runs one Trainer per strategy in the same process, and takes the median of its later steps; what
is reported is the median over rounds of the ratio to the first strategy named.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.bench import record
from tests.bench.contest import against, turns
from tests.bench.step_time import SIZES

MINUTES = 8
QUICK = ("--sizes", "1M", "--rounds", "2", "--steps", "4", "--batch", "1", "--block", "32")
RECORD = "trainer_time_1_rank"


class Clock(pl.Callback):
    """Seconds from one batch's end to the next's."""

    reads_weights = False

    def __init__(self) -> None:
        """Start empty."""
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the time."""
        now = time.perf_counter()
        if batch_idx >= 2:  # the first steps allocate
            self.seconds.append(now - self._last)
        self._last = now


def run_rank(
    rank: int, world_size: int, size: str, strategies: list[str], rounds: int, steps: int, batch: int, block: int
) -> Any:
    """Measure on one rank; returns seconds per strategy and round, and the final losses."""
    from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
    from recipes.gpt.network import GPTConfig

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    tokens = torch.randint(256, (steps * batch * world_size, block + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    times: dict[str, list[float]] = {s: [] for s in strategies}
    losses: dict[str, float] = {}
    for _, name in turns(strategies, rounds):
        pl.seed_everything(0, verbose=False)
        module = GPTModule(
            GPTConfig(vocab_size=256, block_size=block, **SIZES[size]),
            OptimConfig(warmup_steps=2),
            SampleConfig(max_new_tokens=0),
        )
        clock = Clock()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=name,
            max_steps=steps,
            use_distributed_sampler=world_size > 1,  # on one rank it would only change the order of the data
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock],
        )
        trainer.fit(module, DataLoader(data, batch_size=batch))
        times[name].append(statistics.median(clock.seconds))
        losses[name] = float(trainer.callback_metrics["train/loss"])
    return times, losses


def main() -> None:
    """Parse, measure, print a table, write the record."""
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=6, rounds_help="Trainers per strategy")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on this machine")
    parser.add_argument("--sizes", nargs="+", default=["5M", "20M"], choices=sorted(SIZES), help="model sizes")
    parser.add_argument("--strategies", nargs="+", default=None, help="Lightning's names; the first is the baseline")
    parser.add_argument("--steps", type=int, default=7, help="steps per Trainer")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    args = parser.parse_args()
    strategies = args.strategies or (["auto"] if args.ranks == 1 else ["ddp"]) + ["zero1", "zero2", "zero3"]
    found: dict[str, Any] = {**record.header("trainer_time"), "ranks": args.ranks, "results": {}}
    for size in args.sizes:
        times, losses = spawn(
            run_rank, args.ranks, size, strategies, args.rounds, args.steps, args.batch, args.block,
            timeout_s=3600, init_process_group=False,
        )[0]  # fmt: skip
        table = against(times, strategies[0])
        found["results"][size] = {"batch": args.batch, "block": args.block, "contenders": table, "losses": losses}
        print(f"\n{size}, {args.batch} x {args.block} tokens per rank, {args.ranks} rank(s)")
        for name, row in table.items():
            spread = f"[{row['ratio_q1']:.3f}, {row['ratio_q3']:.3f}]"
            print(f"{name:8} {row['median_s']:8.4f} s  x {row['ratio']:.3f}  {spread}  loss {losses[name]:.6f}")
    record.write(args.record, found)


if __name__ == "__main__":
    main()
