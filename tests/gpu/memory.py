"""What the planner predicts for a GPU, and what a fit takes there."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch

from ls_strategy import device as dev
from ls_strategy.config import RecomputeConfig, ShardingConfig, TierConfig, ZeROConfig
from ls_strategy.distributed import buffer_pool
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import Forecast, Forecaster, Run
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.simulated import simulated
from ls_strategy.extras.planner.step import first_batch, training_step
from ls_strategy.precision import resolve_precision
from tests.gpu.programs import ALL_ON_HOST
from tests.gpu.watch import PinnedBytes
from tests.models import Case, PrivateNet, loader, quiet, trainer_of
from tests.simulated_device.device import BACKEND, NAME, SimulatedAccelerator
from tests.simulated_device.programs import wide

CPU = TierConfig(tier="cpu")
FULL = RecomputeConfig(policy="full")
PLANNED: dict[str, tuple[Candidate, str, int]] = {
    "stage 0": (Candidate(0), "32-true", 1),
    "stage 0, bf16": (Candidate(0), "bf16-true", 1),
    "stage 2, cpu": (Candidate(2, CPU), "32-true", 1),
    "stage 2, cpu, bf16": (Candidate(2, CPU), "bf16-true", 1),
    "stage 2, cpu, bf16, accumulation": (Candidate(2, CPU), "bf16-true", 2),
    "stage 3, all on cpu, bf16, recompute": (Candidate(3, CPU, CPU, FULL), "bf16-true", 2),
}
"""Strategy, precision, micro-batches. One rank shards nothing, so without offload there is only stage 0."""

SHARDED: dict[str, tuple[Candidate, str, int]] = {
    "stage 1": (Candidate(1), "32-true", 1),
    "stage 2, bf16": (Candidate(2), "bf16-true", 1),
    "stage 3": (Candidate(3), "32-true", 1),
    "stage 3, bf16, accumulation": (Candidate(3), "bf16-true", 2),
    "stage 3, all on cpu, bf16": (Candidate(3, CPU, CPU), "bf16-true", 1),
}
"""The same, of several ranks."""

BOUND = 0.05
"""Memory equals the formula within 5 %."""


def case_of(name: str, width: int, device: str) -> Case:
    """Return the fit; ``width`` makes the states large next to what an allocator rounds up."""
    candidate, precision, micro_batches = {**PLANNED, **SHARDED}[name]
    options = {k: v for k, v in candidate.arguments().items() if k not in ("stage", "offload")}
    tiers = {"optimizer": candidate.optimizer, "parameters": candidate.parameters}
    options |= {f"offload.{kind}": tier for kind, tier in tiers.items() if tier is not None}
    if candidate.optimizer is not None:
        options["offload.step_on"] = "cpu"  # "auto" would measure, in more memory than this model has
    if device == NAME:
        options["process_group_backend"] = BACKEND
    case = Case(candidate.stage, ("private",), accumulate=micro_batches, precision=precision, fused=None)
    return replace(case, width=width, blocks=6, steps=3, device=device, options=tuple(options.items()))


def forecast(name: str, width: int, ranks: int = 1, device: str = "cuda") -> Forecast:
    """Return what the planner predicts for a device, by default for a GPU. Needs none."""
    candidate, precision_name, micro_batches = {**PLANNED, **SHARDED}[name]
    case = case_of(name, width, "cpu")
    module, precision = PrivateNet(case), resolve_precision(precision_name)
    optimizer = module.configure_optimizers()
    run = Run(config=ZeROConfig(sharding=ShardingConfig(min_unit_numel=0)), micro_batches=micro_batches)
    with simulated(module, precision, (), torch.device("cpu")) as fakes:
        optimizers = [fakes.optimizer(optimizer)]
        forecaster = Forecaster(
            module, optimizers, fakes=fakes, precision=precision, step=training_step(module, optimizers),
            batch=first_batch(loader(case, ranks)), run=run,
        )  # fmt: skip
        return forecaster.forecast(candidate, Hardware(ranks=ranks, device=device))


class Peak(pl.Callback):
    """Measures the steps of a fit, and not its set-up, when the original values are there too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0

    def on_train_start(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        dev.peak_bytes(self.device, reset=True)

    def on_train_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.nbytes = dev.peak_bytes(self.device)


def measured(device: torch.device, name: str, width: int) -> dict[str, int]:
    """Train. Return the bytes of the device at the peak, and those pinned, by us and by torch."""
    quiet()
    arguments = {"accelerator": SimulatedAccelerator()} if device.type == NAME else {}
    found: dict[str, int] = {}
    for case_width in (16, width):  # the first one makes what libraries keep: workspaces, contexts
        case = replace(case_of(name, width, device.type), width=case_width)
        gc.collect()
        before, peak = dev.allocated_bytes(device), Peak(device)
        # What waits for its copy to the host is bounded, but not part of the plan: here it is one buffer.
        with PinnedBytes() as watch, mock.patch.object(buffer_pool, "LATE_BYTES", 0):
            trainer_of(case, 1, callbacks=[peak], **arguments).fit(PrivateNet(case), loader(case, 1))
        found = {"device": peak.nbytes - before, "registered": watch.registered, "by torch": watch.by_torch}
    return found


def pinned(device: torch.device, options: dict[str, Any]) -> dict[str, int]:
    """Train as `wide`. Return the bytes planned on the host, those of a unit, and what was pinned at the peak."""
    with PinnedBytes() as watch:
        planned, unit = wide(device, options)
    return {"planned": planned, "unit": unit, "registered": watch.registered, "by torch": watch.by_torch}


PINNED: dict[str, tuple[Any, ...]] = {
    "pinned, stage 2": (pinned, {"stage": 2, "offload": {**ALL_ON_HOST, "parameters": None}}),
    "pinned, stage 3": (pinned, {"stage": 3, "offload": ALL_ON_HOST}),
}
SLACK_BYTES = 64 * 4096
"""Pages that are not full."""


def programs(width: int) -> dict[str, tuple[Any, ...]]:
    """Return all of this module."""
    return {**{name: (measured, name, width) for name in PLANNED}, **PINNED}
