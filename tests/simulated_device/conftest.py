"""The library of the simulated device, built once."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.ops import _build
from tests.simulated_device.device import recipe


@pytest.fixture(scope="session", autouse=True)
def built_library() -> None:
    """Build it before the first process needs it."""
    if torch.accelerator.is_available():
        pytest.skip("torch allows one kind of accelerator in a process, and this machine has a real one")
    try:
        its_recipe = recipe()
    except _build.BuildError as no_compiler:
        pytest.skip(str(no_compiler))
    _build.library(its_recipe)
