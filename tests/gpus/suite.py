"""What ``python -m pytest -m gpus`` runs on several GPUs, as functions of the kind of device and the number of ranks.

They know the device only by its argument, so `tests.dist.test_gpus_suite` runs them in small over gloo: a wrong name or
option is found there. What only GPUs show is left to the suite: NCCL, its streams, its order of sums, and memory.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.distributed import buffer_pool
from ls_strategy.ops import _build
from ls_strategy.testing import free_port, spawn, torchrun_env
from tests import models
from tests.dist import parallel_runs
from tests.dist.parallel_runs import Module, Outcome, Run
from tests.dist.test_planner import Begin
from tests.gpu import memory
from tests.gpu.memory import SHARDED
from tests.gpu.run import ENVIRONMENT
from tests.live_bytes import LiveBytes
from tests.models import Case, PrivateNet, Result, loader, quiet, trainer_of

ROOT = Path(__file__).parents[2]
STAGES = (0, 1, 2, 3)
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
NORM = {"clip": "norm", "clip_at": 0.05}
TIMEOUT_S = 300

# stages, against DDP -------------------------------------------------------------------------------------------------


def case_of(device: str, precision: str, steps: int = 20, **more: Any) -> Case:
    """Return a fit; under autocast Lightning refuses to clip with torch's fused kernel, so nobody asks for it."""
    return Case(steps=steps, precision=precision, device=device, fused=None if "mixed" in precision else True, **more)


def trained(ranks: int, cases: list[Case]) -> list[tuple[Result, ...]]:
    """Train one case after the other; return the results of all ranks for each."""
    of_ranks = spawn(models.run_all, ranks, cases, init_process_group=False, timeout_s=TIMEOUT_S, env={**ENVIRONMENT})
    return list(zip(*of_ranks, strict=True))


def stages_of(ranks: int, case: Case, stages: tuple[int, ...] = STAGES) -> dict[int | None, tuple[Result, ...]]:
    """Train a case under DDP (None) and at stages."""
    names = (None, *stages)
    return dict(zip(names, trained(ranks, [case.at(stage) for stage in names]), strict=True))


# kernels -------------------------------------------------------------------------------------------------------------

WITH_KERNELS: dict[str, dict[str, Any]] = {
    "16-bit parameters": {"precision": "bf16-true"},
    "scaled losses": {"precision": "16-mixed"},
    "states in 8 bits": {"precision": "32-true", "options": (("precision.moments", "int8"),)},
}
"""Fits with clipping in which the norm has a kernel, and the update or what it stores."""


def kernels_on_or_off(rank: int, world_size: int, cases: list[Case]) -> tuple[list[Result], str]:
    """Train; return the results, and where the norms and updates of these devices were computed."""
    results = models.run_all(rank, world_size, cases)
    return results, _build.status()[cases[0].device].split(":")[0]


def on_and_off(ranks: int, cases: list[Case]) -> list[tuple[list[Result], str]]:
    """Train with kernels and with ``LS_STRATEGY_OPS=0``; return what `kernels_on_or_off` does, of rank 0."""
    return [
        spawn(
            kernels_on_or_off, ranks, cases, init_process_group=False, timeout_s=TIMEOUT_S,
            env={**ENVIRONMENT, "LS_STRATEGY_OPS": mode},
        )[0]
        for mode in ("1", "0")
    ]  # fmt: skip


# kinds of parallelism, against one device ----------------------------------------------------------------------------


class Starved(Module):
    """Sends every token of its first batch to one expert, so that other ranks' experts have none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            batch = tuple(torch.zeros_like(each) for each in batch)  # one token, again and again: one choice
        return super().training_step(batch, batch_idx)


@dataclass(frozen=True)
class Layout:
    """A run of the small GPT on so many ranks, and how far from the trusted one it may be."""

    ranks: int
    run: Run
    kind: type[Module] = Module
    trusted_ranks: int = 1
    """Ranks of the trusted run. Experts count the tokens of a rank, so theirs is DDP on as many."""

    bound: float = 1e-5
    """Of losses, norms and weights, relative: products of other shapes sum in another order on a GPU."""


EXPERTS = {"num_experts": 4, "k": 2, "drop_tokens": False, "balance_loss": 0.0, "second_expert_sampling": False}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v")
ROUNDED = 0.05
"""What is quantized on the wire is other numbers: the losses stay close."""


def _on(ranks: int, options: dict[str, Any], shape: dict[str, Any] | None = None, **more: Any) -> Layout:
    run = Run(options, shape or {}, steps=8, batch=8, trainer={"gradient_clip_val": 0.3})
    return Layout(ranks, replace(run, experts=more.pop("experts", None)), **more)


def _pipeline(schedule: str) -> dict[str, Any]:
    return {
        "stage": 1,
        "parallel.pipeline.size": 2,
        "parallel.pipeline.micro_batches": 4,
        "parallel.pipeline.schedule": schedule,
    }


LAYOUTS: dict[str, Layout] = {
    "uneven shards": _on(2, {"stage": 3}, {"width": 40}),
    "replica groups": _on(4, {"stage": 3, "sharding.shard_size": 2}),
    "copy per node": _on(4, {"stage": 3, "sharding.hpz": 2}),
    "quantized gathers": _on(2, {"stage": 3, "sharding.quantized_gathers": "int8"}, bound=ROUNDED),
    "quantized gradients": _on(2, {"stage": 2, "sharding.quantized_gradients": "int8"}, bound=ROUNDED),
    "tensor": _on(2, {"stage": 2, "parallel.tensor.size": 2}),
    "tensor, sequence": _on(2, {"stage": 3, "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}),
    **{f"pipeline, {each}": _on(2, _pipeline(each), {"num_layers": 4}) for each in SCHEDULES},
    "exchanged heads": _on(2, {"stage": 3, "parallel.context": 2}),
    "rings": _on(2, {"stage": 3, "parallel.context": 2, "parallel.ring": 2}),
    "experts": _on(2, {"stage": 3, "parallel.expert": 2}, experts=EXPERTS, trusted_ranks=2),
    "experts without tokens": _on(
        2, {"stage": 2, "parallel.expert": 2}, experts={**EXPERTS, "k": 1}, trusted_ranks=2, kind=Starved
    ),
    "tensor 2, pipeline 2, data 2": _on(8, {**_pipeline("1f1b"), "parallel.tensor.size": 2}),
    "states on the host": _on(2, {"stage": 2, "offload.optimizer": "cpu"}),
    "all on the host": _on(2, {"stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}),
    "states on a drive": _on(2, {"stage": 2, "offload.optimizer": "nvme", "offload.nvme_allow_ram": True}),
}


def outcomes(layout: Layout, device: str, folder: Path) -> tuple[Outcome, Outcome]:
    """Return the trusted run and this package's, on rank 0."""
    options = dict(layout.run.options or {})
    if options.get("offload.optimizer") == "nvme":
        options["offload.nvme_path"] = str(folder)
    trainer = {**layout.run.trainer, "accelerator": device}
    run = replace(layout.run, options=options, trainer=trainer)
    trusted = replace(run, options=None)
    both = []
    for ranks, each in ((layout.trusted_ranks, trusted), (layout.ranks, run)):
        arguments = (parallel_runs.train, ranks, each, layout.kind)
        both.append(spawn(*arguments, init_process_group=False, timeout_s=TIMEOUT_S, env={**ENVIRONMENT})[0])
    return both[0], both[1]


def too_far(layout: Layout, device: str, folder: Path) -> list[str]:
    """Return what differs from the trusted run by more than it may."""
    trusted, ours = outcomes(layout, device, folder)
    found = parallel_runs.differences(trusted, ours)
    if layout.bound == ROUNDED:
        found = {"losses": found["losses"]}
    return [f"{kind} differ by {value:.3g}" for kind, value in found.items() if not value <= layout.bound]


# files ---------------------------------------------------------------------------------------------------------------

HALF = 4


def saved_and_resumed(device: str, ranks: int, fewer: int, folder: Path) -> tuple[Outcome, Outcome]:
    """Return a run on ``ranks`` ranks, and the same one that goes on on ``fewer`` after `HALF` of its steps."""
    path = str(folder / "half.ckpt")
    trainer = {"accelerator": device}
    run = Run({"stage": 3, "checkpoint": "sharded"}, steps=2 * HALF, batch=8, trainer=trainer, save=(HALF, path))
    (whole, *_) = spawn(parallel_runs.train, ranks, run, init_process_group=False, timeout_s=TIMEOUT_S)
    again = replace(run, save=None, resume=path)
    (resumed, *_) = spawn(parallel_runs.train, fewer, again, init_process_group=False, timeout_s=TIMEOUT_S)
    resumed.losses = whole.losses[:HALF] + resumed.losses
    resumed.norms = whole.norms[:HALF] + resumed.norms
    return whole, resumed


# failures ------------------------------------------------------------------------------------------------------------

FAILURES = ("raises", "dies", "leaves a block out")


class Failing(Module):
    """Fails on its last rank, in its third step."""

    failure = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == self.trainer.world_size - 1:
            print("failing", flush=True)
            if self.failure == "raises":
                raise ValueError("a bad sample")
            if self.failure == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            vars(self.model)["blocks"] = list(self.model.blocks)[:1]  # what forward finds before the module's own
        return super().training_step(batch, batch_idx)


def fail(rank: int, world_size: int, device: str, failure: str) -> None:
    """Train until it fails; the program of a rank."""
    kind = type("FailingHere", (Failing,), {"failure": failure})
    # A block behind is gathered ahead, so that leaving out just one would go unnoticed.
    shape = {"num_layers": 6}
    run = Run({"stage": 3, "explain_waits_after": 2.0}, shape, steps=8, batch=8, trainer={"accelerator": device})
    parallel_runs.train(rank, world_size, run, kind)


def ended(device: str, ranks: int, failure: str, limit_s: float) -> dict[str, Any]:
    """Start a process per rank that does not know of the others' ends, as a scheduler does.

    Returns:
        ``seconds`` from the failure to the end of the last rank (at most ``limit_s``; then those that are left are
        killed), and ``statuses``, the exit status of each rank; None for a killed one.
    """
    port = free_port()
    program = "import sys; from tests.gpus.suite import fail; fail(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])"
    processes = []
    for rank in range(ranks):
        env = {**os.environ, **ENVIRONMENT, **torchrun_env(rank, ranks, port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", program, str(rank), str(ranks), device, failure]
        processes.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
    output = processes[-1].stdout
    assert output is not None
    try:
        for line in output:
            if b"failing" in line:
                break
        started = time.monotonic()
        for process in processes:
            process.wait(max(0.1, started + limit_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    statuses = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.communicate()
    return {"seconds": time.monotonic() - started, "statuses": statuses}


# memory, against the plan --------------------------------------------------------------------------------------------


def peaks(rank: int, world_size: int, device: str, width: int) -> dict[str, int]:
    """Train `SHARDED`. Return the bytes of tensors of this rank's device at the peak of the steps; on CPUs, of all."""
    quiet()
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.empty(1, device="cuda")  # its allocator can be asked from now on
    here, found = torch.device("cuda", rank) if device == "cuda" else torch.device(device), dict[str, int]()
    for name in SHARDED:
        for case_width in (16, width):  # the first one makes what libraries keep: workspaces, contexts
            case = replace(memory.case_of(name, width, device), width=case_width)
            found[name] = _peak(case, world_size, here)
    return found


def _peak(case: Case, world_size: int, device: torch.device) -> int:
    gc.collect()
    data: Any = loader(case, world_size)
    # What waits for its copy to the host is bounded, but not part of the plan: here it is one buffer.
    with mock.patch.object(buffer_pool, "LATE_BYTES", 0):
        if device.type == "cpu":
            with LiveBytes(ignore=list(data.dataset.tensors)) as live:
                trainer_of(case, world_size, callbacks=[Begin(live)]).fit(PrivateNet(case), data)
            return live.peak
        before, peak = dev.allocated_bytes(device), memory.Peak(device)
        trainer_of(case, world_size, callbacks=[peak]).fit(PrivateNet(case), data)
        return peak.nbytes - before


# cost ----------------------------------------------------------------------------------------------------------------


def allocator(rank: int, world_size: int, case: Case) -> dict[str, float]:
    """Train; return how often the device's allocator had to free and ask again, and the bytes at the peak."""
    torch.cuda.set_device(rank)
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    models.run(rank, world_size, case)
    after = torch.cuda.memory_stats()
    retries = after["num_alloc_retries"] - before.get("num_alloc_retries", 0)
    return {"retries": retries, "peak": after["active_bytes.all.peak"]}
