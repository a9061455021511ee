"""Gradients of parameters that no optimizer steps: averaged when user code reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy.distributed.comm import Comm
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import set_grad
from ls_strategy.zero.user_code.unstepped import Unstepped
from tests.unit.flat_buffers import flat_of


class TwoRanks(Comm):
    """One rank of two; the other one has the same gradients, times three."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.world_size = 2
        self.reductions = 0

    def agree(self, values: Tensor, op: Any = None) -> Tensor:
        """The other rank agrees."""
        return values


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    comm = TwoRanks()

    def all_reduce(values: Tensor, group: Any = None) -> None:
        comm.reductions += 1
        values.mul_(4)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return comm


def frozen() -> tuple[nn.Linear, FlatBuffer]:
    layer = nn.Linear(3, 2)
    return layer, flat_of(layer, "layer", 1, frozen=True)


@pytest.mark.parametrize(("local", "expected"), [(False, 2), (True, 1)])
def test_a_gradient_is_averaged_when_it_is_read_unless_it_stays_on_its_rank(
    comm: TwoRanks, local: bool, expected: int
) -> None:
    layer, flat = frozen()
    Unstepped([flat], comm, lambda: local)
    set_grad(layer.weight, torch.ones(2, 3))
    assert comm.reductions == 0
    assert bool((layer.weight.grad == expected).all())
    assert comm.reductions == (not local)


def test_a_buffer_is_averaged_once_for_each_backward(comm: TwoRanks) -> None:
    layer, flat = frozen()
    unstepped = Unstepped([flat], comm, lambda: False)
    for p in layer.parameters():
        set_grad(p, torch.ones(p.shape))
    for p in layer.parameters():
        _ = p.grad
    assert comm.reductions == 1
    unstepped.outdate()
    _ = layer.weight.grad
    assert comm.reductions == 2


def test_a_gradient_of_another_rank_alone_shows(comm: TwoRanks) -> None:
    layer, flat = frozen()
    Unstepped([flat], comm, lambda: False)
    comm.agree = lambda values, op=None: torch.ones_like(values)  # type: ignore[method-assign]
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (2, 3)


def test_an_assigned_gradient_is_kept(comm: TwoRanks) -> None:
    layer, flat = frozen()
    Unstepped([flat], comm, lambda: False)
    layer.weight.grad = torch.full((2, 3), 5.0)
    assert bool((layer.weight.grad == 5).all())


def test_buffers_of_an_optimizer_are_left_to_it(comm: TwoRanks) -> None:
    flat = flat_of(nn.Linear(3, 2), "layer", 1)
    Unstepped([flat], comm, lambda: False)
    assert flat.gradients is None
