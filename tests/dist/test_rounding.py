"""Moments in 8 and 16 bits are rounded with random numbers of their own on every rank, in every buffer, at every step.

Where ranks share random numbers, their rounding errors point the same way in all shards and no longer average out.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, Net, fit, quiet

NUMEL, STEPS = 1024, 3


class Halves(nn.Module):
    """Two parameters with the same gradient, each of which is the shard of one of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(NUMEL)), nn.Parameter(torch.ones(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.linspace(-1.7, 2.3, NUMEL).exp()
        return x + (factors * (self.one + self.other)).sum()


class Same(Net):
    """Two buffers, whose gradients do not depend on the data; moments are the gradient itself, and nothing moves."""

    def build(self) -> None:
        self.blocks = nn.ModuleList([Halves(), Halves()])
        self.codes: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        return self(torch.zeros(WIDTH)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.0, betas=(0.0, 0.0), weight_decay=0.0)

    def on_train_batch_end(self, *_: Any) -> None:
        (state,) = self.trainer.strategy.require_engine().optimizers
        for flat, store in zip(state.flats, state.sharded._store, strict=True):
            flat.wait_updated()
            moments = [store.moment(name).dequantize() for name in ("exp_avg", "exp_avg_sq")]
            self.codes.append(torch.stack(moments).clone())


def stored(rank: int, world_size: int, options: dict[str, Any]) -> Tensor:
    """Moments as they are stored, ``(steps, buffers, moments, NUMEL)``."""
    quiet()
    module = Same()
    fit(ZeROStrategy(min_unit_numel=0, **options), module, max_steps=STEPS)
    return torch.stack(module.codes).view(STEPS, 2, 2, NUMEL)


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3, "offload_optimizer": "cpu"}], ids=str)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_every_rank_buffer_and_step_rounds_with_random_numbers_of_its_own(moments: str, options: Any) -> None:
    """The same number is stored everywhere: any two places agree no more often than chance has it."""
    found = torch.stack(spawn(stored, 2, {**options, "moments": moments}, init_process_group=False))
    exact = torch.linspace(-1.7, 2.3, NUMEL).exp()
    for index, value in enumerate((exact, exact * exact)):
        places = found[:, :, :, index].reshape(-1, NUMEL)  # ranks, steps, buffers
        assert (places / value - 1).abs().max() < 0.15
        # Two that round independently agree where the fraction to be rounded is f with f^2 + (1-f)^2: 2/3 on average.
        equal = [(a == b).float().mean().item() for a, b in combinations(places, 2)]
        assert len(equal) == 66
        assert max(equal) < 0.75
        # Independent errors of 12 places average out.
        assert (places / value).mean().sub(1).abs() < 0.002


@pytest.mark.parametrize("moments", ["fp32"])
def test_what_is_not_rounded_is_the_same_everywhere(moments: str) -> None:
    """What the test above takes for granted."""
    found = torch.stack(spawn(stored, 2, {"stage": 1, "moments": moments}, init_process_group=False))
    assert found.unique(dim=0).shape[0] == 1
    assert found.flatten(0, 2).unique(dim=0).shape[0] == 1
