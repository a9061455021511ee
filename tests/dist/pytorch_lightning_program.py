"""A program that imports `pytorch_lightning` and nothing of `lightning`, on two ranks: ``python THIS FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ls_strategy import Monitor, ZeROStrategy, load_from_checkpoint  # sorted: before pytorch_lightning is imported

import pytorch_lightning as pl  # isort: skip
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(sys.argv[1])


class Model(pl.LightningModule):
    """A small network that keeps its losses."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = (self.layers(batch[0]) - batch[0].flip(1)).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(3))), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Counts(Callback):
    """A callback of the user."""

    steps = 0

    def on_train_batch_end(self, *_: object) -> None:
        self.steps += 1


def fit(strategy: object, *callbacks: Callback, steps: int = 4, logger: object = False, **options: object) -> Model:
    """Train a new model on two ranks."""
    pl.seed_everything(1)
    model = Model()
    pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, logger=logger, log_every_n_steps=1,
        callbacks=list(callbacks), enable_progress_bar=False, enable_model_summary=False, default_root_dir=FOLDER,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks), gradient_clip_val=0.5,
    ).fit(model, **options)  # fmt: skip
    return model


def refusals() -> dict[str, str]:
    """What Trainers of the other package say."""
    from lightning.pytorch import Trainer

    found = {}
    for name, strategy in (("alias", "zero2"), ("object", ZeROStrategy(stage=2)), ("ddp", "ddp")):
        try:
            Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    """Write what was found to a file per rank."""
    result: dict[str, object] = {"losses": {}}
    for strategy in ("ddp", "zero1", "zero2", "zero3_offload"):
        result["losses"][strategy] = fit(strategy).losses  # type: ignore[index]
    counts, saves = Counts(), ModelCheckpoint(FOLDER / "saved", save_last=True)
    fit(ZeROStrategy(stage=3), counts, saves, Monitor(), steps=2, logger=CSVLogger(FOLDER, version=0))
    last = str(FOLDER / "saved" / "last.ckpt")
    result["resumed"] = {strategy: fit(strategy, ckpt_path=last).losses for strategy in ("ddp", "zero1")}
    result["counts"] = counts.steps
    loaded = load_from_checkpoint(Model, last)
    result["loaded"] = isinstance(loaded, pl.LightningModule) and loaded.hparams.width == 8
    sys.argv = sys.argv[:1]
    options = {"strategy": "zero3_offload", "accelerator": "cpu", "devices": 2, "logger": False, "max_steps": 2}
    options |= {"enable_checkpointing": False, "enable_progress_bar": False, "default_root_dir": str(FOLDER)}
    cli = LightningCLI(Model, args={"trainer": {**options, "strategy": {"class_path": "zero3", "init_args": {
        "offload": "cpu"}}}}, run=False, seed_everything_default=1)  # fmt: skip
    cli.trainer.fit(cli.model)
    result["cli"] = cli.model.losses
    assert isinstance(cli.trainer.strategy, ZeROStrategy)
    result["cli_offload"] = cli.trainer.strategy.config.offload.tiers
    result["other_package"] = any(name.partition(".")[0] == "lightning" for name in sys.modules)
    result["refused"] = refusals()
    (FOLDER / f"rank_{os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(result, default=list))


if __name__ == "__main__":
    main()
