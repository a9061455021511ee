"""This rank's own gradients: what happens to ``p.grad`` before, while and after they are sent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import grad_of, set_grad
from tests.unit.flat_buffers import flat_of

BF16 = torch.bfloat16


def flat(stage: int, dtype: torch.dtype = torch.float32) -> FlatBuffer:
    return flat_of(nn.Linear(3, 2), "layer", stage, dtype=dtype)  # type: ignore[arg-type]


def random_like(p: Tensor) -> Tensor:
    return torch.randn(p.shape).to(p.dtype)


def test_a_buffer_from_the_pool_has_zeros_between_the_slots_of_its_parameters() -> None:
    buffer = flat(2)
    used = buffer.comm.pool.take(buffer.layout.numel, torch.float32, torch.device("cpu"))
    buffer.comm.pool.give([used.fill_(float("nan"))])
    buffer.local.allocate(torch.float32)
    assert [view.shape for view in buffer.local.views] == [p.shape for p in buffer.params]
    assert buffer.local.buffer is not None
    gaps = buffer.layout.gaps()
    assert gaps
    assert all(not buffer.local.buffer[lo:hi].any() for lo, hi in gaps)


def test_a_step_makes_no_new_views_unless_user_code_has_moved_one() -> None:
    local = flat(2).local
    local.allocate(torch.float32)
    first = local.views
    local.free()
    local.allocate(torch.float32)
    assert all(again is view for again, view in zip(local.views, first, strict=True))
    shown = local.shown_view(0)
    shown.data = torch.ones_like(shown)
    local.free()
    local.allocate(torch.float32)
    assert local.buffer is not None
    assert local.views[0].data_ptr() == local.buffer.data_ptr()


def test_added_gradients_are_summed_and_leave_p_grad() -> None:
    buffer = flat(2)
    first, second = (random_like(buffer.params[0]) for _ in range(2))
    for grad in (first, second):
        set_grad(buffer.params[0], grad)
        buffer.local.add(0, grad, torch.float32)
    assert torch.equal(buffer.local.views[0], first + second)
    assert grad_of(buffer.params[0]) is None


def test_slots_without_a_gradient_are_zeros_when_they_are_sent() -> None:
    buffer = flat(2)
    buffer.local.add(0, random_like(buffer.params[0]), torch.float32)
    buffer.local.views[1].fill_(float("nan"))
    buffer.local.complete()
    assert not buffer.local.views[1].any()


def test_late_gradients_are_added_when_they_are_sent() -> None:
    buffer = flat(2)
    grads = [random_like(p) for p in (*buffer.params, buffer.params[0])]
    buffer.local.add(0, grads[0], torch.float32)
    set_grad(buffer.params[0], grads[2])
    set_grad(buffer.params[1], grads[1])
    buffer.local.complete()
    assert torch.equal(buffer.local.views[0], grads[0] + grads[2])
    assert torch.equal(buffer.local.views[1], grads[1])


def replaced(stage: int) -> tuple[FlatBuffer, Tensor]:
    buffer = flat(stage)
    buffer.local.allocate(torch.float32)
    assert buffer.local.take_replaced(0), "p.grad is None"
    other = random_like(buffer.params[0])
    set_grad(buffer.params[0], other)
    assert not buffer.local.take_replaced(0)
    return buffer, other


@pytest.mark.parametrize("stage", [0, 1])
def test_a_tensor_that_user_code_assigns_stays_p_grad_at_stage_0_and_is_copied_at_stage_1(stage: int) -> None:
    buffer, other = replaced(stage)
    slot = buffer.local.views[0]
    assert grad_of(buffer.params[0]) is (slot if stage else other)
    assert torch.equal(other, slot)
    assert (other.data_ptr() == slot.data_ptr()) == (stage == 0)


@pytest.mark.parametrize("dropped", [False, True])
def test_an_assigned_tensor_keeps_its_values_when_it_is_given_back_or_p_grad_becomes_none(dropped: bool) -> None:
    buffer, other = replaced(0)
    before = other.clone()
    if dropped:
        set_grad(buffer.params[0], None)
        assert buffer.local.take_replaced(0)
    else:
        buffer.local.give_back([0])
    buffer.local.views[0].zero_()
    assert torch.equal(other, before)


def test_a_second_assigned_tensor_moves_the_first_out_of_the_slot() -> None:
    buffer, first = replaced(0)
    before = first.clone()
    second = random_like(first)
    set_grad(buffer.params[0], second)
    buffer.local.take_replaced(0)
    assert torch.equal(first, before)
    assert torch.equal(buffer.local.views[0], second)


def test_the_slot_of_another_parameter_is_copied_and_not_adopted() -> None:
    buffer = flat_of(nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(2)]), "p", 0)
    buffer.local.allocate(torch.float32)
    buffer.local.views[0].fill_(3.0)
    set_grad(buffer.params[1], buffer.local.views[0])
    buffer.local.take_replaced(1)
    buffer.local.views[0].zero_()
    assert buffer.local.views[1].tolist() == [3.0, 3.0]


def test_data_that_user_code_has_moved_returns_to_the_slot() -> None:
    buffer = flat(1)
    buffer.local.allocate(torch.float32)
    buffer.local.show(0)
    slot = buffer.local.views[0].data_ptr()
    grad_of(buffer.params[0]).data = torch.ones(buffer.params[0].shape)  # type: ignore[union-attr]
    buffer.local.take_replaced(0)
    assert buffer.local.views[0].data_ptr() == slot
    assert bool((buffer.local.views[0] == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_collected_gradients_are_views_of_the_buffer_and_a_wide_one_has_the_same_values(dtype: torch.dtype) -> None:
    buffer = flat(1, dtype)
    grad = random_like(buffer.params[0])
    set_grad(buffer.params[0], grad)
    buffer.local.collect(0, grad, dtype)
    assert grad_of(buffer.params[0]) is buffer.local.views[0]
    assert torch.equal(buffer.local.views[0], grad)
    buffer.local.widen()
    found = grad_of(buffer.params[0])
    assert found is not None
    assert found.dtype == torch.float32
    assert torch.equal(found, grad.float())


def test_another_loss_scale_converts_the_gradients_so_far() -> None:
    buffer = flat(2)
    grad = random_like(buffer.params[0])
    buffer.local.add(0, grad, torch.float32)
    buffer.local.rescale(8.0)
    assert torch.equal(buffer.local.views[0], grad * 8)
    assert buffer.local.scale == 8.0


def test_the_newest_gradient_is_not_counted_among_the_others() -> None:
    buffer = flat(1)
    set_grad(buffer.params[0], random_like(buffer.params[0]))
    assert not buffer.local.has_others(than=0)
    assert buffer.local.has_others(than=1)


def test_gradients_that_came_while_others_were_in_flight_are_added() -> None:
    buffer = flat(1)
    local = buffer.local
    local.allocate(torch.float32)
    local.views[0].fill_(2.0)
    local.sent_mask = [True, False]
    late = random_like(buffer.params[0])
    set_grad(buffer.params[0], late)
    local.show_sent()
    assert torch.equal(local.views[0], late + 2)
    assert local.dirty
    assert grad_of(buffer.params[1]) is None


def test_gradients_of_an_earlier_engine_are_taken_with_their_scale() -> None:
    buffer = flat(1)
    grad = random_like(buffer.params[1])
    set_grad(buffer.params[1], grad)
    buffer.local.take_held({id(p): 4.0 for p in buffer.params})
    assert (buffer.local.scale, buffer.local.mask, buffer.local.dirty) == (4.0, [False, True], True)
    assert torch.equal(buffer.local.views[1], grad)


@pytest.mark.parametrize("mask", ["filled", "sent_mask", "mask"])
def test_forgotten_gradients_are_in_no_mask(mask: str) -> None:
    buffer = flat(2)
    setattr(buffer.local, mask, [True, True])
    buffer.local.forget()
    assert getattr(buffer.local, mask) == [False, False]
