"""Resident memory per parameter with every state in host memory: ``zero3_offload`` on one process, ``bf16-true``.

``python -m benchmarks.host_memory --blocks 96 --record benchmarks/records/host_memory.json``

Each case has a process of its own. A tiny model is trained first, so that libraries, compiled operations and thread
pools are there; then many equal blocks, built on meta, so that gathered units and gradients on their way are a small
share. Reported per parameter, above what the process had before: its resident memory between two steps (``VmRSS``),
the most it ever had since (``VmHWM``), both from ``/proc``, and what the engine and the plan say they hold.

Then ``zero3_nvme`` in a memory cgroup of 256 MiB, at three sizes: what is resident must not grow with the model.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from benchmarks.record import ROOT
from ls_strategy.autoload import ALIASES
from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.plan import Plan
from tests.trainers import bare_trainer, quiet

MINUTES = 5
SPREAD = "unknown: one process of each case"
SEEDS = "none set: memory does not depend on the values"
QUICK = ("--blocks", "4", "--width", "128", "--drive-width", "128", "--moments", "fp32")

LIMITS: dict[tuple[Any, str], float] = {
    (True, "fp32"): 14.5,
    (True, "bf16"): 10.5,
    (True, "int8"): 8.5,
    ("24", "int8"): 7.5,
}
"""Bytes per parameter, by ``precision.master_weights`` and ``precision.moments``: masters 4, or of 24 bits with the
weights 3, moments 8, 4 or 2.03, gradients 2, and 0.5 for what is gathered and on its way."""

CGROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Case:
    moments: str
    clip: bool
    strategy: str = "zero3_offload"
    blocks: int = 96
    width: int = 1024
    steps: int = 6
    master_weights: Any = True
    nvme_path: str = ""  # folder of the NVMe tier, for a strategy that has one
    # The kernel refuses more than this (without a cgroup, twice this) above what there is after the tiny model.
    allowed_bytes: int = 0
    cgroup: str = ""  # the memory cgroup (version 1) that enforces it; without one the data segment's limit does


def status(field: str) -> int:
    """A field of ``/proc/self/status``, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Block(nn.Module):
    """A unit of about ``4 * width**2`` parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        return x + self.down(nn.functional.relu(self.up(self.norm(x))))


class Model(pl.LightningModule):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.shape = (blocks, width)

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            blocks, width = self.shape
            self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Scale(pl.Callback):
    """Weighs the process between two steps, when nothing is under way."""

    def __init__(self) -> None:
        self.rss: list[int] = []
        self.held: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for flat in trainer.strategy.require_engine().flats:
            flat.wait_updated()
        self.rss.append(status("VmRSS"))
        self.held = trainer.strategy.memory_bytes()


def fit(case: Case, blocks: int, width: int, steps: int) -> tuple[Scale, Plan]:
    """One Trainer; what it weighed, and the engine's plan."""
    options: dict[str, Any] = {**ALIASES[case.strategy], "precision.moments": case.moments}
    options["precision.master_weights"] = case.master_weights
    if case.nvme_path:
        options["offload.nvme_path"] = case.nvme_path
    scale = Scale()
    strategy = ZeROStrategy(**nested(options))
    trainer = bare_trainer(
        strategy,
        precision="bf16-true",
        max_steps=steps,
        gradient_clip_val=1.0 if case.clip else None,
        callbacks=[scale],
    )
    trainer.fit(Model(blocks, width), DataLoader(TensorDataset(torch.randn(steps * 8, width)), batch_size=8))
    return scale, strategy.require_engine().plan


def confine(group: str, allowed_bytes: int) -> None:
    """Put this process under a limit from here on, by a cgroup or else by RLIMIT_DATA; its peak counts anew."""
    if group:
        # What is there already stays charged to the group that it was made in: the limit is for what is to come.
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    elif allowed_bytes:
        # Stacks of threads and heaps that nobody touched count here too, and come to as much again.
        limit = status("VmData") + 2 * allowed_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again here


def weigh(case: Case) -> dict[str, Any]:
    """Train in this process, and say what it takes. Bytes, and bytes per parameter."""
    quiet()
    torch.set_num_threads(1)
    fit(case, 2, 256, 3)
    gc.collect()
    before = status("VmRSS")
    confine(case.cgroup, case.allowed_bytes)
    scale, plan = fit(case, case.blocks, case.width, case.steps)
    steady = statistics.median(scale.rss[2:]) - before
    peak = status("VmHWM") - before
    return {
        **asdict(case),
        "parameters": plan.numel,
        "unit_parameters": plan.units[-1].numel,
        "before_bytes": before,
        "resident_bytes": int(steady),
        "peak_bytes": peak,
        "resident_per_parameter": round(steady / plan.numel, 3),
        "peak_per_parameter": round(peak / plan.numel, 3),
        "resident_by_step": [round((r - before) / plan.numel, 3) for r in scale.rss],
        "engine_per_parameter": {k: round(v / plan.numel, 3) for k, v in scale.held.items()},
        "plan_per_parameter": {
            tier: round(sum(kinds.values()) / plan.numel, 3) for tier, kinds in plan.bytes_by_tier().items()
        },
    }


def measure(case: Case, *, timeout_s: float = 600) -> dict[str, Any]:
    """`weigh` in a process of its own."""
    names = ("WORLD_SIZE", "LOCAL_RANK", "RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    variables = {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host_memory", "--one", json.dumps(asdict(case))],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{case} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[str]:
    """A memory cgroup of version 1 with this limit, page cache included; its path.

    Raises:
        OSError: there is no such controller here, or this user may not use it.
    """
    group = CGROUPS / f"ls_strategy_{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(limit_bytes))
        yield str(group)
    finally:
        for _ in range(50):  # the kernel needs a moment to see that its process has ended
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def limited(case: Case) -> dict[str, Any]:
    """`measure` under ``case.allowed_bytes``; ``limit`` in the result says what enforced it."""
    with contextlib.ExitStack() as stack:
        path, limit = "", "RLIMIT_DATA"
        with contextlib.suppress(OSError):
            path, limit = stack.enter_context(cgroup(case.allowed_bytes)), "memory cgroup"
        result = measure(replace(case, cgroup=path))
        if path:
            result["charged_bytes"] = int((Path(path) / "memory.max_usage_in_bytes").read_text())
    return {**result, "cgroup": "", "limited_by": limit}


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--blocks", type=int, default=96, help="equal units")
    parser.add_argument("--width", type=int, default=1024, help="a block has about 4 width**2 parameters")
    parser.add_argument("--moments", nargs="+", default=["fp32", "bf16", "int8"], choices=["fp32", "bf16", "int8"])
    parser.add_argument("--drive-width", type=int, default=768, help="width in the runs on a drive")
    parser.add_argument("--allowed-mib", type=int, default=256, help="of the runs on a drive")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(weigh(Case(**json.loads(args.one)))))
        return
    results = []
    print(f"{'masters':8}{'moments':8}{'clip':>6}{'resident':>10}{'peak':>8}{'limit':>8}   bytes per parameter")
    for (masters, moments), limit in LIMITS.items():
        for clip in (False, True) if moments in args.moments else ():
            result = measure(Case(moments, clip, blocks=args.blocks, width=args.width, master_weights=masters))
            results.append({**result, "limit": limit})
            print(
                f"{masters!s:8}{moments:8}{clip!s:>6}{result['resident_per_parameter']:>10.2f}"
                f"{result['peak_per_parameter']:>8.2f}{limit:>8}   {result['engine_per_parameter']}",
                flush=True,
            )
    on_drive = []
    print(f"\n{'parameters':>12}{'clip':>7}{'states':>9}{'resident':>10}{'peak':>7}{'allowed':>9}   MiB")
    for blocks in (args.blocks // 4, args.blocks // 2, args.blocks):
        for clip in (False, True):
            allowed = args.allowed_mib << 20
            with tempfile.TemporaryDirectory(dir=ROOT) as folder:
                case = Case(
                    "fp32", clip, "zero3_nvme", blocks, args.drive_width, nvme_path=folder, allowed_bytes=allowed
                )
                result = {**limited(case), "nvme_path": ""}
            result["states_bytes"] = result["parameters"] * (18 if clip else 14)
            on_drive.append(result)
            sizes = [result[f"{kind}_bytes"] >> 20 for kind in ("states", "resident", "peak", "allowed")]
            print(
                f"{result['parameters']:>12,}{clip!s:>7}{sizes[0]:>9}{sizes[1]:>10}{sizes[2]:>7}{sizes[3]:>9}"
                f"   {result['limited_by']}",
                flush=True,
            )
    record.write(args.record, {**record.header("host_memory"), "results": results, "on_drive": on_drive})


if __name__ == "__main__":
    main()
