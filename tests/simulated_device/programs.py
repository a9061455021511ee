"""What runs on the simulated device and, for comparison, on the CPU: whole fits, and parts driven directly."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.inference.stream import stream_blocks
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import quiet
from tests.simulated_device.device import BACKEND, SimulatedAccelerator

WIDTH = 16


class Block(nn.Module):
    """A residual block; its activations are larger than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(pl.LightningModule):
    """Blocks between two layers; records the losses."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x).float(), y.float())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def batches(dtype: torch.dtype = torch.float32, count: int = 5) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(4 * count, 4, generator=random)
    return DataLoader(TensorDataset(x.to(dtype), x.sum(1, keepdim=True).to(dtype)), batch_size=4)


def fit(
    device: torch.device, options: dict[str, Any], trainer: dict[str, Any] | None = None, resume: str | None = None
) -> dict[str, Any]:
    """Train five steps. Return the losses, and the weights at the end as host tensors."""
    quiet()
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder:
        options = {
            "process_group_backend": None if device.type == "cpu" else BACKEND,
            **options,
            "sharding": {"min_unit_numel": 1, **options.get("sharding", {})},
        }
        if "nvme" in str(options):
            options["offload"] = {"nvme_path": folder, "nvme_allow_ram": True, **options.get("offload", {})}
        run = pl.Trainer(
            accelerator="cpu" if device.type == "cpu" else SimulatedAccelerator(),
            devices=1,
            strategy=ZeROStrategy(**options),
            max_steps=5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **(trainer or {}),
        )
        model = Stack()
        precision = (trainer or {}).get("precision", "32-true")
        run.fit(model, batches(torch.bfloat16 if precision == "bf16-true" else torch.float32), ckpt_path=resume)
        weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        return {"losses": model.losses, "weights": weights}


def streamed(device: torch.device, tier: str) -> Tensor:
    """Run a model whose blocks are streamed, three times."""
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder, torch.no_grad():
        model = Stack(6).eval()
        where = {"path": Path(folder), "allow_ram": True} if tier == "nvme" else {}
        with_blocks = stream_blocks(model, tier, device=device, **where)  # type: ignore[arg-type]
        x = torch.linspace(-1, 1, 12).view(3, 4)
        outputs = [model((x * scale).to(device)).cpu() for scale in (1.0, 2.0, 3.0)]
        with_blocks.close()
        return torch.cat(outputs)


def activations(tier: str) -> dict[str, Any]:
    """Return options that store every activation, with little room in flight."""
    return {
        "stage": 2,
        "activations": {
            "offload": {"tier": tier, "min_bytes": 1, "in_flight_bytes": 3000, "staging_bytes": 1 << 16},
        },
    }


FITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 1": ({"stage": 1}, {}),
    "stage 3": ({"stage": 3}, {}),
    "stage 2, cpu, step on cpu": ({"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu"}}, {}),
    "stage 2, cpu, step on device": ({"stage": 2, "offload": {"optimizer": "cpu", "step_on": "device"}}, {}),
    "stage 2, cpu, no overlap": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu"}, "sharding": {"overlap_step": False}},
        {},
    ),
    "stage 1, cpu, clipping": (
        {"stage": 1, "offload": {"optimizer": "cpu", "step_on": "device"}},
        {"gradient_clip_val": 0.1},
    ),
    "stage 2, gradients on cpu, accumulation": (
        {"stage": 2, "offload": {"optimizer": "cpu", "gradients": "cpu", "step_on": "cpu"}},
        {"accumulate_grad_batches": 2},
    ),
    "stage 3, all on cpu": (
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "cpu"}},
        {"gradient_clip_val": 0.1},
    ),
    "stage 3, all on cpu, bf16": (
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "device"}},
        {"precision": "bf16-true"},
    ),
    "stage 2, delayed": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu", "delay_after": 1}},
        {},
    ),
    "stage 2, nvme": ({"stage": 2, "offload": {"optimizer": "nvme", "step_on": "cpu"}}, {}),
    "stage 3, all on nvme": (
        {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "gradients": "nvme", "step_on": "cpu"}},
        {"accumulate_grad_batches": 2},
    ),
    "stage 3, all on nvme, step on device": (
        {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "gradients": "nvme", "step_on": "device"}},
        {"precision": "bf16-true"},
    ),
    "stage 2, 8-bit moments": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "device"}, "precision": {"moments": "int8"}},
        {},
    ),
    "activations on cpu": (activations("cpu"), {}),
    "activations on nvme": (activations("nvme"), {}),
}
"""Options of the strategy and of the Trainer."""
