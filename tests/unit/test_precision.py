"""Precision policies, and the loss scale against tables of DeepSpeed's ``DynamicLossScaler``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ls_strategy.config import LossScaleConfig
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.loss_scale import LossScaler
from ls_strategy.precision import PRECISIONS, resolve_precision

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "compute", "master", "autocast", "scaled"),
    [
        ("32-true", FP32, FP32, None, False),
        ("bf16-mixed", FP32, FP32, BF16, False),
        ("16-mixed", FP32, FP32, FP16, True),
        ("bf16-true", BF16, FP32, None, False),
        ("16-true", FP16, FP32, None, True),
        ("64-true", FP64, FP64, None, False),
    ],
)
def test_policy_of_each_precision(name, compute, master, autocast, scaled) -> None:
    policy = resolve_precision(name)
    assert (policy.compute, policy.master, policy.autocast, policy.loss_scaling) == (compute, master, autocast, scaled)
    assert policy.reduce_in_fp32


def test_the_table_names_every_precision() -> None:
    assert set(PRECISIONS) == {"32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"}


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16-true", BF16), ("16-true", FP16), ("32-true", FP32), ("64-true", FP64)]
)
def test_without_masters_the_optimizer_works_in_the_computes_dtype(name, dtype) -> None:
    policy = resolve_precision(name, master_weights=False, reduce_dtype="compute")
    assert policy.master == policy.compute == dtype
    assert not policy.reduce_in_fp32


@pytest.mark.parametrize("name", ["64-mixed", "fp8", "bf16", "16-", "", "transformer-engine"])
def test_other_precisions_are_refused_with_the_list(name) -> None:
    with pytest.raises(ConfigError, match="32-true, bf16-mixed, 16-mixed, bf16-true, 16-true, 64-true"):
        resolve_precision(name)


def scales(config: LossScaleConfig, steps: str) -> list[float]:
    """Scale after every step; ``.`` is a good one, ``x`` an overflow."""
    scaler = LossScaler(config)
    result: list[float] = []
    for step in steps:
        scaler.update(step == "x")
        result.append(scaler.scale)
    return result


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        # the scale doubles after `window` good steps in a row
        ({"window": 3, "hysteresis": 1}, "......", [8, 8, 16, 16, 16, 32]),
        ({"window": 1, "hysteresis": 1}, "...", [16, 32, 64]),
        # an overflow halves it and starts the count again
        ({"window": 3, "hysteresis": 1}, "..x..x...", [8, 8, 4, 4, 4, 2, 2, 2, 4]),
        # hysteresis 2: the first overflow is tolerated, every further one halves
        ({"window": 9, "hysteresis": 2}, "xxx", [8, 4, 2]),
        ({"window": 9, "hysteresis": 3}, "xxxx", [8, 8, 4, 2]),
        # good steps do not refill the tolerance ...
        ({"window": 9, "hysteresis": 2}, "x.x.x", [8, 8, 4, 4, 2]),
        # ... but doubling does
        ({"window": 2, "hysteresis": 2}, "x..x..xx", [8, 8, 16, 16, 16, 32, 32, 16]),
        # consecutive hysteresis: every good step refills it
        ({"window": 9, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.xx", [8, 8, 8, 8, 8, 4]),
        # never below the smallest scale
        ({"window": 9, "hysteresis": 1, "min_scale": 3.0}, "xx", [4, 3]),
        # a static scale is one
        ({"static": 128.0}, "..xx.", [128] * 5),
    ],
)
def test_scale_follows_the_table(options, steps, expected) -> None:
    assert scales(LossScaleConfig(initial_power=3, **options), steps) == expected


def test_overflow_at_the_smallest_scale_is_an_error() -> None:
    scaler = LossScaler(LossScaleConfig(initial_power=1, hysteresis=1, min_scale=1.0))
    scaler.update(overflow=True)
    assert scaler.scale == 1.0
    with pytest.raises(StateError, match="already at its minimum"):
        scaler.update(overflow=True)


@given(
    steps=st.text(".....x", min_size=1, max_size=60),
    cut=st.integers(0, 60),
    window=st.integers(1, 7),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
)
def test_a_restored_scaler_goes_on_as_if_nothing_had_happened(steps, cut, window, hysteresis, consecutive) -> None:
    config = LossScaleConfig(
        initial_power=80, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, min_scale=1e-30
    )
    first = LossScaler(config)
    for step in steps[:cut]:
        first.update(step == "x")
    second = LossScaler(config)
    second.load_state_dict(first.state_dict())
    for step in steps[cut:]:
        first.update(step == "x")
        second.update(step == "x")
    assert second.state_dict() == first.state_dict()


def test_the_scale_of_a_torch_grad_scaler_is_taken_over() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0)
    theirs._lazy_init_scale_growth_tracker(torch.device("cpu"))
    state = theirs.state_dict() | {"_growth_tracker": 7}
    ours = LossScaler(LossScaleConfig())
    ours.load_state_dict(state)
    assert (ours.scale, ours.good_steps, ours.hysteresis_left) == (512.0, 7, 2)
