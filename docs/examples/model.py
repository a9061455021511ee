"""The model and the data of the guides: a small GPT and random tokens. Any LightningModule takes its place."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from recipes.gpt.network import GPT, GPTConfig


class Model(pl.LightningModule):
    """Four blocks of width 64."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = GPT(GPTConfig(num_layers=4, num_heads=4, width=64, block_size=32))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, tokens, vocabulary) of token numbers (batch, tokens)."""
        return self.net(tokens)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of the next token."""
        tokens, targets = batch
        loss = cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """64 sequences of 32 random tokens, and the token after each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(256, (33,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


def data() -> DataLoader[Any]:
    """Batches of eight sequences."""
    return DataLoader(RandomTokens(), batch_size=8)
