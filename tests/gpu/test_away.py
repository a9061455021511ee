"""`offload_states` on a GPU: its memory is free meanwhile, and no bit changes. See `tests.simulated_device`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.run import each, result, run
from tests.simulated_device.programs import Stack
from tests.simulated_device.test_away import CASES, Gives, trained

WIDE = 1024
WORKSPACE_BYTES = 64 << 20
"""What cuBLAS keeps, and the batches."""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Every fit, in one process."""
    kinds = {"given": Gives, "plain": Stack}
    programs = {f"{name}, {how}": (trained, name, kind, WIDE) for name in CASES for how, kind in kinds.items()}
    return run(each, programs)


@pytest.mark.parametrize("name", CASES)
def test_the_device_is_empty_meanwhile_and_no_bit_changes(results: dict[str, Any], name: str) -> None:
    found, kept = result(results, f"{name}, given")
    expected, _ = result(results, f"{name}, plain")
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(found["weights"][k], value) for k, value in expected["weights"].items())
    for given, freed, left, _ in kept[1:]:
        assert 0 < given <= freed
        assert left < 0.1 * given + WORKSPACE_BYTES
