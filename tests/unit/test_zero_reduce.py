"""The reducer: when and in which order units are sent, and what their averages are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import grad_of
from ls_strategy.zero.flat.states import UpdateState
from tests.unit.flat_buffers import Sharded, sharded

X = torch.tensor([[0.5, -1.0, 2.0]])


def model_of(stage: int, **options: Any) -> Sharded:
    """A model whose gradients autograd hands to the reducer."""
    model = sharded(stage, **options)  # type: ignore[arg-type]
    model.attach()
    return model


def backward(model: Sharded, *, eager: bool = True, factor: float = 1.0, loss_scale: float = 1.0) -> None:
    model.reducer.begin_backward(eager=eager, loss_scale=loss_scale)
    (model.net(X).square().sum() * factor * loss_scale).backward()
    model.reducer.end_backward()


def expected(factor: float = 1.0) -> list[Tensor]:
    net = sharded(1).net
    plain = [p.detach().clone().requires_grad_(True) for p in net.parameters()]
    named = dict(zip(dict(net.named_parameters()), plain, strict=True))
    (torch.func.functional_call(net, named, (X,)).square().sum() * factor).backward()
    return [p.grad for p in plain if p.grad is not None]


def averages(model: Sharded) -> list[Tensor]:
    model.reducer.finish_in_flight()
    return [v for flat in model.flats for v in flat.split(flat.averages.tensor() * flat.averages.unscale)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the buffers in the order in which they are sent."""
    names: list[str] = []
    plain = Comm.reduce_scatter

    def noted(self: Comm, full: Tensor, dtype: Any = None, of: str = "", *args: Any, **options: Any) -> Any:
        names.append(of.removesuffix(".weight"))
        return plain(self, full, dtype, of, *args, **options)

    monkeypatch.setattr(Comm, "reduce_scatter", noted)
    return names


@pytest.mark.parametrize(
    ("stage", "factors", "eager"),
    [
        *((stage, [1.0], True) for stage in (0, 1, 2, 3)),
        *((stage, [0.25, 0.75], stage >= 2) for stage in (0, 1, 2, 3)),
        *((stage, [0.25, 0.75], True) for stage in (0, 1)),  # resident gradients are sent twice, and count once
    ],
)
def test_gradients_are_those_of_plain_torch(stage: int, factors: list[float], eager: bool) -> None:
    model = model_of(stage)
    for i, factor in enumerate(factors, 1):
        backward(model, eager=eager or i == len(factors), factor=factor)
    torch.testing.assert_close(averages(model), expected())


def test_units_are_sent_while_backward_runs(sent: list[str]) -> None:
    model, at_the_input = model_of(2), []
    x = X.clone().requires_grad_(True)
    x.register_hook(lambda _: at_the_input.extend(sent))
    model.reducer.begin_backward(eager=True)
    model.net(x).sum().backward()
    model.reducer.end_backward()
    assert at_the_input[:3] == ["blocks.2", "blocks.1", "blocks.0"]


def test_stage_1_sends_nothing_before_the_last_micro_batch(sent: list[str]) -> None:
    model = model_of(1)
    backward(model, eager=False)
    assert sent == []
    backward(model)
    assert len(sent) == 4


def test_complete_sends_what_backward_has_not_sent_and_says_what_has_a_gradient(sent: list[str]) -> None:
    model = model_of(1)
    model.reducer.begin_backward(eager=False)
    model.net.first(X).sum().backward()
    model.reducer.end_backward()
    assert model.reducer.complete(model.flats) == [True, True] + [False] * 6
    assert sent == ["first"]
    model = model_of(1)
    backward(model, eager=False)
    model.reducer.complete(model.flats)
    assert len(sent[1:]) == 4


def test_a_unit_without_gradients_is_sent_at_the_end_with_zeros(sent: list[str]) -> None:
    model = model_of(2)
    model.reducer.begin_backward(eager=True)
    model.net.first(X).sum().backward()
    assert sent == []
    model.reducer.end_backward()
    assert sent == ["blocks.2", "blocks.1", "blocks.0", "first"]
    assert not any(bool(each.any()) for each in averages(model)[2:])


def test_units_are_sent_and_reported_in_reverse_order_of_registration(sent: list[str]) -> None:
    model, early = model_of(2), []

    def note(flat: FlatBuffer) -> None:
        early.append(flat.name.removesuffix(".weight"))

    model.reducer.on_complete = note
    backward(model)
    assert early == sent == ["blocks.2", "blocks.1", "blocks.0", "first"]


@pytest.mark.parametrize("stage", [1, 2])
def test_p_grad_after_backward_is_a_view_of_the_buffer_at_stage_1_only(stage: int) -> None:
    model = model_of(stage)
    backward(model)
    for flat in model.flats:
        assert [grad_of(p) for p in flat.params] == (flat.local.views if stage == 1 else [None, None])


def test_held_micro_batches_are_sent_once(sent: list[str]) -> None:
    model = model_of(2)
    model.reducer.holds = True
    for factor in (0.25, 0.75):
        backward(model, eager=False, factor=factor)
    assert sent == []
    model.reducer.send_held()
    assert len(sent) == 4
    torch.testing.assert_close(averages(model), expected())


def test_a_gradient_of_another_rank_counts() -> None:
    """The parameter is stepped on all ranks, with an average in which this rank has no part."""

    class WithAnother(Comm):
        def agree(self, values: Tensor, op: Any = None) -> Tensor:
            values[1] = 1  # the other rank has used the first layer's bias
            return values

    model = model_of(2)
    model.reducer.comm = WithAnother(None, None)
    assert model.reducer.complete(model.flats) == [False, True] + [False] * 6


def test_a_gradient_that_user_code_has_set_is_averaged() -> None:
    model = model_of(0)
    model.flats[0].params[1].grad = torch.full((3,), 2.0)
    assert model.reducer.complete(model.flats[:1]) == [False, True]
    assert model.flats[0].averages.tensor()[model.flats[0].layout.slots[1].offset] == 2.0


def test_a_gradient_that_user_code_has_dropped_is_zero_in_the_averages() -> None:
    model = model_of(1)
    backward(model)
    model.flats[0].params[0].grad = None
    assert model.reducer.complete(model.flats)[:2] == [False, True]
    assert not averages(model)[0].any()
    assert averages(model)[1].any()


def test_unscaled_gradients_on_scaled_ones_are_an_error_with_the_cure() -> None:
    model = model_of(1)
    backward(model, loss_scale=4.0)
    with pytest.raises(StateError, match=r"loss\.backward\(\) was called while the loss scale of fp16 is 4.*manual_ba"):
        model.net(X).sum().backward()


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_grad_drops_every_gradient(stage: int) -> None:
    model = model_of(stage)
    backward(model)
    model.reducer.zero_grad(model.flats, set_to_none=True)
    assert all(grad_of(p) is None for p in model.net.parameters())
    assert model.reducer.complete(model.flats) == [False] * 8
    backward(model, factor=3.0)
    torch.testing.assert_close(averages(model), expected(3.0))


def test_zero_grad_to_zeros_keeps_p_grad() -> None:
    model = model_of(1)
    backward(model)
    model.reducer.zero_grad(model.flats, set_to_none=False)
    found = grad_of(model.flats[0].params[0])
    assert found is not None
    assert not found.any()
    assert not any(bool(each.any()) for each in averages(model))


def test_gradients_of_single_parameters_are_dropped() -> None:
    model = model_of(2)
    backward(model)
    model.reducer.zero_params(model.flats, {id(model.flats[0].params[0])}, set_to_none=True)
    assert model.reducer.complete(model.flats)[:2] == [False, True]
    assert not averages(model)[0].any()


def test_another_gradient_after_an_early_update_is_an_error_with_the_cure() -> None:
    model = model_of(2)
    backward(model)
    model.flats[0].update = UpdateState.UPDATED_EARLY
    with pytest.raises(StateError, match=r"'first.weight' got another gradient after.*overlap_step=False"):
        averages(model)


def test_an_aborted_backward_leaves_nothing_in_flight() -> None:
    model = model_of(2)
    model.reducer.begin_backward(eager=True)
    model.net(X).sum().backward()
    model.reducer.abort()
    assert model.reducer.abandoned > 0
    assert all(flat.local.reducing is None for flat in model.flats)
