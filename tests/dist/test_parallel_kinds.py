"""A kind of parallelism of another package, plugged in from outside: ZeRO, norms and checkpoints know of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ls_strategy import ZeROStrategy
from ls_strategy.layout import TensorPart
from ls_strategy.lightning.parallel_kinds import KINDS, Partitioning
from ls_strategy.parallel.regions import copy_to, reduce_from
from ls_strategy.testing import spawn
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist

DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))


class Branches(nn.Module):
    """The sum of several layers of the same input."""

    def __init__(self, branches: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(branches, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(x @ weight) for weight in self.weight]).sum(0)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 6), Branches(4, 6), nn.Linear(6, 1))
        self.seen: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.net(batch).square().mean()
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=4)


def over_branches(module: pl.LightningModule, given: Partitioning) -> dict[int, TensorPart] | None:
    """Give every rank of the tensor axis some of the branches."""
    axis = given.mesh.tensor
    parts: dict[int, TensorPart] = {}
    for layer in (m for m in module.modules() if isinstance(m, Branches)):
        part = TensorPart.cut(layer.weight.shape, 0, axis.rank, axis.size)
        ((first, length),) = part.runs
        layer.weight.data = layer.weight.data[first : first + length].clone()
        parts[id(layer.weight)] = part
        layer.register_forward_pre_hook(lambda _, args: copy_to(args[0], axis))
        layer.register_forward_hook(lambda *call: reduce_from(call[-1], axis))
    return parts or None


def fit(strategy: Any, path: Path, devices: int = 1) -> list[float]:
    module = Module()
    options = {"precision": "64-true", "max_epochs": 2, "gradient_clip_val": 0.1, "use_distributed_sampler": False}
    trainer = bare_trainer(strategy, devices, **options)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    return module.seen


def on_ranks(rank: int, world_size: int, stage: Any, path: Path) -> list[float]:
    KINDS["tensor"].insert(0, over_branches)
    return fit(ZeROStrategy(stage=stage, parallel={"tensor": 2}, checkpoint="file"), path, world_size)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (4, 3)])
def test_a_kind_from_outside_trains_clips_and_saves_as_one_process(ranks: int, stage: int, tmp_path: Path) -> None:
    """On four ranks there are two replicas, which get the same data."""
    expected = fit("auto", tmp_path / "plain.ckpt")
    for losses in spawn(on_ranks, ranks, stage, tmp_path / "ours.ckpt", init_process_group=False):
        assert losses == pytest.approx(expected, rel=1e-12)
    plain, ours = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("plain", "ours"))
    torch.testing.assert_close(ours["state_dict"], plain["state_dict"], rtol=1e-9, atol=1e-12)
    moments = [saved["optimizer_states"][0]["state"] for saved in (ours, plain)]
    torch.testing.assert_close(*moments, rtol=1e-9, atol=1e-12)
