"""Stages on several GPUs, through NCCL, are what Lightning's DDP makes of the same model, data and seeds there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.dist.test_parity import check_parity, error_of
from tests.gpus.suite import NORM, PRECISIONS, STAGES, WITH_KERNELS, case_of, on_and_off, stages_of
from tests.models import Result

DEVICE = "cuda"
CASES: dict[str, dict[str, Any]] = {
    "clipped": NORM,
    "accumulated": {"traits": ("tied", "uneven"), "accumulate": 3},
    "unused here": {"traits": ("unused_here", "frozen")},
}


@pytest.mark.parametrize("name", CASES)
def test_fp32_is_ddp_up_to_the_order_of_sums(ranks: int, name: str) -> None:
    case = case_of(DEVICE, "32-true", **CASES[name])
    found = stages_of(ranks, case)
    for stage in STAGES:
        check_parity(case, found[None], found[stage])


@pytest.fixture(scope="module")
def in_fp32(ranks: int) -> tuple[Result, ...]:
    """The reference of the other precisions: DDP in fp32."""
    return stages_of(ranks, case_of(DEVICE, "32-true", **NORM), ())[None]


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_16_bit_error_is_at_most_twice_ddps(ranks: int, in_fp32: tuple[Result, ...], precision: str) -> None:
    found = stages_of(ranks, case_of(DEVICE, precision, **NORM))
    ddp_loss, ddp_weight = error_of(in_fp32, found[None])
    for stage in STAGES:
        loss, weight = error_of(in_fp32, found[stage])
        assert 0 < loss <= 2 * ddp_loss
        assert 0 < weight <= 2 * ddp_weight


@pytest.mark.parametrize("stage", [1, 3])
def test_without_kernels_no_bit_changes(ranks: int, stage: int) -> None:
    check_kernels(ranks, DEVICE, stage)


def check_kernels(ranks: int, device: str, stage: int) -> None:
    """Train every case of `WITH_KERNELS` with and without kernels, and compare the bits."""
    cases = [replace(case_of(device, **{**NORM, **each}), fused=None).at(stage) for each in WITH_KERNELS.values()]
    (with_kernels, where), (without, elsewhere) = on_and_off(ranks, cases)
    assert (where, elsewhere) == ("native", "reference")
    for ours, reference in zip(with_kernels, without, strict=True):
        assert ours.losses == reference.losses
        assert ours.norms == reference.norms
        assert all(torch.equal(value, reference.weights[name]) for name, value in ours.weights.items())
