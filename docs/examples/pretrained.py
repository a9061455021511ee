"""The models of the guide to pretrained weights."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

import ls_strategy
from recipes.gpt.network import GPT, GPTConfig


class FineTuned(pl.LightningModule):
    """A causal model of transformers."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model once."""
        if self.model is None:
            from transformers import AutoModelForCausalLM

            self.model = AutoModelForCausalLM.from_pretrained(self.folder)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the model's own loss."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class FromFiles(pl.LightningModule):
    """Any network, from files with the same names."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.net: Any = None

    def configure_model(self) -> None:
        """Build the network once, and load it."""
        if self.net is None:
            self.net = GPT(GPTConfig(num_layers=2, num_heads=2, width=32, block_size=32))
            ls_strategy.load_safetensors(self.net, self.folder)


def exporting(path: str) -> pl.Callback:
    """Return a callback that replaces the folder ``path`` every 1000 steps, and at the end of the fit."""
    return ls_strategy.HuggingFaceExport(path, every=1000, dtype="bfloat16", push_to_hub=None)
