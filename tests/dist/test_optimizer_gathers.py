"""Optimizers that gather parameters themselves, as the first published Muon: at stage 0 as under DDP, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ls_strategy.errors import PlanError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import WIDTH, Net, assert_equal, fit, on_ranks, weights


class SharesWork(Optimizer):
    """Each rank steps every other parameter, and gets the others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        ranks = dist.get_world_size()
        for group in self.param_groups:
            params = group["params"]
            padded = [*params, *(torch.empty_like(params[-1]) for _ in range(-len(params) % ranks))]
            for first in range(0, len(params), ranks):
                mine = padded[first + dist.get_rank()]
                if mine.grad is not None:
                    mine.add_(mine.grad / mine.grad.norm(), alpha=-group["lr"])
                dist.all_gather(padded[first : first + ranks], mine)


class Equal(Net):
    def build(self) -> None:
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    def configure_optimizers(self) -> Any:
        return SharesWork(self.parameters())


class OfTwoShapes(Equal):
    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)])


@on_ranks(2)
def test_at_stage_0_it_has_the_bits_of_ddp_or_is_refused(rank: int, world_size: int) -> None:
    expected, ours = Equal(), Equal()
    fit("ddp", expected)
    fit(ZeROStrategy(0), ours)
    assert ours.losses == expected.losses
    assert_equal(weights(ours), weights(expected), "stage 0")
    with pytest.raises(PlanError, match=r"of shape \(3, 8\) and \(8, 3\), but gloo .*SingleDeviceMuon"):
        fit(ZeROStrategy(0), OfTwoShapes())
