"""Norms, overflow and clipping of averaged gradients, over several flat buffers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.distributed.comm import Comm
from ls_strategy.engine import Engine
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.step.global_norm import any_overflow, clip_factor, clip_value_, global_norm, scale_
from tests.unit.one_rank import ShelfTier, adamw, backward, engine_on, network

ALONE = Comm(None, None)


def with_gradients(offload: str | None) -> tuple[Engine, list[Tensor], nn.Module]:
    """Return an engine after a backward pass, the gradients of a plain model, and the model."""
    model, baseline = network(), network()
    engine = engine_on(model, [adamw(model.parameters())], stage=1, offload=offload)
    backward(engine, 0)
    engine.finish(0)
    baseline(torch.randn(4, 24, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    return engine, [p.grad for p in baseline.parameters() if p.grad is not None], model


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_a_norm_of_any_order_is_that_of_all_elements(order: float, offload: str | None) -> None:
    engine, grads, _model = with_gradients(offload)
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), order)
    torch.testing.assert_close(global_norm(engine.flats, ALONE, order), expected)


def test_copies_of_an_earlier_rank_count_there() -> None:
    """Replicated parameters of tensor-parallel ranks: the first of them counts their gradients."""
    engine, _, _model = with_gradients(None)
    flat = engine.flats[0]
    flat.axis.rank = 1
    plan = replace(flat.plan, copies=2)
    copy = FlatBuffer(plan, flat.params, policy=flat.policy, comm=flat.comm, axis=flat.axis)
    copy.full, copy.averages = flat.full, flat.averages
    assert global_norm([copy, *engine.flats[1:]], ALONE) == global_norm(engine.flats[1:], ALONE) > 0


def test_the_norm_of_nothing_is_zero() -> None:
    assert global_norm([], ALONE) == 0
    assert global_norm([], ALONE, math.inf) == 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_number_that_is_not_finite_is_an_overflow(value: float) -> None:
    engine, _, _model = with_gradients("cpu")
    assert not any_overflow([flat.averages.sums() for flat in engine.flats], ALONE)

    def spoil(grads: Tensor) -> None:
        grads[3] = value

    engine.flats[1].averages.change(spoil)
    assert any_overflow([flat.averages.sums() for flat in engine.flats], ALONE)


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_scaling_scales_the_norm(offload: str, shelves: list[ShelfTier]) -> None:
    engine, _, _model = with_gradients(offload)
    assert engine.flats[0].averages.on_nvme is (offload == "nvme")
    before = global_norm(engine.flats, ALONE)
    for flat in engine.flats:
        scale_(flat, torch.tensor(0.25))
    torch.testing.assert_close(global_norm(engine.flats, ALONE), before * 0.25)


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_gradients_set_to_zero_leave_the_norm(offload: str, shelves: list[ShelfTier]) -> None:
    engine, _, _model = with_gradients(offload)
    others = global_norm(engine.flats[1:], ALONE)
    assert global_norm(engine.flats, ALONE) > others
    engine.flats[0].averages.zero()
    assert global_norm(engine.flats, ALONE) == others


def test_values_are_clamped() -> None:
    engine, _, _model = with_gradients("cpu")
    clip_value_(engine.flats, 1e-5)
    assert global_norm(engine.flats, ALONE, math.inf) == pytest.approx(1e-5)


@pytest.mark.parametrize("norm", [0.5, 2.0, math.inf])
def test_the_factor_is_that_of_torch(norm: float) -> None:
    grad = torch.tensor([norm])
    factor = clip_factor(grad[0], 1.0)
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.ones(1) * norm
    nn.utils.clip_grad_norm_([param], 1.0)
    torch.testing.assert_close(grad * (1.0 if factor is None else factor), param.grad, equal_nan=True)
