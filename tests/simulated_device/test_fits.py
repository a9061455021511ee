"""Whole fits on the simulated device: the same bits as on the CPU, and nothing that is used before it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulated_device.device import run
from tests.simulated_device.programs import FITS, fit, streamed


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    for name, value in expected["weights"].items():
        assert torch.equal(found["weights"][name], value), name


@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_that_of_the_cpu(name: str) -> None:
    on_device = run(fit, *FITS[name])
    assert on_device.hazards == []
    assert_equal(on_device.result, run(fit, *FITS[name], simulated=False).result)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_streamed_inference_is_that_of_the_cpu(tier: str) -> None:
    on_device = run(streamed, tier)
    assert on_device.hazards == []
    assert torch.equal(on_device.result, run(streamed, tier, simulated=False).result)
