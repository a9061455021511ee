"""What users do besides training a plain model, on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.dist.ranks import assert_close, assert_equal
from tests.gpu.programs import FEATURES, METERED, MONITORED, SAVED
from tests.gpu.run import each, result, run

LIMIT_S = 200
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Every program, in one process."""
    return run(each, FEATURES, timeout_s=LIMIT_S)


@pytest.mark.parametrize("name", SAVED)
def test_a_save_in_the_background_is_that_of_its_step(results: dict[str, Any], name: str) -> None:
    """Notices a file written from weights that the next step has already changed."""
    end, *resumed = result(results, name)
    assert resumed
    for weights in resumed:
        assert_equal(weights, end, name)


@pytest.mark.parametrize("name", METERED)
def test_metrics_are_on_the_device(results: dict[str, Any], name: str) -> None:
    """Notices a module that is not moved: its device stays ``cpu``, and the metric fails or stays there."""
    found = result(results, name)
    assert found["on device"]
    assert found["mean"] == pytest.approx(sum(found["losses"]) / len(found["losses"]), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_experts_train_as_in_a_plain_trainer(results: dict[str, Any], stage: int) -> None:
    """Notices tokens that reach another expert, and gradients of experts that are lost."""
    trusted, ours = result(results, "experts"), result(results, f"experts, stage {stage}")
    assert_close(ours["losses"], trusted["losses"], "losses")
    assert_close(ours["weights"], trusted["weights"], "weights")


def test_experts_train_in_bf16(results: dict[str, Any]) -> None:
    """There one kernel multiplies for all experts. Notices rows that reach another expert, in the first losses."""
    losses, reference = (result(results, name)["losses"][:3] for name in ("experts, bf16", "experts"))
    assert_close(losses, reference, "losses", limit=0.05)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_streamed_inference_is_that_of_the_resident_model(results: dict[str, Any], tier: str) -> None:
    """Notices a block that computes with the weights of another one."""
    assert torch.equal(result(results, f"streamed from {tier}"), result(results, "not streamed"))


@pytest.mark.parametrize("name", MONITORED)
def test_the_monitor_logs_finite_numbers(results: dict[str, Any], name: str) -> None:
    """Notices times and bytes that the device does not report."""
    found = result(results, name)
    assert all(math.isfinite(value) for value in found.values()), found
    for positive in ("zero_time/step_ms", "zero/samples_per_s", "zero/grad_norm"):
        assert found[positive] > 0
    assert any(tag.startswith("zero_memory") and tag.endswith("/peak") for tag in found)
