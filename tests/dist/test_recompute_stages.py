"""Recompute and offload of activations under a Trainer, at every stage: the same losses, and no third gather."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.config import ActivationOffloadConfig, RecomputeConfig, nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from tests.dist.ranks import on_ranks

pytestmark = [pytest.mark.wide, pytest.mark.dist]

WIDTH = 24
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wide(self.norm(x))


class Pair(nn.Module):
    """Two blocks, each of which is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Net(pl.LightningModule):
    def __init__(self, layer: type[nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([layer() for _ in range(count)])
        self.losses: list[float] = []

    def training_step(self, batch: Any, i: int) -> Tensor:
        x = self.first(batch[0])
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, world_size: int, model: Net, stage: int, **options: Any) -> tuple[list[float], Counter[str]]:
    """Losses, and how often each block was gathered in the last step."""
    gathers: Counter[str] = Counter()
    start = FlatBuffer.start_gather

    def counting(self: FlatBuffer) -> None:
        gathers[self.layout.slots[0].name] += 1
        start(self)

    class Reset(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            gathers.clear()

    FlatBuffer.start_gather = counting  # type: ignore[method-assign]
    try:
        torch.manual_seed(7)
        data = TensorDataset(torch.randn(STEPS * 2 * world_size, WIDTH))
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=ZeROStrategy(
                stage, **nested({"sharding.min_unit_numel": 0, "offload.nvme_allow_ram": True, **options})
            ),  # type: ignore[arg-type]
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[Reset()],
        )
        pl.seed_everything(3, verbose=False)
        trainer.fit(model, DataLoader(data, batch_size=2))
    finally:
        FlatBuffer.start_gather = start
    assert len(model.losses) == STEPS
    return model.losses, Counter({name: n for name, n in gathers.items() if name.startswith("layers")})


CHOICES: dict[str, dict[str, Any]] = {
    "full": {"activations.checkpointing": "full"},
    "selective": {"activations.checkpointing": "selective"},
    "every 2": {"activations.checkpointing": RecomputeConfig(policy="full", every=2)},
    "inside the units": {"activations.checkpointing": RecomputeConfig(policy="full", block_classes=("Sequential",))},
    "offload": {"activations.offload": ActivationOffloadConfig(tier="cpu", min_bytes=0, in_flight_bytes=500)},
    "offload to a drive": {"activations.offload": ActivationOffloadConfig(tier="nvme", min_bytes=0, in_flight_bytes=0)},
    "recompute and offload": {
        "activations.checkpointing": "full",
        "activations.offload": ActivationOffloadConfig(tier="cpu", min_bytes=0, in_flight_bytes=0),
    },
}


@on_ranks(2, timeout_s=120)
def test_losses_are_the_same_bits_and_units_are_gathered_twice(rank: int, world_size: int, tmp_path: Path) -> None:
    for stage in (3, 2, 0):
        expected, _ = fit(tmp_path, world_size, Net(), stage)
        for name, options in CHOICES.items() if stage else [*CHOICES.items()][:1]:
            losses, gathers = fit(tmp_path, world_size, Net(), stage, **options)
            assert losses == expected, (stage, name)
            if stage == 3:
                assert len(gathers) == 4
                assert max(gathers.values()) <= 2, (name, gathers)


@on_ranks(2, timeout_s=60)
def test_recomputed_modules_of_several_units(rank: int, world_size: int, tmp_path: Path) -> None:
    """A unit that is gathered to run again stays until its own backward is over."""
    options = {"sharding.block_classes": ["Block"]}
    expected, plain = fit(tmp_path, world_size, Net(Pair, 3), 3, **options)
    losses, gathers = fit(
        tmp_path,
        world_size,
        Net(Pair, 3),
        3,
        **{"activations.checkpointing": RecomputeConfig(policy="full", block_classes=("Pair",))},
        **options,
    )
    assert losses == expected
    assert len(gathers) == len(plain) == 6
    assert max(gathers.values()) <= 2, gathers
