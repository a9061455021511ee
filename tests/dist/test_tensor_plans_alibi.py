"""Sharded models with biases of attention scores for all heads: loss and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest

from ls_strategy.testing import spawn
from tests.dist import test_tensor_plans_huggingface as plans

pytestmark = pytest.mark.wide

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 66, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", "MptConfig", {"vocab_size": 66, "d_model": 32, "n_layers": 2, "n_heads": 4}),
}


def compare(rank: int, world_size: int) -> dict[str, float]:
    plans.MODELS.update(MODELS)
    return plans.compare(rank, world_size, [(name, "eager") for name in MODELS])


@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_one_process(world_size: int) -> None:
    pytest.importorskip("transformers")
    for found in spawn(compare, world_size):
        assert len(found) == len(MODELS)
        assert not {what: value for what, value in found.items() if not value <= 1e-6}
