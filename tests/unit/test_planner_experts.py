"""Plans of layers with experts: rows for all of them, and the layers themselves afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.forecast import Run
from ls_strategy.moe.capacity import capacity_of
from ls_strategy.moe.feed_forward import FeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.precision import resolve_precision

TOKENS, WIDTH, HIDDEN, EXPERTS, K = 24, 8, 16, 4, 2


class Alone(nn.Module):
    """An expert that does not run with all others as one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self, expert: Any, **options: Any) -> None:
        super().__init__()
        self.layer = MoE(WIDTH, expert, EXPERTS, k=K, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()


def question(expert: Any, **options: Any) -> Question:
    module = Net(expert, **options)
    optimizers = [torch.optim.AdamW(module.parameters())]
    return Question(module, optimizers, resolve_precision("32-true"), torch.ones(TOKENS, WIDTH), Run())


@pytest.mark.parametrize("expert", [lambda: FeedForward(WIDTH, HIDDEN, bias=False), Alone], ids=["grouped", "alone"])
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"drop_tokens": False}, TOKENS * K),
        ({"capacity_factor": 1.5}, TOKENS * K),
        ({"capacity_factor": 0.5}, TOKENS * K // 2),
        ({"capacity_factor": 0.01, "min_capacity": 3}, 3 * EXPERTS),
    ],
    ids=["all", "enough for all", "half", "the least"],
)
def test_experts_compute_as_many_rows_as_they_take(expert: Any, options: dict[str, Any], rows: int) -> None:
    """Two products forward and three backward, as the batch needs no gradient; and the router's for every token."""
    with question(expert, **options).forecaster() as forecaster:
        flops = forecaster.trace().flops
    product, router = 2 * rows * WIDTH * HIDDEN, 2 * TOKENS * WIDTH * EXPERTS
    assert flops == 5 * product + 2 * router


def test_a_plan_leaves_the_layers_as_they_were() -> None:
    """What stands in for a router is gone after the plan."""
    asked = question(Alone)
    before = {name: set(vars(m)) for name, m in asked.module.named_modules()}
    with asked.forecaster() as forecaster:
        forecaster.trace()
    assert {name: set(vars(m)) for name, m in asked.module.named_modules()} == before


@pytest.mark.parametrize("tokens", [1, 7, 10, 1000, 12345, 98304])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.1, 1.25, 3.3])
def test_a_capacity_is_that_of_fp32(tokens: int, factor: float) -> None:
    """Without a tensor, as the planner has none with values."""
    even = torch.tensor(factor, dtype=torch.float32) * (tokens / EXPERTS)
    assert capacity_of(tokens, EXPERTS, factor, 4) == max(int(even.ceil()), 4)
