"""Every optimizer of torch, at every stage and offloaded: as one process with the same global batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import PlanError, ZeROStrategy
from ls_strategy.testing import spawn
from tests.marks import few_or_all
from tests.models import Curve, quiet
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist

STEPS = 8

MAKE: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, maximize=True),
    "AdamW, rate as a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.01, dtype=torch.float64), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True, eps=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1, t0=3),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
}
"""Muon, whose iteration in bf16 needs other data, is in `test_whole_tensors`, SparseAdam in `test_sparse_gradients`."""


class Blocks(Curve):
    def __init__(self, name: str) -> None:
        super().__init__(MAKE[name])
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2))
        self.double()

    def loss(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = y + block(y)
        return (y - x.sin()).square().mean()


def batches() -> Tensor:
    """Return the global batches, ``(steps, 2 ranks, 4, 6)``."""
    return torch.randn(STEPS, 2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def one_process(name: str) -> list[Tensor]:
    """Return the weights that are trusted."""
    module = Blocks(name)
    optimizer = module.configure_optimizers()
    for batch in batches():
        optimizer.zero_grad()
        module.loss(batch.flatten(0, 1)).backward()
        optimizer.step()
    return [value.detach() for value in module.state_dict().values()]


def weights(rank: int, world_size: int, name: str, options: dict[str, Any]) -> list[Tensor]:
    module = Blocks(name)
    data = DataLoader(TensorDataset(batches()[:, rank].flatten(0, 1)), batch_size=4)
    trainer = bare_trainer(
        ZeROStrategy(**options), world_size, precision="64-true", max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module, data)
    return module.results()[1:]


CELLS: list[dict[str, Any]] = [
    *({"stage": stage} for stage in (0, 1, 2, 3)),
    {"stage": 1, "offload": {"optimizer": "cpu"}},
    {"stage": 3, "offload": "cpu"},
]
ALL = [(name, cell) for name in MAKE for cell in CELLS]
FEW = [(name, CELLS[(3 + i) % len(CELLS)]) for i, name in enumerate(MAKE)]

Cases = list[tuple[str, dict[str, Any]]]


def runs(rank: int, world_size: int, cases: Cases) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    quiet()
    return [(f"{name}, {cell}", weights(rank, world_size, name, cell), one_process(name)) for name, cell in cases]


@pytest.mark.parametrize("cases", few_or_all(FEW, ALL))
def test_optimizers_of_torch_are_one_process(cases: Cases) -> None:
    for rank in spawn(runs, 2, cases, init_process_group=False, timeout_s=300):
        for where, found, expected in rank:
            for ours, trusted in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, trusted, rtol=1e-9, atol=1e-12, msg=lambda m, w=where: f"{w}: {m}")


@pytest.mark.parametrize("stage", [0, 3])
def test_lbfgs_is_refused_with_the_cure(stage: Any) -> None:
    module = Blocks("SGD")
    module.make_optimizer = lambda p: torch.optim.LBFGS(p)
    data = DataLoader(TensorDataset(batches()[0, 0]), batch_size=4)
    with pytest.raises(PlanError, match=r"LBFGS.*first-order optimizer"):
        bare_trainer(ZeROStrategy(stage), precision="64-true", max_epochs=1).fit(module, data)
