"""Loops written with Fabric compute what Fabric's own DDP makes of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from ls_strategy.testing import spawn
from tests.dist import fabric_ranks

BOUND = 1e-6  # equal up to the order of sums
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"accumulate": 2, "max_norm": 0.3, "optimizer": "sgd"},
    "no no_sync": {"accumulate": 2, "no_sync": False, "clip_val": 0.02},
    "apart": {"apart": True, "max_norm": 0.02, "norm_type": float("inf"), "zero_by_module": True},
    "closure": {"closure": True, "method": True},
}
STRATEGIES = ("zero1", "zero2", "zero3", "zero3_offload", "zero3, small units")
FEWER = {"zero0": ("plain",), "zero3, recompute": ("plain", "clip")}
PAIRS = [*((name, case) for case in CASES for name in STRATEGIES), *((n, c) for n, cs in FEWER.items() for c in cs)]


@functools.cache
def trained() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """``(strategy, case) -> result of every rank``, of one start of two ranks."""
    keys = [*(("ddp", case) for case in CASES), *PAIRS]
    jobs = [("train", name, {"case": CASES[case]}) for name, case in keys]
    keys += [(name, "adversarial") for name in ("ddp", "zero1", "zero2", "zero3")]
    jobs += [("adversarial", name, {}) for name in ("ddp", "zero1", "zero2", "zero3")]
    ranks = spawn(fabric_ranks.run, 2, jobs, init_process_group=False, timeout_s=170)
    return dict(zip(keys, map(list, zip(*ranks, strict=True)), strict=True))


def check(ours: dict[str, Any], trusted: dict[str, Any], bound: float = BOUND) -> None:
    assert ours["losses"] == pytest.approx(trusted["losses"], rel=bound)
    assert ours.get("norms", []) == pytest.approx(trusted.get("norms", []), rel=bound)
    assert ours.get("evaluated", 0) == pytest.approx(trusted.get("evaluated", 0), rel=10 * bound)
    assert ours["weights"].keys() == trusted["weights"].keys()
    for key, value in trusted["weights"].items():
        assert float((ours["weights"][key] - value).abs().max()) <= bound * 10, key


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_loop_gives_the_losses_and_weights_of_ddp(name: str, case: str) -> None:
    for ours, trusted in zip(trained()[name, case], trained()["ddp", case], strict=True):
        check(ours, trusted)
        assert len(set(trusted["losses"])) == len(trusted["losses"]) >= 8


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_two_modules_with_losses_through_both(name: str) -> None:
    for ours, trusted in zip(trained()[name, "adversarial"], trained()["ddp", "adversarial"], strict=True):
        check(ours, trusted)
