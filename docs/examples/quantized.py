"""The model of the guide to quantized weights: low-rank adapters on a frozen GPT, without PEFT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from docs.examples.model import Model


class Lora(nn.Module):
    """A frozen linear layer, and an adapter of two small ones."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output."""
        return self.base(x) + self.b(self.a(x))


class Adapted(Model):
    """Only the adapters of the attention train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.net.blocks:
            block.attention.query_key_value = Lora(block.attention.query_key_value)
            block.attention.out = Lora(block.attention.out)

    def configure_optimizers(self) -> Any:
        """AdamW, with the adapters alone."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)
