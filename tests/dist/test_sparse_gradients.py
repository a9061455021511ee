"""Gradients of `nn.Embedding(sparse=True)`: trained as by DDP, by optimizers that torch allows on them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import PlanError, ZeROStrategy
from ls_strategy.testing import spawn
from tests.marks import few_or_all
from tests.models import Curve, assert_as_ddp, quiet
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist


class LazyAdagrad(torch.optim.Adagrad):
    """Decays the weights of the rows in a sparse gradient, and all weights for a dense one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = p.grad.coalesce().indices()[0] if p.grad.is_sparse else slice(None)
                    p[rows] *= 0.9
        return result


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
    "lazy": lambda params: LazyAdagrad(params, 0.1),
    "adamw": lambda params: torch.optim.AdamW(params, 0.1),
    "decay": lambda params: torch.optim.SGD(params, 0.1, weight_decay=0.1),
}


class Sparse(Curve):
    functional = False
    """Whether only the call says that gradients are sparse."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(lambda params: OPTIMIZERS[optimizer](params))
        self.table = nn.Embedding(16, 4, sparse=not self.functional)
        self.last = nn.Linear(4, 4)
        self.double()

    def rows(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.table.weight, sparse=True) if self.functional else self.table(tokens)

    def loss(self, x: Tensor) -> Tensor:
        return (self.last(self.rows(x)).sin() - 0.5).square().mean()


class Functional(Sparse):
    functional = True


class Rows(Sparse):
    """SparseAdam for the table, AdamW for the rest, and rows whose gradients are zero."""

    def __init__(self, accumulate: int) -> None:
        super().__init__("sparse_adam")
        self.accumulate = accumulate
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + 0.0 * self.table(15 - batch[0]).sum()
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulate == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.table.parameters(), 0.1), torch.optim.AdamW(self.last.parameters(), 0.1)


def fit(module: Sparse, strategy: Any, rank: int, devices: int, accumulate: int = 1, **options: Any) -> list[Tensor]:
    """Return losses and final weights. Every rank sees batches of its own, with few rows of the table."""
    generator = torch.Generator().manual_seed(1 + rank)
    data = torch.randint(16, (48,), generator=generator)
    options = {"accumulate_grad_batches": accumulate, "use_distributed_sampler": False, **options}
    trainer = bare_trainer(strategy, devices, precision="64-true", max_epochs=1, **options)
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=3))
    return module.results()


def build(name: str, accumulate: int) -> Sparse:
    return Rows(accumulate) if name == "rows" else Functional("momentum") if name == "functional" else Sparse(name)


def run(strategy: Any, rank: int, world_size: int, name: str, accumulate: int) -> list[Tensor]:
    return fit(build(name, accumulate), strategy, rank, world_size, 1 if name == "rows" else accumulate)


CASES = [(name, accumulate) for name in ("sgd", "momentum", "adagrad", "functional") for accumulate in (1, 3)]
BY_ROWS = [(name, accumulate) for name in ("rows", "lazy") for accumulate in (1, 2)]
STRATEGIES: list[dict[str, Any]] = [*({"stage": s} for s in (0, 1, 2, 3)), {"stage": 3, "offload": "cpu"}]


Cases = list[tuple[tuple[str, int], list[dict[str, Any]]]]
"""Optimizers and accumulation, each with strategies."""

FEW: Cases = [
    (("momentum", 1), STRATEGIES[1:2]),
    (("adagrad", 3), STRATEGIES[4:]),
    (("functional", 1), STRATEGIES[3:4]),
    (("rows", 2), STRATEGIES[:1]),
]
ALL: Cases = [*((case, STRATEGIES) for case in CASES), *((case, STRATEGIES[:1]) for case in BY_ROWS)]


def curves(rank: int, world_size: int, cases: Cases) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return what was run, its results, and those of DDP."""
    quiet()
    found = []
    known: dict[tuple[str, int], list[Tensor]] = {}
    for case, strategies in cases:
        trusted = ("momentum" if case[0] == "functional" else case[0], case[1])  # DDP knows only layers
        if trusted not in known:
            known[trusted] = run("ddp", rank, world_size, *trusted)
        for options in strategies:
            ours = run(ZeROStrategy(**options), rank, world_size, *case)
            found.append((f"{options} {case}", ours, known[trusted]))
    return found


@pytest.mark.parametrize("cases", few_or_all(FEW, ALL))
def test_sparse_gradients_train_as_under_ddp(cases: Cases) -> None:
    ranks = spawn(curves, 2, cases, init_process_group=False, timeout_s=300)
    assert_as_ddp(ranks)


ROWS_ARE_NOT_KEPT = (("rows", (1, 2, 3)), ("lazy", (1, 3)))
"""Optimizers, and stages that refuse them."""


def refusals(rank: int, world_size: int, by_rows: Any) -> list[str]:
    quiet()
    found = []
    for name in ("adamw", "decay"):
        for strategy in ("ddp", ZeROStrategy(stage=0), ZeROStrategy(stage=2)):
            with pytest.raises((RuntimeError, PlanError)) as error:
                fit(Sparse(name), strategy, rank, world_size)
            found.append(str(error.value))
    for name, stages in by_rows:
        for stage in stages:
            with pytest.raises(PlanError) as refused:
                fit(build(name, 1), ZeROStrategy(stage=stage), rank, world_size)  # type: ignore[arg-type]
            found.append(str(refused.value))
    return found


@pytest.mark.parametrize("by_rows", few_or_all((("rows", (3,)), ("lazy", (1,))), ROWS_ARE_NOT_KEPT))
def test_what_dense_gradients_would_change_is_refused(by_rows: Any) -> None:
    for found in spawn(refusals, 2, by_rows, init_process_group=False, timeout_s=200):
        for ddp, *ours in (found[:3], found[3:6]):
            for message in ours:
                assert re.search(
                    r"Got (AdamW|SGD) for 'table.weight', whose gradients are sparse.*sparse=False", message
                )
                assert ddp.splitlines()[0] in message
        for message in found[6:]:
            assert re.search(
                r"(SparseAdam|LazyAdagrad) for 'table.weight': it updates only rows .*Use stage 0", message
            )


@pytest.mark.parametrize("stage", [0, 2])
def test_a_call_that_nobody_knew_of_is_refused_too(stage: Any):
    with pytest.raises(PlanError, match=r"LazyAdagrad for 'table.weight': it updates only rows.*at stage 0"):
        fit(Functional("lazy"), ZeROStrategy(stage=stage), 0, 1)
