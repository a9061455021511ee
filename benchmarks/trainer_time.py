"""Step time as a user gets it: `Trainer.fit` on two ranks with DDP, FSDP2 and the ZeRO stages, interleaved in one run.

``python -m benchmarks trainer_time --record``                     two ranks, and the tables of README.md and docs/
``python -m benchmarks.trainer_time --ranks 1 --sizes 5M 10M --record benchmarks/records/trainer_time_1_rank.json``
``python -m benchmarks.trainer_time --compile blocks --sizes 5M --batch 8 32 --rounds 8``    that of docs/compile.md

Every round builds and runs one Trainer per strategy in the same processes, in another order than the round before, and
takes the median of its later steps, from the end of one batch to the end of the next: data loading, Lightning's loop,
the logging of the loss and a callback of the user's included. What is reported are the quartiles over rounds of the
ratio to the first strategy named.

``ddp``      Lightning's DDPStrategy
``fsdp2``    Lightning's ModelParallelStrategy with torch's ``fully_shard`` in ``configure_model``, one group per block
``zero1-3``  this package
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from benchmarks import record
from benchmarks.contest import against, turns
from benchmarks.language import random_tokens
from benchmarks.step_time import SIZES
from tests.trainers import bare_trainer, quiet

MINUTES = 25
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--sizes", "1M", "--rounds", "2", "--steps", "4", "--batch", "1", "--block", "32")


class Clock(pl.Callback):
    """Seconds from one batch's end to the next's."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if batch_idx >= 2:  # the first steps allocate
            self.seconds.append(now - self._last)
        self._last = now


class UsersCallback(pl.Callback):
    """What a user may have written before knowing of this package: it says nothing about what it reads."""

    def __init__(self) -> None:
        self.tokens = 0
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.tokens += batch[0].numel()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def strategy_of(name: str, world_size: int, regions: str | None = None) -> Any:
    """What is given to the Trainer. ``regions``: what is compiled."""
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    if regions is not None and name.startswith("zero"):
        from ls_strategy import ZeROStrategy

        return ZeROStrategy(int(name[-1]), compile=regions)  # type: ignore[arg-type]
    return name


def module_of(name: str, size: str, block: int, regions: str | None = None) -> pl.LightningModule:
    """The GPT recipe's module; for ``fsdp2`` as its user has to change it, and for all peers to compile it."""
    from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
    from recipes.gpt.network import GPTConfig

    class FullyShardedGPT(GPTModule):
        def configure_model(self) -> None:
            if self.model is not None:
                return
            super().configure_model()
            compile_parts(self.network)
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for each in self.network.blocks:
                fully_shard(each, mesh=mesh)
            fully_shard(self.network, mesh=mesh)

    class CompiledGPT(GPTModule):
        def configure_model(self) -> None:
            if self.model is None:
                super().configure_model()
                compile_parts(self.network)

    def compile_parts(network: Any) -> None:
        for part in [] if regions is None else network.blocks if regions == "blocks" else [network]:
            part.compile()

    kind = FullyShardedGPT if name == "fsdp2" else GPTModule if name.startswith("zero") else CompiledGPT
    return kind(
        GPTConfig(vocab_size=256, block_size=block, **SIZES[size]),
        OptimConfig(warmup_steps=2),
        SampleConfig(max_new_tokens=0),
    )


def run_rank(
    rank: int, world_size: int, size: str, strategies: list[str], rounds: int, steps: int, batch: int, block: int,
    regions: str | None = None,
) -> Any:  # fmt: skip
    """Measure on one rank; returns seconds per strategy and round, and the losses of all ranks' last step."""

    quiet()
    torch.set_num_threads(1)
    data = random_tokens(steps * batch * world_size, block)
    times: dict[str, list[float]] = {s: [] for s in strategies}
    losses: dict[str, float] = {}
    for _, name in turns(strategies, rounds):
        pl.seed_everything(0, verbose=False)
        module = module_of(name, size, block, regions)
        if regions is not None:
            torch.compiler.reset()  # or dynamo reaches its limit of graphs, which counts those of all contenders
        clock, callback = Clock(), UsersCallback()
        trainer = bare_trainer(
            strategy_of(name, world_size, regions),
            world_size,
            max_steps=steps,
            use_distributed_sampler=world_size > 1,  # on one rank it would only change the order of the data
            callbacks=[callback, clock],
        )
        trainer.fit(module, DataLoader(data, batch_size=batch))
        times[name].append(statistics.median(clock.seconds))
        assert len(callback.losses) == steps
        losses[name] = callback.losses[-1]
        del trainer, module
        gc.collect()  # a Trainer and its module refer to each other: 72 models of 20M would fill the memory
    return times, losses


def parameters_of(size: str, block: int) -> Iterator[nn.Parameter]:
    """Of the network, without memory."""
    module = module_of("ddp", size, block)
    with torch.device("meta"):
        module.configure_model()
    return module.parameters()


def check_losses(losses: dict[str, float], baseline: str) -> None:
    """A time is worth nothing if something else was computed.

    Raises:
        RuntimeError: a contender ended at another loss.
    """
    for name, loss in losses.items():
        if abs(loss - losses[baseline]) > 1e-3 * abs(losses[baseline]):
            raise RuntimeError(f"{name} ended at loss {loss}, {baseline} at {losses[baseline]}: not the same training.")


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=12, rounds_help="Trainers per strategy")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--sizes", nargs="+", default=["5M", "20M"], choices=sorted(SIZES), help="model sizes")
    parser.add_argument("--strategies", nargs="+", default=None, help="Lightning's names; the first is the baseline")
    parser.add_argument("--steps", type=int, default=7, help="steps per Trainer")
    parser.add_argument("--batch", type=int, nargs="+", default=[8], help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--compile", choices=["blocks", "model"], help="compile this for every contender")
    args = parser.parse_args()
    peers = ["auto"] if args.ranks == 1 else ["ddp", "fsdp2"]
    strategies = args.strategies or [*peers, "zero1", "zero2", "zero3"]
    found: dict[str, Any] = {
        **record.header("trainer_time"), "ranks": args.ranks, "rounds": args.rounds, "steps": args.steps,
        "baseline": strategies[0], "compile": args.compile, "results": {},
    }  # fmt: skip
    for size, batch in itertools.product(args.sizes, args.batch):
        times, losses = spawn(
            run_rank, args.ranks, size, strategies, args.rounds, args.steps, batch, args.block, args.compile,
            timeout_s=3600, init_process_group=False,
        )[0]  # fmt: skip
        table = against(times, strategies[0])
        check_losses(losses, strategies[0])
        numel = sum(p.numel() for p in parameters_of(size, args.block))
        job = size if len(args.batch) == 1 else f"{size} at {batch * args.block:,} tokens per rank"
        found["results"][job] = {
            "parameters": numel, "batch": batch, "block": args.block, "contenders": table, "losses": losses,
        }  # fmt: skip
        print(f"\n{size}, {batch} x {args.block} tokens per rank, {args.ranks} rank(s)")
        for name, row in table.items():
            spread = f"[{row['ratio_q1']:.3f}, {row['ratio_q3']:.3f}]"
            print(f"{name:8} {row['median_s']:8.4f} s  x {row['ratio']:.3f}  {spread}  loss {losses[name]:.6f}")
    record.write(args.record, found)


if __name__ == "__main__":
    main()
