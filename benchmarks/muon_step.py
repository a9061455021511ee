"""What Muon adds to a step, over the time of its Newton-Schulz iterations divided by the number of ranks.

``python -m benchmarks.muon_step --record benchmarks/records/muon_step.json``

Whole Trainers of the GPT recipe take turns in one run: AdamW for all parameters, and Muon for the blocks' matrices. In
every round all ranks also time the iterations of all matrices at once, as one process would do them, so that both have
the cores of the machine to themselves in the same way. The ratio of a round is (Muon's step - AdamW's step) / (time of
the iterations / ranks): 1 is a step that sends and waits for nothing more, and has perfectly balanced ranks.

Both dtypes of the iteration are measured: a CPU without products in bf16 takes so long for them that they hide what
else a step does. In fp32 they do not.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks import record
from benchmarks.contest import quartiles, turns
from benchmarks.language import random_tokens
from benchmarks.trainer_time import Clock
from recipes.gpt.model import GPTModule
from tests.trainers import bare_trainer, quiet

MINUTES = 8
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--rounds", "1", "--steps", "4", "--block", "32", "--width", "64", "--layers", "2")

CONTENDERS = ("adamw", "muon", "iterations")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class OfDtype(GPTModule):
    """The recipe's module, whose Muon iterates in ``ns_dtype``."""

    ns_dtype = "bf16"

    def configure_optimizers(self) -> Any:
        """Return the recipe's optimizer and schedule."""
        found: Any = super().configure_optimizers()
        for group in found["optimizer"].param_groups:
            if group.get("use_muon"):
                group["ns_dtype"] = self.ns_dtype
        return found


def run_rank(rank: int, ranks: int, args: dict[str, Any]) -> Any:
    """Measure on one rank: seconds by contender and round, and the bytes that Muon sends for its matrices per step."""
    from ls_strategy import ZeROStrategy
    from ls_strategy.optimizers.newton_schulz import orthogonalized
    from recipes.gpt.model import OptimConfig, SampleConfig
    from recipes.gpt.network import GPTConfig

    quiet()
    torch.set_num_threads(1)
    steps, block = args["steps"], args["block"]
    data = random_tokens(steps * ranks, block)
    config = GPTConfig(vocab_size=256, block_size=block, num_layers=args["layers"], num_heads=4, width=args["width"])
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    sent, shapes = 0, []
    for counts, name in turns(CONTENDERS, args["rounds"], uncounted=1):
        if name == "iterations":
            found = [torch.randn(shape) for shape in shapes]
            begin = time.perf_counter()
            for matrix in found:
                orthogonalized(matrix, dtype=DTYPES[args["dtype"]])
            seconds = time.perf_counter() - begin
        else:
            pl.seed_everything(0, verbose=False)
            options = OptimConfig(name=name, warmup_steps=2)
            module = OfDtype(config, options, SampleConfig(max_new_tokens=0))
            module.ns_dtype = args["dtype"]
            clock, strategy = Clock(), ZeROStrategy(stage=args["stage"])
            trainer = bare_trainer(strategy, ranks, max_steps=steps, callbacks=[clock])
            trainer.fit(module, DataLoader(data, batch_size=1))
            seconds = statistics.median(clock.seconds)
            if name == "muon":
                sharded = [state.sharded for state in strategy.require_engine().optimizers]
                shapes = [m.shape for each in sharded for m in each.owner.members]
                sent = sum(each.owner.bytes_sent for each in sharded)
            del trainer, module, strategy
            gc.collect()
        if counts:
            times[name].append(seconds)
    return times, sent, sum(torch.Size(shape).numel() for shape in shapes)


def compare(times: dict[str, list[float]], ranks: int) -> dict[str, Any]:
    """Median seconds of all, and the quartiles over rounds of what Muon adds over the iterations' share of a rank."""
    rounds = zip(*(times[name] for name in CONTENDERS), strict=True)
    low, middle, high = quartiles([(muon - adamw) / (alone / ranks) for adamw, muon, alone in rounds])
    medians = {f"{name}_s": round(statistics.median(seconds), 5) for name, seconds in times.items()}
    return {**medians, "ratio": middle, "ratio_q1": low, "ratio_q3": high}


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=8, rounds_help="Trainers per contender")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=6, help="steps per Trainer")
    parser.add_argument("--block", type=int, default=64, help="tokens per sequence; one per rank and step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    options = {k: v for k, v in vars(args).items() if k != "record"}
    results = {}
    for dtype in DTYPES:
        of_run = {**options, "dtype": dtype}
        by_rank = spawn(run_rank, args.ranks, of_run, timeout_s=3600, init_process_group=False)
        times, sent, numel = by_rank[0]
        times["iterations"] = [max(of) for of in zip(*(each[0]["iterations"] for each in by_rank), strict=True)]
        row = {**compare(times, args.ranks), "elements": numel, "bytes_per_element": round(sent / numel, 3)}
        print(dtype, row)
        results[f"stage {args.stage}, {dtype}"] = row
    record.write(args.record, {**record.header("muon_step"), **options, "results": results})


if __name__ == "__main__":
    main()
