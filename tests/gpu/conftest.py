"""Every test here ends in time, and leaves torch as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TIMEOUT_S = 240
"""Above the limits of the programs, whose errors say where they stood."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Restore what a test may change in this process. Most programs run in another one."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    switches = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    numbers, state = random.getstate(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state()
    yield
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.set_rng_state(on_device)
    torch.set_rng_state(state)
    random.setstate(numbers)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = switches
    torch.cuda.empty_cache()
