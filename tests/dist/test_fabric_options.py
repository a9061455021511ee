"""Every option that `ZeROFabricStrategy` takes changes something in a Fabric, or is an error with the cure."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy import ConfigError, ZeROFabricStrategy
from ls_strategy.config import (
    ActivationsConfig,
    CheckpointConfig,
    OffloadConfig,
    PrecisionConfig,
    ShardingConfig,
    nested,
)
from tests.dist.fabric_ranks import WIDTH, Block
from tests.dist.ranks import on_ranks

GROUPS = {
    "sharding": ShardingConfig,
    "precision": PrecisionConfig,
    "offload": OffloadConfig,
    "activations": ActivationsConfig,
    "checkpoint": CheckpointConfig,
}
NVME = {"offload.optimizer": "nvme", "offload.nvme_allow_ram": True}

SHOWN: dict[str, dict[str, Any]] = {
    "sharding.block_classes": {"sharding.block_classes": ["LayerNorm"]},
    "sharding.min_unit_numel": {"sharding.min_unit_numel": 10**6},
    "sharding.replicated_modules": {"sharding.replicated_modules": ["teacher"]},
    "sharding.prefetch_units": {"sharding.prefetch_units": 0},
    "sharding.overlap_step": {"sharding.overlap_step": False},
    "sharding.rank_weights": {"sharding.rank_weights": [3, 1]},
    "sharding.shard_size": {"sharding.shard_size": 1},
    "sharding.hpz": {"sharding.hpz": 2},
    "sharding.quantized_gathers": {"sharding.quantized_gathers": "int8"},
    "sharding.quantized_gradients": {"sharding.quantized_gradients": "int8"},
    "precision.master_weights": {"precision.master_weights": False, "in": "bf16-true"},
    "precision.gather": {"precision.gather": "fp32", "in": "bf16-mixed"},
    "precision.fp32_modules": {"precision.fp32_modules": ["LayerNorm"], "in": "bf16-true"},
    "precision.loss_scale": {"precision.loss_scale": {"initial_power": 5}, "in": "16-mixed"},
    "precision.moments": {"precision.moments": "bf16"},
    "precision.frozen": {"precision.frozen": "int8"},
    "precision.frozen_except": {"precision.frozen": "int8", "precision.frozen_except": ["teacher"]},
    "offload.optimizer": {"offload.optimizer": "cpu"},
    "offload.parameters": {"offload.parameters": "cpu"},
    "offload.gradients": {"offload.optimizer": "cpu", "offload.gradients": {"tier": "cpu", "ratio": 0.5}},
    "offload.nvme_path": {**NVME, "offload.nvme_path": "{folder}/elsewhere"},
    "offload.nvme_io": {**NVME, "offload.nvme_io": {"parallelism": 2}},
    "offload.delay_after": {"stage": 2, "offload.optimizer": "cpu", "offload.delay_after": 1},
    "activations.checkpointing": {"activations.checkpointing": "full"},
    "activations.offload": {"activations.offload": "cpu"},
    "activations.loss": {"activations.loss": {"head": "head"}},
    "activations.tiling": {"activations.tiling": {"modules": ["blocks.*.wide"]}},
    "checkpoint.format": {"checkpoint.format": "sharded"},
    "checkpoint.frozen": {"checkpoint.format": "sharded", "checkpoint.frozen": False},
}
"""What `state_of` shows; ``in`` is the precision of the Fabric."""

REFUSED: dict[str, tuple[Any, str]] = {
    "sharding.overlap_step": ("backward", "Leave overlap_step out"),
    "precision.matmul": ("fp8", "convert_to_float8_training"),
    "activations.partitioning": (True, "activations.checkpointing"),
    "checkpoint.background": (True, "Leave background out"),
    "checkpoint.on_error": ("continue", "catch ls_strategy.CheckpointError"),
}

ELSEWHERE = {
    "precision.reduce_dtype": "NCCL only",
    "offload.step_on": "a device that is not the host",
    "offload.nvme_allow_ram": "tests set it, which store in memory",
}


def test_every_option_is_in_a_table() -> None:
    options = {f"{group}.{field.name}" for group, kind in GROUPS.items() for field in dataclasses.fields(kind)}
    assert options == SHOWN.keys() | REFUSED.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_without_effect_is_an_error_with_the_cure(option: str) -> None:
    value, cure = REFUSED[option]
    with pytest.raises(ConfigError, match=cure):
        ZeROFabricStrategy(**nested({option: value}))


class Model(nn.Module):
    """Blocks, a head, and frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.teacher, self.other = (nn.Linear(64, 64).requires_grad_(False) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        frozen = self.other(self.teacher(x.repeat(1, 64 // WIDTH)))
        return self.head(x + frozen[:, :WIDTH])


def state_of(world_size: int, given: dict[str, Any], folder: Path) -> list[str]:
    """Set a model up, take three steps and save; return what the options may have changed. Collective."""
    from lightning import Fabric

    from ls_strategy import ZeROFabricPrecision

    options = {"stage": 3, "sharding.min_unit_numel": 0, "offload.nvme_path": f"{folder}/nvme", **given}
    options = {k: v.format(folder=folder) if k == "offload.nvme_path" else v for k, v in options.items()}
    strategy = ZeROFabricStrategy(**nested({k: v for k, v in options.items() if k != "in"}))
    plugins: list[Any] = [ZeROFabricPrecision(given["in"])] if "in" in given else []
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    torch.manual_seed(0)
    module: Any = Model()
    module, optimizer = fabric.setup(module, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]))
    model = strategy.require_model()
    engine = model.engine
    losses = []
    for _ in range(3):
        loss = module(torch.ones(2, WIDTH)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    saved = folder / "saved"
    fabric.save(saved, {"model": module})
    fabric.barrier()
    files = sorted(str(path.relative_to(saved)) for path in saved.rglob("*")) if saved.is_dir() else []
    left_out = "teacher" in "".join(str(fabric.load(saved).get("model", {}).keys()))
    fabric.barrier()
    activations = model._activations
    shown: list[Any] = [
        engine.plan,
        engine.describe(),
        [(flat.resident, flat.comm.world_size, flat.secondary is None, flat.dtype) for flat in engine.flats],
        engine.gatherer.prefetch_units,
        engine.gatherer.overlap,
        None if engine.scaler is None else engine.scaler.scale,
        activations.active and activations.active.describe(),
        activations._heads and activations._heads.describe(),
        activations._tiles and activations._tiles.describe(),
        strategy.config.offload.nvme_io if engine.offload.tiers else None,
        sorted(path.name for path in folder.iterdir() if path != saved),
        losses if "offload.delay_after" in given else None,
        (bool(files), left_out),
    ]
    return [str(each) for each in shown]


def check(world_size: int, option: str, folder: Path) -> None:
    given = SHOWN[option]
    without = {key: value for key, value in given.items() if key != option}
    first, second = (folder / name for name in ("with", "without"))
    for each in (first, second):
        each.mkdir(exist_ok=True)
    assert state_of(world_size, given, first) != state_of(world_size, without, second)


@pytest.mark.wide
@pytest.mark.parametrize("option", [option for option in SHOWN if option != "sharding.hpz"])
@on_ranks(2)
def test_an_option_changes_something(rank: int, world_size: int, option: str, tmp_path: Path) -> None:
    check(world_size, option, tmp_path)


@pytest.mark.wide
@on_ranks(4)
def test_nodes_have_second_copies(rank: int, world_size: int, tmp_path: Path) -> None:
    check(world_size, "sharding.hpz", tmp_path)
