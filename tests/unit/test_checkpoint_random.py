"""States of random number generators."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ls_strategy.checkpoint.random import random_states, restore_random_states

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "torch": lambda: torch.rand(()).item(),
    "numpy": np.random.rand,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_restored_generator_repeats_its_numbers(name: str) -> None:
    draw = DRAWS[name]
    states = random_states()
    before = [draw() for _ in range(3)]
    restore_random_states(states)
    assert [draw() for _ in range(3)] == before


def test_the_states_load_without_unpickling_objects() -> None:
    file = io.BytesIO()
    states = random_states()
    torch.save(states, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["python"] == states["python"]
