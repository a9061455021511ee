"""The names of a checkpoint come in the module's order, as under DDP, and not in the alphabet's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ShardedEMA, ZeROStrategy, load_from_checkpoint
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.source import read_checkpoint, read_weights
from ls_strategy.config import nested
from ls_strategy.fabric.strategy import ZeROFabricStrategy
from tests.dist.ranks import WIDTH, Net, fit, on_ranks, trainer_of


class Extra(nn.Linear):
    """A layer with an object of its own in the state dict."""

    def get_extra_state(self) -> Any:
        return {"scale": 2.0}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"scale": 2.0}


class Unsorted(Net):
    """Names that no alphabet sorts so: buffers after weights, a tied weight at the end, an object in the middle."""

    seen_keys: list[str]

    def build(self) -> None:
        self.zebra = nn.Linear(WIDTH, WIDTH)
        super().build()
        self.middle = Extra(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.apple = nn.Linear(WIDTH, WIDTH, bias=False)
        self.apple.weight = self.zebra.weight
        self.register_buffer("aaa", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.apple(self.norm(self.middle(super().forward(self.zebra(x)))))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen_keys = list(checkpoint["state_dict"])


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 1])
@on_ranks(2)
def test_of_every_reader(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    module = Unsorted()
    trainer = fit(stage, module, max_epochs=1, callbacks=[ShardedEMA(0.9)])
    folder, file, one = tmp_path / "folder.ckpt", tmp_path / "file.ckpt", tmp_path / "one.ckpt"
    trainer.save_checkpoint(folder)
    expected = list(module.state_dict())
    assert expected[0] == "aaa"
    assert expected[1] == "zebra.weight"
    assert list(trainer.strategy.lightning_module_state_dict() or expected) == expected
    other = Unsorted()
    fit(stage, other, ckpt=folder, callbacks=[ShardedEMA(0.9)])
    assert other.seen_keys == expected
    trainer = fit(stage, Unsorted(), max_epochs=1, save_as="file")
    trainer.save_checkpoint(file)
    if rank == 0:
        consolidate(folder, one)
        for path in (folder, file, one):
            checkpoint = read_checkpoint(path, weights_only=False)
            assert list(checkpoint["state_dict"]) == expected, path
            assert list(checkpoint.get("ema_state_dict", expected)) == expected, path
            for load in (load_from_checkpoint, lambda cls, path, **k: cls.load_from_checkpoint(path, **k)):
                assert load(Unsorted, path, weights_only=False).seen_keys == expected, path
            tensors = read_weights(path).tensors
            assert list(tensors) == [n for n in expected if n not in ("apple.weight", "middle._extra_state")], path


@on_ranks(2)
def test_of_fabric(rank: int, world_size: int, tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ZeROFabricStrategy(3))
    fabric.launch()
    module = Unsorted()
    expected = list(module.state_dict())
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.save(tmp_path / "x.ckpt", {"model": model, "optimizer": optimizer})
    assert list(fabric.load(tmp_path / "x.ckpt", weights_only=False)["model"]) == expected


class Chain(pl.LightningModule):
    """A pipeline whose last stage has names before and after those of the first, with a buffer among the blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.zebra = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 3))
        self.apple = nn.Linear(2, 2)

    def training_step(self, batch: Any, i: int) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.wide
@on_ranks(2)
def test_of_a_pipeline(rank: int, world_size: int, tmp_path: Path) -> None:
    options = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
    data = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(3, (16,))), batch_size=4)
    trainer, module = trainer_of(ZeROStrategy(1, **nested(options)), max_epochs=1), Chain()
    expected = list(module.state_dict())
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert list(read_checkpoint(tmp_path / "x.ckpt")["state_dict"]) == expected
    weights = trainer.strategy.lightning_module_state_dict()
    assert rank or list(weights) == expected
