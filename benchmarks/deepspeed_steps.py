"""DeepSpeed's steps on two nodes with a slow link, for `benchmarks.slow_network`.

Every turn has processes of its own: DeepSpeed changes the process that it is imported into, and a second engine of a
process gathers less than the first one. Of ZeRO++ only hpZ runs on a CPU: the operations that quantize are CUDA's alone
in DeepSpeed 0.19.8 (``op_builder/cpu/no_impl.py``).
"""

from __future__ import annotations

import logging
import os
import statistics
import time
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DistributedSampler

from benchmarks.contest import turns
from benchmarks.trainer_time import module_of
from ls_strategy.testing import free_port, spawn
from recipes.gpt.model import adamw_with_cosine
from tests import two_nodes

PREFIX = "DeepSpeed, "

RELEASED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
"""Parameters are freed after every use, as those of a model that does not fit."""

KEPT = "stage 3 that keeps weights"


def configurations(per_node: int) -> dict[str, dict[str, Any]]:
    """Return ``zero_optimization`` by contender. By default DeepSpeed keeps models as small as these gathered."""
    return {
        PREFIX + KEPT: {},
        PREFIX + "stage 3": RELEASED,
        PREFIX + "hpZ": {**RELEASED, "zero_hpz_partition_size": per_node},
    }


def rounds_of(nodes: tuple[str, str], uncounted: int, args: dict[str, Any]) -> list[dict[str, list[dict[str, float]]]]:
    """Return what every rank has measured: by contender, one row per counted round."""
    ranks = 2 * args["ranks_per_node"]
    configs = configurations(args["ranks_per_node"])
    found: list[dict[str, list[dict[str, float]]]] = [{name: [] for name in configs} for _ in range(ranks)]
    for counts, name in turns(list(configs), args["rounds"], uncounted=1):
        rows = spawn(run_rank, ranks, nodes, free_port(), configs[name], uncounted, args,
                     timeout_s=600, init_process_group=False)  # fmt: skip
        for mine, row in zip(found, rows, strict=True):
            if counts:
                mine[name].append(row)
        print(f"{name:32} {rows[0]['seconds']:.3f} s{'' if counts else '  (does not count)'}", flush=True)
    return found


def run_rank(
    rank: int, world_size: int, nodes: tuple[str, str], port: int, zero: dict[str, Any], uncounted: int,
    args: dict[str, Any],
) -> dict[str, float]:  # fmt: skip
    """Measure on one rank, with the network, the optimizer and the samples of the recipe's Trainer."""
    per_node = world_size // 2
    two_nodes.enter(nodes[rank // per_node])
    os.environ.update(two_nodes.environment(rank, per_node), MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    import deepspeed  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed("gloo", verbose=False)
    return _train(zero, rank, world_size, uncounted, args)


def _train(zero: dict[str, Any], rank: int, world_size: int, uncounted: int, args: dict[str, Any]) -> dict[str, float]:
    import deepspeed  # pyright: ignore[reportMissingImports]

    steps, batch, block = args["steps"], args["batch"], args["block"]
    tokens = torch.randint(256, (steps * batch * world_size, block + 1), generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(tokens, world_size, rank, seed=0)  # type: ignore[arg-type]  (the Trainer's)
    mine = tokens[list(sampler)].split(batch)
    pl.seed_everything(0, verbose=False)
    module: Any = module_of("", args["size"], block)
    module.configure_model()
    found: Any = adamw_with_cosine(module, replace(module.optim, total_steps=steps))
    engine = deepspeed.initialize(
        model=module.network,
        optimizer=found["optimizer"],
        lr_scheduler=found["lr_scheduler"]["scheduler"],
        config={
            "train_micro_batch_size_per_gpu": batch,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, **zero},
        },
    )[0]
    seconds: list[float] = []
    crossed, loss, last = 0, float("nan"), time.perf_counter()
    for i, rows in enumerate(mine):
        output = functional.cross_entropy(engine(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        engine.backward(output)
        engine.step()
        loss = output.item()
        now = time.perf_counter()
        if i >= uncounted:
            seconds.append(now - last)
        if i in (uncounted - 1, steps - 1):
            dist.barrier()
            crossed = two_nodes.sent_bytes() - crossed
            dist.barrier()
        last = time.perf_counter()
    return {"seconds": statistics.median(seconds), "crossed": crossed / (steps - uncounted), "loss": loss}
