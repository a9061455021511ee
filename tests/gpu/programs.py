"""Whole fits, and parts driven directly, that the tests compare with each other on one device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from ls_strategy.extras.callbacks import Monitor
from ls_strategy.moe.feed_forward import FeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.moe.losses import moe_losses
from ls_strategy.zero.step import fused_updater
from tests import models
from tests.gpu.communicator import through_communicator
from tests.gpu.watch import LATE, HostWaits
from tests.models import Case, Result, SaveOnce
from tests.simulated_device.device import NAME
from tests.simulated_device.programs import FITS, Stack, activations, fit, saved, saved_through_device, streamed

# against DDP ---------------------------------------------------------------------------------------------------------


def train(device: torch.device, case: Case) -> Result:
    """Train a case of `tests.models`; a stage as if there were other ranks."""
    with nullcontext() if case.stage is None else through_communicator():
        return models.run(0, 1, replace(case, device=device.type))


def train_alone(device: torch.device, case: Case) -> Result:
    """The same as a user has it: one rank shards nothing."""
    return models.run(0, 1, replace(case, device=device.type))


CLIPS: dict[str, dict[str, Any]] = {"no clipping": {}, "clipped": {"clip": "norm", "clip_at": 0.05}}
"""Norms of these models are 0.1 to 1."""
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")


def case_of(precision: str, clip: str, stage: int | None = None, steps: int = 20) -> Case:
    """Return a fit; under autocast Lightning refuses to clip with torch's fused kernel, so nobody asks for it."""
    fused = None if "mixed" in precision else True
    return Case(stage, precision=precision, steps=steps, fused=fused, **CLIPS[clip])


# offload -------------------------------------------------------------------------------------------------------------

OFFLOADS = {
    f"{tier}, step on {step_on}, {'overlap' if overlap else 'no overlap'}, {moments}": {
        "stage": 2,
        "offload": {"optimizer": tier, "step_on": step_on},
        "sharding": {"overlap_step": overlap},
        "precision": {"moments": moments},
    }
    for tier in ("cpu", "nvme")
    for step_on in ("cpu", "device")
    for overlap in (True, False)
    for moments in ("fp32", "bf16", "int8")
}


def fitted(
    device: torch.device,
    options: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    habit: str = "",
    late: str | None = None,
    sleep: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Train with our updates everywhere, since torch's round differently. ``late``: a key of `LATE`."""
    with ExitStack() as stack:
        if device.type == NAME:  # where they are not compiled, but have a reference
            stack.enter_context(mock.patch.object(fused_updater, "native_available", return_value=True))
        if late is not None:
            stack.enter_context(LATE[late](*(() if sleep is None else (sleep,))))
        found = fit(device, options, trainer, habit, fused=None)
    return {"losses": found["losses"], "weights": found["weights"]}


def resident(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without offload: a run that must end with the same bits."""
    return {key: value for key, value in options.items() if key not in ("offload", "activations")}


TIERED = {
    name: arguments
    for name, arguments in FITS.items()
    if arguments[0] != resident(arguments[0]) and "delay_after" not in str(arguments[0])
}
"""Fits of the simulated device that offload something, without those whose numbers change with it."""

RECOMPUTED: dict[str, tuple[Any, ...]] = {
    "full recompute": ({"stage": 2, "activations": {"checkpointing": {"policy": "full"}}}, {}),
    "selective recompute": ({"stage": 2, "activations": {"checkpointing": {"policy": "selective"}}}, {}),
    "full recompute, all on cpu": (
        {"stage": 3, "offload": FITS["stage 3, all on cpu"][0]["offload"], "activations": "full"},
        {},
    ),
    "full recompute, inputs on cpu": (
        {"stage": 2, "activations": {"checkpointing": {"policy": "full"}, **activations("cpu")["activations"]}},
        {},
    ),
}


def offload_programs(late: str | None) -> dict[str, tuple[Any, ...]]:
    """Return all fits with offload, and those without that they are compared with."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, options in OFFLOADS.items():
        found[name] = (fitted, options, {}, "", late)
    for name, (options, *rest) in {**TIERED, **RECOMPUTED}.items():
        found[name] = (fitted, options, *(rest if len(rest) == 2 else [*rest, ""]), late)
    return found


def trusted(program: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the fit that one of `offload_programs` must equal: everything on the device, no stream late."""
    function, options, trainer, habit, _ = program
    return (function, resident(options), trainer, habit, None)


# features ------------------------------------------------------------------------------------------------------------


class Metered(Stack):
    """Makes tensors on ``self.device``, and measures with a metric that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.seen: list[str] = []
        self.mean = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * torch.ones((), device=self.device)
        self.metric.update(loss.detach())
        self.seen += [self.device.type, self.metric.mean_value.device.type]
        self.log("loss", self.metric, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.mean = float(self.metric.compute())


def metered(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Train with a metric. Return its value, the losses, and whether the module and it were on the device."""
    model = Metered()
    found = fit(device, options, module=model)
    return {"on device": set(model.seen) == {device.type}, "mean": model.mean, "losses": found["losses"]}


class Sparse(Stack):
    """Experts behind every block."""

    def __init__(self) -> None:
        super().__init__(2)
        for block in self.blocks:
            layer = MoE(64, lambda: FeedForward(64, 32), 4, k=2, drop_tokens=False, second_expert_sampling=False)
            block.down = nn.Sequential(layer, nn.Linear(64, 16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + moe_losses(self)


def sparse(device: torch.device, options: dict[str, Any] | None, precision: str = "32-true") -> dict[str, Any]:
    """Train a mixture of experts; without options by a plain Trainer."""
    with nullcontext() if options is None else through_communicator():
        # A distributed sampler would shuffle, unlike a plain Trainer.
        trainer = {"precision": precision, "max_steps": 10, "use_distributed_sampler": False}
        found = fit(device, options, trainer, module=Sparse())
    return {"losses": found["losses"], "weights": found["weights"]}


def streamed_or_not(device: torch.device, tier: str | None) -> Tensor:
    """Run the model of `streamed` from a tier, or without."""
    if tier is not None:
        return streamed(device, tier)
    with torch.no_grad():
        model = Stack(6).eval().to(device)
        x = torch.linspace(-1, 1, 12).view(3, 4)
        return torch.cat([model((x * scale).to(device)).cpu() for scale in (1.0, 2.0, 3.0)])


def monitored(device: torch.device, options: dict[str, Any]) -> dict[str, float]:
    """Train with `Monitor`. Return the last value of everything that it has logged."""
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder:
        trainer = {"callbacks": [Monitor()], "logger": CSVLogger(folder), "log_every_n_steps": 4, "max_steps": 8}
        fit(device, options, trainer)
        (path,) = Path(folder).rglob("metrics.csv")
        names, *rows = [line.split(",") for line in path.read_text().splitlines()]
        return {name: float(value) for row in rows for name, value in zip(names, row, strict=True) if value}


ON_HOST = {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu"}}
SAVED: dict[str, tuple[Any, ...]] = {
    "saved, stage 2": (saved, 2),
    "saved, stage 3": (saved, 3),
    "saved, stage 2, cpu, step on device": (saved_through_device,),
}
METERED: dict[str, tuple[Any, ...]] = {
    "metered": (metered, {"stage": 2}),
    "metered, offload": (metered, ON_HOST),
}
SPARSE: dict[str, tuple[Any, ...]] = {
    "experts": (sparse, None),
    "experts, stage 0": (sparse, {"stage": 0}),
    "experts, stage 3": (sparse, {"stage": 3}),
    "experts, bf16": (sparse, {"stage": 3}, "bf16-true"),
}
STREAMED: dict[str, tuple[Any, ...]] = {
    "streamed from cpu": (streamed_or_not, "cpu"),
    "streamed from nvme": (streamed_or_not, "nvme"),
    "not streamed": (streamed_or_not, None),
}
MONITORED: dict[str, tuple[Any, ...]] = {
    "monitored": (monitored, {"stage": 2}),
    "monitored, offload": (monitored, ON_HOST),
}
FEATURES = {**SAVED, **METERED, **SPARSE, **STREAMED, **MONITORED}

# memory and waits ----------------------------------------------------------------------------------------------------

ALL_ON_HOST = {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "cpu"}


WAITING: dict[str, tuple[dict[str, Any], str, int]] = {
    "stage 2": ({"stage": 2}, "32-true", 0),
    "stage 3, fp16": ({"stage": 3}, "16-true", 1),
    "stage 2, cpu, step on device": ({"stage": 2, "offload": {"optimizer": "cpu", "step_on": "device"}}, "32-true", 1),
    "stage 3, all on cpu, fp16": ({"stage": 3, "offload": ALL_ON_HOST}, "16-true", 1),
}
"""Options, precision, and how often a step may wait for the device: for the scale of the loss, or the clip factor."""


class Reading(Stack):
    """Waits for every loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


def waits(
    device: torch.device,
    options: dict[str, Any] | None,
    precision: str,
    reads: bool = False,
    set_mode: Callable[[str], None] | None = None,
) -> dict[str, int]:
    """Train nine steps, clipped. Return how often the third to the eighth have waited for the device, by line."""
    watch = HostWaits(set_mode=set_mode)
    trainer: dict[str, Any] = {"precision": precision, "max_steps": 9, "gradient_clip_val": 0.1, "callbacks": [watch]}
    with nullcontext() if options is None else through_communicator():
        fit(device, options, trainer, module=Reading(6) if reads else Stack(6))
    return dict(watch.lines)


def waiting_programs(set_mode: Callable[[str], None] | None = None) -> dict[str, tuple[Any, ...]]:
    """Return all that counts waits."""
    found: dict[str, tuple[Any, ...]] = {
        name: (waits, options, precision, False, set_mode) for name, (options, precision, _) in WAITING.items()
    }
    for precision in ("32-true", "16-true"):
        found[f"plain, {precision}"] = (waits, None, precision, False, set_mode)
    found["reading"] = (waits, None, "32-true", True, set_mode)
    return found


def write_checkpoints(device: torch.device) -> dict[str, Any]:
    """Train stage 3 through the communicator; save as a folder and as a file, and resume from both.

    Returns:
        weights at the end, and of the runs that were resumed; which collectives were sent.
    """
    ends: dict[str, Any] = {}
    sent: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder:
        for form in ("sharded", "file"):
            path = f"{folder}/{form}.ckpt"
            options = {"stage": 3, "checkpoint": form}
            with through_communicator() as made:
                ends[form] = fit(device, options, {"callbacks": [SaveOnce(path)]})["weights"]
                ends[f"{form}, resumed"] = fit(device, options, resume=path)["weights"]
            ends[f"{form}, exists"] = "folder" if Path(path).is_dir() else "file"
            sent |= {kind for each in made for kind in each.traffic.bytes}
    return {**ends, "sent": sent}
