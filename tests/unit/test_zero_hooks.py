"""Hooks on modules and autograd: what forward and backward gather and release."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.zero.flat.parameters import grad_of
from ls_strategy.zero.passes.hooks import _tensors
from tests.unit.flat_buffers import Sharded, sharded

X = torch.tensor([[0.5, -1.0, 2.0]])


@pytest.fixture
def model() -> Sharded:
    made = sharded(3, prefetch_units=0)
    made.attach()
    return made


def gathered(model: Sharded) -> list[str]:
    return [unit.name for unit in model.units if unit.flats[0].is_gathered]


@pytest.mark.parametrize("gradients", [True, False])
def test_a_forward_releases_every_block_but_the_last(model: Sharded, gradients: bool) -> None:
    """Without gradients the last one, too."""
    expected = sharded(1).net(X)
    with torch.set_grad_enabled(gradients):
        assert torch.equal(model.net(X), expected)
    assert gathered(model) == ["first", "blocks.2"][: 1 + gradients]


def test_a_backward_gathers_and_releases_every_block(model: Sharded) -> None:
    model.reducer.begin_backward(eager=True)
    model.net(X).sum().backward()
    model.reducer.end_backward()
    model.reducer.finish_in_flight()
    assert gathered(model) == ["first"]
    assert all(flat.averages.tensor().any() for flat in model.flats)


def test_a_unit_without_outputs_that_need_gradients_stays(model: Sharded) -> None:
    block = model.net.blocks[0]
    block.forward = lambda x: x.detach()
    block(X)
    assert model.units[1].pinned
    assert gathered(model) == ["blocks.0"]


def test_a_frozen_unit_is_released_unless_its_inputs_need_gradients(model: Sharded) -> None:
    block = model.net.blocks[0]
    block.requires_grad_(False)
    block(X)
    assert gathered(model) == []
    block.forward = lambda x: x.detach()
    block(X.clone().requires_grad_())
    assert model.units[1].pinned
    assert gathered(model) == ["blocks.0"]


def test_a_block_whose_input_needs_no_gradient_is_released_with_its_last_gradient(model: Sharded) -> None:
    model.reducer.begin_backward(eager=True)
    model.net.blocks[0](X).sum().backward()
    assert gathered(model) == []


def test_detached_and_copied_hooks_do_nothing(model: Sharded) -> None:
    copied = copy.deepcopy(next(iter(model.net.blocks[0]._forward_pre_hooks.values())))
    assert copied(None, None) is None
    assert gathered(model) == []
    assert model.hooks is not None
    model.hooks.detach()
    model.gatherer.fetch(model.units[1])
    model.net.blocks[0](X).sum().backward()
    assert gathered(model) == ["blocks.0"]
    assert grad_of(model.flats[1].params[0]) is not None


def test_hooks_do_not_keep_the_model_alive(model: Sharded) -> None:
    assert all(unit.modules == [] for unit in model.units)


def test_tensors_in_containers_are_found() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert [t.item() for t in _tensors({"a": [a], "b": (b, 1)})] == [0.0, 1.0]


class Twice(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def test_a_block_that_is_called_twice_is_released_after_its_first_call_s_backward(model: Sharded) -> None:
    x = X.clone().requires_grad_(True)
    Twice(model.net.blocks[0])(x).sum().backward()
    assert gathered(model) == []
    assert x.grad is not None
