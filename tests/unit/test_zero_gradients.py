"""What user code sees as ``p.grad`` after backward, and which of its changes reach the averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.errors import StateError
from ls_strategy.zero.flat.parameters import grad_of
from ls_strategy.zero.user_code.gradients import KEPT, Gradients
from ls_strategy.zero.user_code.sharded_gradient import ShardedGradient
from tests.unit.flat_buffers import Sharded, sharded

X = torch.tensor([[0.5, -1.0, 2.0]])


class Shown:
    """A model after a backward, whose ``p.grad`` is provided as by an engine."""

    def __init__(self, stage: int, parallel: str = "") -> None:
        self.model: Sharded = sharded(stage)  # type: ignore[arg-type]
        self.model.attach()
        flats, reducer = self.model.flats, self.model.reducer
        self.gradients = Gradients(
            flats,
            lambda _: reducer.complete(flats),
            lambda _: None,
            self.model.on_demand,
            parallel=parallel,
        )
        self.backward()

    def backward(self) -> None:
        self.gradients.take_all()
        self.model.reducer.begin_backward(eager=True)
        self.model.net(X).square().sum().backward()
        self.model.reducer.end_backward()

    def weight(self, block: int = 0) -> nn.Parameter:
        return self.model.net.blocks[block].weight  # type: ignore[return-value]

    def average(self, block: int = 0) -> Tensor:
        self.model.reducer.finish_in_flight()
        flat = self.model.flats[1 + block]
        return flat.split(flat.averages.tensor())[0]


@pytest.fixture(params=[1, 2, 3])
def shown(request: pytest.FixtureRequest) -> Shown:
    return Shown(request.param)


def grad(shown: Shown, block: int = 0) -> Tensor:
    found = shown.weight(block).grad
    assert found is not None
    return found


def test_at_stage_0_grad_is_the_tensor_of_autograd() -> None:
    shown = Shown(0)
    assert grad(shown) is grad_of(shown.weight())


def test_grad_is_the_average_and_the_same_object_every_time(shown: Shown) -> None:
    before = shown.average().clone()
    assert torch.equal(grad(shown).clone(), before)
    assert grad(shown) is grad(shown)


CHEAP: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "scaled": lambda g: g.mul_(2),
    "clamped": lambda g: g.clamp_(-1, 1),
    "shape": lambda g: g.shape,
}


@pytest.mark.parametrize("name", CHEAP)
def test_norms_and_scalings_gather_nothing(shown: Shown, name: str) -> None:
    CHEAP[name](grad(shown))
    assert type(grad(shown)) is ShardedGradient


def test_a_scaled_gradient_is_a_scaled_average_with_a_scaled_norm(shown: Shown) -> None:
    before, norm = shown.average().clone(), grad(shown).norm()
    grad(shown).mul_(-2)
    assert torch.equal(shown.average(), before * -2)
    assert torch.allclose(grad(shown).norm(), norm * 2)


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, 3.0, float("inf"), float("-inf")])
def test_norms_are_those_of_the_elements(shown: Shown, order: float) -> None:
    expected = torch.linalg.vector_norm(shown.average().flatten(), order)
    assert torch.allclose(torch.linalg.vector_norm(grad(shown), order), expected)


def test_written_elements_reach_the_averages_and_others_do_not_change(shown: Shown) -> None:
    before = shown.average().clone()
    grad(shown).clone()
    shown.gradients.take(0)
    assert torch.equal(shown.average(), before)
    grad(shown)[0, 0] = 7.0
    assert shown.gradients.take(0)
    before[0, 0] = 7.0
    assert torch.equal(shown.average(), before)


def test_an_assigned_gradient_is_the_average_and_shows_what_the_engine_does_to_it(shown: Shown) -> None:
    given = torch.full((3, 3), 4.0)
    shown.weight().grad = given
    assert grad(shown) is given
    shown.gradients.take(0)
    assert bool((shown.average() == 4).all())
    shown.model.flats[1].averages.change(lambda grads: grads.mul_(0.5))
    assert grad(shown) is given
    assert bool((given == 2).all())


def test_a_gradient_of_another_shape_is_an_error_with_the_cure(shown: Shown) -> None:
    with pytest.raises(StateError, match=r"Got a gradient of shape \(1,\) for 'blocks.0.weight'"):
        shown.weight().grad = torch.zeros(1)


def test_a_dropped_gradient_is_none_and_zero_in_the_averages_and_the_kept_one_an_error(shown: Shown) -> None:
    kept = grad(shown)
    shown.weight().grad = None
    assert shown.weight().grad is None
    with pytest.raises(StateError, match=r"was used after zero_grad.*Keep p\.grad\.clone\(\)"):
        kept.sum()
    used = [True] * 8
    assert shown.gradients.take(0, used)
    assert used[2:4] == [False, True]
    assert not shown.average().any()


@pytest.mark.parametrize("by_view", [False, True], ids=["read again", "written to by a view"])
def test_a_gradient_that_was_read_stays_valid_after_the_engine_has_changed_it(shown: Shown, by_view: bool) -> None:
    """But not a view of it."""
    kept = grad(shown)
    view = kept.view(-1)
    shown.gradients.take(0)
    shown.model.flats[1].averages.change(lambda grads: grads.mul_(0.5))
    if not by_view:
        assert torch.equal(kept.clone(), shown.average())
        return
    view.mul_(2)
    with pytest.raises(StateError, match=r"a view of blocks\.0\.weight\.grad.*Write to p\.grad itself"):
        shown.gradients.take(0)


def test_reading_all_gradients_keeps_only_the_last_gathered(shown: Shown) -> None:
    for p in shown.model.net.parameters():
        assert p.grad is not None
        p.grad.clone()
    current = [type(p.grad) is not ShardedGradient for p in shown.model.net.parameters()]
    assert current == [False] * 4 + [True] * 4
    assert KEPT == 2


def test_without_changes_take_reports_none(shown: Shown) -> None:
    grad(shown).norm()
    assert not shown.gradients.take(0)


def test_forgotten_gradients_cannot_be_used(shown: Shown) -> None:
    kept = grad(shown)
    shown.gradients.forget(0, set_to_none=True)
    with pytest.raises(StateError, match="was used after"):
        kept.sum()


def test_gradients_set_to_zero_stay_objects(shown: Shown) -> None:
    kept = grad(shown)
    kept.clone()
    shown.gradients.forget(0, set_to_none=False)
    shown.model.reducer.zero_grad(shown.model.flats, set_to_none=False)
    assert not kept.clone().any()


def test_under_model_parallelism_reading_is_an_error_with_the_cure() -> None:
    shown = Shown(2, parallel="tensor")
    with pytest.raises(StateError, match=r"read under tensor parallelism.*norms over its parameters.*grad_norm\(\)"):
        _ = shown.weight().grad


def test_local_gradients_are_those_of_this_rank() -> None:
    shown = Shown(1)
    shown.gradients.local = True
    assert grad(shown) is grad_of(shown.weight())


def test_an_old_gradient_in_a_local_micro_batch_is_an_error_with_the_cure(shown: Shown) -> None:
    kept = grad(shown)
    shown.gradients.local = True
    with pytest.raises(StateError, match=r"gradient in the buffer of 'blocks.0.weight' that was kept.*p\.grad\.clone"):
        kept.sum()


def test_at_stage_1_a_second_backward_adds_to_the_changed_average() -> None:
    shown = Shown(1)
    before = shown.average().clone()
    grad(shown).mul_(3)
    shown.backward()
    assert torch.allclose(shown.average(), before * 4)
