"""Which optimizers may get dense gradients in place of sparse ones, and which parameters have sparse ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ls_strategy import PlanError
from ls_strategy.zero.step.sparse import SparseGradients, sparse_params


class RowSgd(Optimizer):
    """Decays the rows in a sparse gradient only. It has no closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p[p.grad.coalesce().indices()[0] if p.grad.is_sparse else slice(None)] *= 0.5
                    p.add_(p.grad, alpha=-group["lr"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.bag = nn.EmbeddingBag(4, 2, sparse=True, mode="sum")
        self.frozen = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
        self.dense = nn.Embedding(4, 2)


def found(optimizer: Optimizer, model: nn.Module, *, by_rows: bool = True) -> frozenset[int]:
    return SparseGradients(model, [optimizer], by_rows=by_rows).needing_rows


def test_layers_that_say_so_have_sparse_gradients_unless_frozen() -> None:
    assert list(sparse_params(Model()).values()) == ["table.weight", "bag.weight"]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, maximize=True),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.3),
    ],
)
@pytest.mark.parametrize("by_rows", [True, False])
def test_dense_gradients_do_for_these(make: Any, by_rows: bool) -> None:
    model = Model()
    assert not found(make(model.parameters()), model, by_rows=by_rows)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.AdamW, "Adam does not support sparse gradients"),
        (torch.optim.RMSprop, "RMSprop does not support sparse gradients"),
        (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1), "SGD.*RuntimeError"),
        (lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.1), "weight_decay option is not compatible with sparse"),
    ],
)
def test_what_torch_refuses_is_refused(make: Any, words: str) -> None:
    model = Model()
    with pytest.raises(PlanError, match=rf"for 'table.weight', whose gradients are sparse.*{words}.*sparse=False"):
        found(make(model.parameters()), model)
    assert not found(make(model.dense.parameters()), model)


@pytest.mark.parametrize("kind", [RowSgd, torch.optim.SparseAdam])
def test_who_updates_rows_gets_them_or_is_refused(kind: Any) -> None:
    model = Model()
    optimizer = kind(model.table.parameters())
    assert found(optimizer, model) == {id(model.table.weight)}
    with pytest.raises(PlanError, match=rf"Got {kind.__name__} for 'table.weight': it updates only rows.*Use stage 0"):
        found(optimizer, model, by_rows=False)


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_gradient_that_no_layer_announced_is_checked_when_it_comes(by_rows: bool) -> None:
    model = Model()
    gradients = SparseGradients(model, [RowSgd(model.dense.parameters())], by_rows=by_rows)
    with pytest.raises(PlanError, match=r"RowSgd for 'dense.weight': it updates only rows.*stage 0"):
        gradients.check(model.dense.weight)
    SparseGradients(model, [torch.optim.SGD(model.parameters(), 0.1)], by_rows=by_rows).check(model.dense.weight)
