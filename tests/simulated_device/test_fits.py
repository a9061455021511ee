"""Whole fits on the simulated device: the same bits as on the CPU, and nothing that is used before it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulated_device.device import run
from tests.simulated_device.programs import FITS, fit, fit_all, saved, streamed


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    for name, value in expected["weights"].items():
        assert torch.equal(found["weights"][name], value), name


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, dict[str, Any]]:
    """Every fit on the CPU, in one process."""
    return run(fit_all, simulated=False).result


@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_that_of_the_cpu(name: str, on_cpu: dict[str, dict[str, Any]]) -> None:
    on_device = run(fit, *FITS[name])
    assert on_device.hazards == []
    assert_equal(on_device.result, on_cpu[name])


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_streamed_inference_is_that_of_the_cpu(tier: str) -> None:
    on_device = run(streamed, tier)
    assert on_device.hazards == []
    assert torch.equal(on_device.result, run(streamed, tier, simulated=False).result)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_save_in_the_background_is_that_of_its_step(stage: int) -> None:
    on_device = run(saved, stage)
    assert on_device.hazards == []
    end, *resumed = on_device.result
    for weights in resumed:
        assert all(torch.equal(weights[name], value) for name, value in end.items())
