"""lightly: SimCLR on small images (``pytorch_lightning``)."""

# pyright: reportMissingImports=false

import sys
from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.published.losses import recorder


class SimCLR(pl.LightningModule):
    """As in lightly's documentation, with a small backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        )  # fmt: skip
        self.projection_head = SimCLRProjectionHead(64, 128, 32)
        self.criterion = NTXentLoss(gather_distributed=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return projections (B, 32) of images (B, 1, 8, 8)."""
        return self.projection_head(self.backbone(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the contrastive loss of two views."""
        (images,) = batch
        views = images.roll(1, dims=-1), images.flip(-1) * 0.9
        loss = self.criterion(self(views[0]), self(views[1]))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """SGD with momentum, as in the documentation."""
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)


def main(strategy: str) -> None:
    pl.seed_everything(1)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    loader = DataLoader(TensorDataset(images[:640]), batch_size=32, shuffle=True, drop_last=True)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, sync_batchnorm=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[recorder(pl.Callback)],
    )  # fmt: skip
    trainer.fit(SimCLR(), loader)


if __name__ == "__main__":
    main(sys.argv[1])
