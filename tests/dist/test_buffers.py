"""Buffers that are not plain dense memory: as under DDP, or refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.config import nested
from ls_strategy.errors import PlanError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import WIDTH, Net, batches, fit, on_ranks

NUMBERS = torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) / 100
COMPLEX = torch.complex(NUMBERS, NUMBERS.t().contiguous())
VIEWS: dict[str, Callable[[float], Tensor]] = {
    "conjugate": lambda factor: (COMPLEX * factor).conj(),
    "negative": lambda factor: (COMPLEX * factor).conj().imag,
    "transposed": lambda factor: (NUMBERS[:, :3] * factor).t(),
}
REFUSED: dict[str, Callable[[float], Tensor]] = {
    "sparse": lambda _: torch.eye(WIDTH).to_sparse(),
    "quantized": lambda _: torch.quantize_per_tensor(torch.eye(WIDTH), 0.1, 0, torch.qint8),
    "expanded": lambda _: torch.ones(1, WIDTH).expand(WIDTH, WIDTH),
}
OPTIONS: list[dict[str, Any]] = [
    {"stage": 1},
    {
        "stage": 1,
        "parallel.tensor": {"size": 2, "plan": {"blocks.*.wide": "replicate", "blocks.*.narrow": "replicate"}},
    },
    {"stage": 3, "sharding.min_unit_numel": 0},
]


class Buffered(Net):
    """Its buffer starts with other values on each rank."""

    table: Tensor

    def __init__(self, make: Callable[[float], Tensor], rank: int) -> None:
        super().__init__()
        self.register_buffer("table", make(1.0 + rank))

    def forward(self, x: Tensor) -> Tensor:
        product = x.to(self.table.dtype) @ self.table.mT
        return super().forward(x) + sum(p.mean() for p in (product.real, torch.view_as_real(product + 0j)))


@on_ranks(2, timeout_s=120)
def test_views_start_from_those_of_rank_0(rank: int, world_size: int) -> None:
    for kind, make in VIEWS.items():
        expected = Buffered(make, 0)
        fit("ddp", expected, max_epochs=1)
        for options in OPTIONS:
            ours = Buffered(make, rank)
            data = batches(batch_size=8) if "parallel.tensor" in options else None
            fit(ZeROStrategy(**nested(options)), ours, data, max_epochs=1)
            assert torch.equal(ours.table, make(1.0)), (kind, options)
            if data is None:
                assert ours.losses == pytest.approx(expected.losses, rel=1e-5), (kind, options, expected.losses)


@on_ranks(2)
def test_what_is_not_dense_is_refused_with_its_name(rank: int, world_size: int) -> None:
    for kind, make in REFUSED.items():
        for options in OPTIONS:
            with pytest.raises(PlanError, match=f"Got the buffer 'table', which is {kind}, but"):
                fit(ZeROStrategy(**nested(options)), Buffered(make, rank))
