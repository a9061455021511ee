"""Complex parameters, as in Fourier neural operators, and parameters that are buffers: trained as by DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.marks import few_or_all
from tests.models import Curve, assert_as_ddp, quiet
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, 1e-2),
    "momentum": lambda params: torch.optim.SGD(params, 5e-2, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 1e-2),
}


class Fourier(Curve):
    def __init__(self, optimizer: str) -> None:
        super().__init__(OPTIMIZERS[optimizer])
        self.first: Any = nn.Linear(8, 8)
        self.modes = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.first.register_buffer("start", copy.deepcopy(self.first.weight))
        self.double()

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.state_dict()
        with torch.no_grad():
            state["modes"].mul_(0.9)
            state["scale"].data[1:].mul_(0.9)

    def loss(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.first(x)) * self.modes * self.scale.sum()
        loss = (torch.fft.irfft(modes, n=8) - x).square().mean()
        return loss + 0.1 * (self.first.weight - self.first.start.detach()).square().sum()


def fit(rank: int, world_size: int, optimizer: str, clip: float | None, strategy: Any) -> list[Tensor]:
    """Return losses and final weights. Every rank sees batches of its own."""
    module = Fourier(optimizer)
    data = torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1 + rank))
    trainer = bare_trainer(
        strategy, world_size, precision="64-true", max_epochs=1, gradient_clip_val=clip, use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4))
    return module.results()


CASES: list[Any] = [("adamw", None), ("adamw", 0.1), ("momentum", None), ("momentum", 0.1), ("rmsprop", None)]
OFFLOADED = {"stage": 3, "offload": "cpu"}
VIRTUAL = {"stage": 2, "parallel": {"virtual_ranks": 2}}
STRATEGIES: list[dict[str, Any]] = [*({"stage": stage} for stage in (0, 1, 2, 3)), OFFLOADED, VIRTUAL]
FEW = [
    (("adamw", 0.1), [{"stage": 2}, OFFLOADED]),
    (("momentum", None), [{"stage": 1}, VIRTUAL]),
    (("rmsprop", None), [{"stage": 0}, {"stage": 3}]),
]


def curves(rank: int, world_size: int, cases: list[Any]) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return what was run, its results, and those of DDP."""
    quiet()
    found = []
    for case, strategies in cases:
        expected = fit(rank, world_size, *case, strategy="ddp")
        found += [
            (f"{options} {case}", fit(rank, world_size, *case, strategy=ZeROStrategy(**options)), expected)
            for options in strategies
        ]
    return found


@pytest.mark.parametrize("cases", few_or_all(FEW, [(case, STRATEGIES) for case in CASES]))
def test_complex_parameters_train_as_under_ddp(cases: list[Any]):
    ranks = spawn(curves, 2, cases, init_process_group=False, timeout_s=240)
    assert_as_ddp(ranks)
