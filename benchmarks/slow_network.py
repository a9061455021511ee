"""Step time of whole Trainers on two nodes with a slow link: stage 3 in full against fewer bytes between nodes.

``python -m benchmarks.slow_network --record benchmarks/records/slow_network.json``

The nodes are network namespaces of this host, joined by a link whose rate is limited in each direction
(`tests.two_nodes`), so this needs root. All ranks share the cores of this host; connections inside a node are not
limited. Every round runs one Trainer per contender in the same processes, in another order than the round before, and
takes the median of its later steps. The kernel counts what crosses the link, and the planner says what should.

Where DeepSpeed is installed (the ``bench`` extra), its rounds follow over the same link, see `deepspeed_steps`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import statistics
import sys
import time
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from benchmarks import deepspeed_steps, record
from benchmarks.contest import quartiles, ratios, turns
from benchmarks.language import random_tokens
from benchmarks.step_time import SIZES
from benchmarks.trainer_time import module_of
from ls_strategy.extras.planner.traffic import traffic
from ls_strategy.lightning.strategy import ZeROStrategy
from tests import two_nodes
from tests.trainers import bare_trainer, quiet

MINUTES = 15
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--size", "1M", "--rounds", "1", "--steps", "4", "--block", "16")

BASELINE = "stage 3"
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    BASELINE: {},
    "hpZ": {"hpz": "node"},
    "qwZ + hpZ + qgZ, int8": {"hpz": "node", "quantized_gathers": "int8", "quantized_gradients": "int8"},
    "qwZ + hpZ + qgZ, int8 and int4": {"hpz": "node", "quantized_gathers": "int8", "quantized_gradients": "int4"},
    "shard_size": {"shard_size": "node"},
    "shard_size + qgZ, int8": {"shard_size": "node", "quantized_gradients": "int8"},
}
"""Options of ``sharding`` at stage 3."""

UNCOUNTED = 2  # steps of a Trainer that allocate
MOST_OFF = 0.02
"""How far the last loss may be from the baseline's, relative to it: rounding changes it, and a mistake more."""


class Clock(pl.Callback):
    """Seconds from one batch's end to the next's, and bytes that have crossed the link in these steps."""

    def __init__(self, steps: int) -> None:
        """Count steps from `UNCOUNTED` to the last."""
        self.seconds: list[float] = []
        self.crossed = 0  # sent by this node
        self._steps, self._last = steps, 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the time, then the bytes, when nothing is in flight."""
        now = time.perf_counter()
        if batch_idx >= UNCOUNTED:
            self.seconds.append(now - self._last)
        if batch_idx in (UNCOUNTED - 1, self._steps - 1):
            trainer.strategy.barrier()
            self.crossed = two_nodes.sent_bytes() - self.crossed
            trainer.strategy.barrier()
        self._last = time.perf_counter()


def predicted(trainer: Any, per_node: int) -> int:
    """Bytes that this rank sends to the other node in a step, by the formula."""
    if isinstance(trainer.strategy, ZeROStrategy):
        return traffic(trainer.strategy.require_engine().plan, (8.0,), node_size=per_node).between_nodes
    # Of DDP's ring, one rank of each node sends to the other node.
    ranks, numel = trainer.world_size, sum(p.numel() for p in trainer.lightning_module.parameters())
    return 2 * (ranks - 1) * numel * 4 // ranks if trainer.local_rank == 0 else 0


def run_rank(rank: int, world_size: int, nodes: tuple[str, str], names: list[str], args: dict[str, Any]) -> Any:
    """Measure on one rank: per contender and round, seconds, bytes counted and predicted, and the last loss."""
    per_node = world_size // 2
    two_nodes.enter(nodes[rank // per_node])
    os.environ.update(two_nodes.environment(rank, per_node))
    quiet()
    steps, batch, block = args["steps"], args["batch"], args["block"]
    data = random_tokens(steps * batch * world_size, block)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for counts, name in turns(names, args["rounds"], uncounted=1):
        options = CONTENDERS[name]
        pl.seed_everything(0, verbose=False)
        module = module_of(name, args["size"], block)
        trainer = bare_trainer(
            "ddp" if options is None else ZeROStrategy(3, sharding=options),
            per_node,
            num_nodes=2,
            max_steps=steps,
            callbacks=[clock := Clock(steps)],
        )
        trainer.fit(module, DataLoader(data, batch_size=batch))
        assert trainer.global_step == steps
        row = {
            "seconds": statistics.median(clock.seconds),
            "crossed": clock.crossed / (steps - UNCOUNTED),
            "predicted": predicted(trainer, per_node),
            "loss": float(trainer.callback_metrics["train/loss"]),
        }
        if counts:
            found[name].append(row)
        if rank == 0:
            print(f"{name:32} {row['seconds']:.3f} s{'' if counts else '  (does not count)'}", flush=True)
        del trainer, module
        gc.collect()
    return found


def measure(args: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Run all, and return per contender its times, how much faster it is than the baseline, and its bytes."""
    from ls_strategy.testing import spawn

    per_node = args["ranks_per_node"]
    names = [name for name, options in CONTENDERS.items() if per_node > 1 or "hpz" not in (options or {})]
    with two_nodes.two_nodes(args["rate"]) as nodes:
        ranks = spawn(run_rank, 2 * per_node, nodes, names, args, timeout_s=3600, init_process_group=False)
        if per_node > 1 and importlib.util.find_spec("deepspeed") is not None:
            peers = deepspeed_steps.rounds_of(nodes, UNCOUNTED, args)
            ranks = [mine | its for mine, its in zip(ranks, peers, strict=True)]
    return {name: _row([rank[name] for rank in ranks], [rank[BASELINE] for rank in ranks]) for name in ranks[0]}


def _row(ranks: list[Any], trusted: list[Any]) -> dict[str, Any]:
    seconds, before = ([run["seconds"] for run in each[0]] for each in (ranks, trusted))
    losses = [statistics.fmean(rank[-1]["loss"] for rank in each) for each in (ranks, trusted)]
    low, middle, high = quartiles(ratios(before, seconds))
    nodes = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    by_node = [sum(rank[0].get("predicted", 0) for rank in node) for node in nodes]
    crossed = [statistics.median(run["crossed"] for run in node[0]) for node in nodes]
    return {
        "median_s": round(statistics.median(seconds), 4),
        "times_faster": {"median": middle, "q1": low, "q3": high},
        "crossed_bytes": round(sum(crossed)),
        "predicted_bytes": sum(by_node) or None,  # there is no formula for DeepSpeed
        "loss": round(losses[0], 5),
        "loss_off": round(losses[0] / losses[1] - 1, 5),
        "seconds": [round(each, 4) for each in seconds],
    }


def check(results: dict[str, dict[str, Any]]) -> None:
    """A time is worth nothing if something else was computed.

    Raises:
        RuntimeError: a contender ended at another loss.
    """
    for name, row in results.items():
        if not abs(row["loss_off"]) <= MOST_OFF:
            raise RuntimeError(f"{name} ended at loss {row['loss']}, {BASELINE} at {results[BASELINE]['loss']}.")


def main() -> None:
    parser = record.parser(__doc__, rounds=5, rounds_help="Trainers per contender")
    parser.add_argument("--rate", default="200mbit", help="of the link in each direction, as tc reads it")
    parser.add_argument("--ranks-per-node", type=int, default=2, choices=(1, 2, 4), help="one leaves hpZ out")
    parser.add_argument("--size", default="10M", choices=sorted(SIZES), help="model size")
    parser.add_argument("--steps", type=int, default=5, help="steps per Trainer")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=32, help="tokens per sequence")
    args = parser.parse_args()
    if args.steps <= UNCOUNTED:
        parser.error(f"--steps {args.steps}: the first {UNCOUNTED} do not count. Give more.")
    try:
        two_nodes.require()
    except two_nodes.TwoNodesError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the nodes are removed
    settings = {k: v for k, v in vars(args).items() if k != "record"}
    results = measure(settings)
    check(results)
    print(f"{'':32}{'s':>8}{'x faster':>10}{'':18}{'MB per step':>12}{'/ formula':>10}{'loss':>8}")
    for name, row in results.items():
        fast, formula = row["times_faster"], row["predicted_bytes"]
        over = f"{row['crossed_bytes'] / formula:.3f}" if formula else ""
        spread = f"[{fast['q1']:.2f}, {fast['q3']:.2f}]"
        print(f"{name:32}{row['median_s']:8.3f}{fast['median']:10.2f}{spread:>18}"
              f"{row['crossed_bytes'] / 1e6:12.1f}{over:>10}{row['loss_off']:+8.4f}")  # fmt: skip
    record.write(args.record, {**record.header("slow_network"), **settings, "baseline": BASELINE, "results": results})


if __name__ == "__main__":
    main()
