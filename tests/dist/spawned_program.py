"""Ranks that are spawned and forked by a process in which both of Lightning's packages are loaded: ``python THIS``."""

from __future__ import annotations

import lightning.pytorch  # noqa: F401  (loaded first, and not used)
import lightning_fabric
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(16, 4), batch_size=2)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def loop(fabric: lightning_fabric.Fabric) -> tuple[str, int]:
    """One step."""
    from ls_strategy import host

    layer = torch.nn.Linear(4, 4)
    model, optimizer = fabric.setup(layer, torch.optim.AdamW(layer.parameters()))
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return host.name(), fabric.world_size


def main() -> None:
    """Print what every way to start ranks gives."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "devices": 2, **quiet}
    pl.Trainer(strategy="zero2", **options)  # type: ignore[arg-type]
    from ls_strategy import ZeROFabricStrategy, ZeROStrategy

    for method in ("spawn", "fork"):
        trainer = pl.Trainer(strategy=ZeROStrategy(2, start_method=method), max_steps=2, **options)  # type: ignore[arg-type]
        trainer.fit(Model())
        print("FOUND", method, str(trainer.state.status.value))
    strategies = (ZeROFabricStrategy(2, start_method="spawn"), "zero3_notebook")
    for strategy in strategies:
        fabric = lightning_fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        print("FOUND", *fabric.launch(loop))


if __name__ == "__main__":
    main()
