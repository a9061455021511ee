"""Step time of this engine against its peers, on the GPT recipe model, interleaved in one run.

``python -m tests.bench.step_time --ranks 2 --sizes 5M 20M --rounds 12 --record tests/bench/records/step_time.json``

Every contender lives in the same processes and takes turns, so that a noisy machine is noisy for all of them; what is
reported is the median of the ratios to DDP, round by round, with their quartiles. DeepSpeed takes part where it is
installed (the ``bench`` extra), FSDP2 always.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SIZES = {
    "5M": {"num_layers": 6, "width": 256, "num_heads": 4},
    "10M": {"num_layers": 8, "width": 320, "num_heads": 5},
    "20M": {"num_layers": 10, "width": 416, "num_heads": 8},
    "30M": {"num_layers": 12, "width": 448, "num_heads": 7},
}
LR = 3e-4
Step = Callable[[Tensor, Tensor], Tensor]


def build_model(size: str, block_size: int) -> nn.Module:
    """The recipe's GPT, byte tokens."""
    from recipes.gpt.network import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=256, block_size=block_size, **SIZES[size]))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Next-token cross entropy."""
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    """The same optimizer for everybody: torch's fused AdamW."""
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1, fused=True)


def plain(model: nn.Module) -> Step:
    """One process, no strategy at all."""
    optimizer = adamw(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp(model: nn.Module) -> Step:
    """torch's DistributedDataParallel, gradients as bucket views."""
    return plain(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))


def fsdp2(model: nn.Module) -> Step:
    """torch's fully_shard, one group per block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain(model)


def ours(stage: int) -> Callable[[nn.Module], Step]:
    """This engine, without Lightning around it, as the others are."""

    def build(model: nn.Module) -> Step:
        from ls_strategy.comm import make_comm
        from ls_strategy.config import ZeROConfig
        from ls_strategy.engine import Engine
        from ls_strategy.mesh import Mesh
        from ls_strategy.precision import resolve_precision

        optimizer = adamw(model.parameters())
        engine = Engine(
            model,
            [optimizer],
            config=ZeROConfig(stage=stage),  # type: ignore[arg-type]
            precision=resolve_precision("32-true"),
            mesh=Mesh.data_only(make_comm()),
            device=torch.device("cpu"),
        )
        engine.schedule.overlap = True

        def step(x: Tensor, y: Tensor) -> Tensor:
            engine.begin_step()
            loss = loss_of(model, x, y)
            engine.end_forward()
            engine.zero_grad(0)
            engine.begin_backward(eager=True)
            loss.backward()
            engine.end_backward()
            engine.step(0, optimizer.step)
            return loss.detach()

        return step

    return build


def deepspeed(stage: int) -> Callable[[nn.Module], Step]:
    """DeepSpeed's engine on its CPU accelerator, the same torch optimizer, clipping off."""

    def build(model: nn.Module) -> Step:
        import deepspeed as ds

        engine, *_ = ds.initialize(
            model=model,
            optimizer=adamw(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 10_000_000},
            },
            dist_init_required=False,
        )

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(engine, x, y)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return build


def contenders(names: list[str]) -> dict[str, Callable[[nn.Module], Step]]:
    """Builders by name."""
    table: dict[str, Callable[[nn.Module], Step]] = {"plain": plain, "ddp": ddp, "fsdp2": fsdp2}
    table |= {f"zero{s}": ours(s) for s in range(4)}
    table |= {f"deepspeed{s}": deepspeed(s) for s in (1, 2, 3)}
    return {n: table[n] for n in names}


def run_rank(rank: int, world_size: int, size: str, names: list[str], rounds: int, batch: int, block: int) -> Any:
    """Measure on one rank; returns seconds per contender and round, and the losses of the last step."""
    torch.set_num_threads(1)
    steps = {n: build(build_model(size, block)) for n, build in contenders(names).items()}
    generator = torch.Generator().manual_seed(rank)
    times: dict[str, list[float]] = {n: [] for n in names}
    losses: dict[str, list[float]] = {n: [] for n in names}
    for round_ in range(rounds + 2):
        tokens = torch.randint(256, (batch, block + 1), generator=generator)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        turn = names[round_ % len(names) :] + names[: round_ % len(names)]
        for n in turn:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            losses[n].append(float(steps[n](x, y)))
            if dist.is_initialized():
                dist.barrier()
            if round_ >= 2:  # the first rounds allocate and build kernels
                times[n].append(time.perf_counter() - start)
    return times, losses, sum(p.numel() for p in build_model(size, block).parameters())


def summarise(times: dict[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Median seconds, and median and quartiles of the ratio to the baseline of the same round."""
    result: dict[str, dict[str, float]] = {}
    for name, seconds in times.items():
        ratios = [s / b for s, b in zip(seconds, times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[name] = {
            "median_s": round(statistics.median(seconds), 4),
            "ratio": round(middle, 3),
            "ratio_q1": round(low, 3),
            "ratio_q3": round(high, 3),
        }
    return result


def environment(module: str = "step_time") -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    versions = {}
    for package in ("torch", "lightning", "deepspeed"):
        if importlib.util.find_spec(package):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": "python -m " + " ".join([f"tests.bench.{module}", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def main() -> None:
    """Parse, measure, print a table, write the record."""
    from ls_strategy.testing import spawn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks on this machine")
    parser.add_argument("--sizes", nargs="+", default=["5M", "20M"], choices=sorted(SIZES), help="model sizes")
    parser.add_argument("--rounds", type=int, default=12, help="counted steps per contender")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--peers", nargs="*", default=None, help="contenders; default: all that are installed")
    parser.add_argument("--record", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    names = args.peers
    if not names:
        names = ["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2"] if args.ranks > 1 else ["plain", "zero1", "zero3"]
        if args.ranks > 1 and importlib.util.find_spec("deepspeed"):
            names += ["deepspeed1", "deepspeed2", "deepspeed3"]
    baseline = "ddp" if "ddp" in names else "plain"
    record: dict[str, Any] = {"benchmark": "step_time", **environment(), "ranks": args.ranks, "results": {}}
    for size in args.sizes:
        times, losses, numel = spawn(
            run_rank, args.ranks, size, names, args.rounds, args.batch, args.block,
            timeout_s=3600, env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}, init_process_group=args.ranks > 1,
        )[0]  # fmt: skip
        table = summarise(times, baseline)
        for name in names:
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[baseline], strict=True))
            table[name]["loss_difference"] = worst
        record["results"][size] = {"parameters": numel, "batch": args.batch, "block": args.block, "contenders": table}
        print(f"\n{size}: {numel:,} parameters, {args.batch} x {args.block} tokens per rank, {args.ranks} ranks")
        print(f"{'':12}{'median s':>10}{'x ' + baseline:>10}{'q1':>8}{'q3':>8}{'loss diff':>12}")
        for name, row in table.items():
            print(
                f"{name:12}{row['median_s']:>10.4f}{row['ratio']:>10.3f}{row['ratio_q1']:>8.3f}{row['ratio_q3']:>8.3f}"
                f"{row['loss_difference']:>12.1e}"
            )
    if args.record is not None:
        args.record.parent.mkdir(parents=True, exist_ok=True)
        args.record.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
