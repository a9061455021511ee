"""Blocks with sharded tokens: what gathers, whose gradient is partial, and what is refused."""

from __future__ import annotations

import pytest

from ls_strategy.errors import PlanError
from ls_strategy.parallel.resolved_plan import resolve
from ls_strategy.parallel.sequence import TokenBlocks
from tests.unit.test_parallel_resolved_plan import QKV, Model


def test_sequence_finds_what_gathers_and_whose_gradient_is_partial() -> None:
    model = Model()
    resolved = resolve(model, {"*.qkv": QKV, "*.output": "row", "*.bias_table": "features"}, 2)
    tokens = TokenBlocks(model, list(model.blocks), resolved)
    assert tokens.parents == [block.attention for block in model.blocks]
    assert [owned.name for owned, _ in tokens.partial if owned.name.startswith("blocks.0")] == [
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
        "blocks.0.attention.output.bias",
    ]
    assert tokens.stacks(model) == [list(model.blocks)]


def test_sequence_refusals() -> None:
    model = Model()
    with pytest.raises(PlanError, match="sequence=True needs the blocks"):
        TokenBlocks(model, [], resolve(model, {"*.qkv": QKV}, 2))
    with pytest.raises(PlanError, match=r"'blocks.0.attention.qkv' belongs to block 'blocks.0.attention' itself"):
        TokenBlocks(model, [b.attention for b in model.blocks], resolve(model, {"*.qkv": QKV}, 2))  # type: ignore[misc]
    with pytest.raises(PlanError, match=r"'blocks.0.attention.qkv' is Column.*gather=True"):
        TokenBlocks(model, list(model.blocks), resolve(model, {"*.qkv": "column_gather"}, 2))
    model.norm = model.blocks[0].norm  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"blocks.0.norm.weight in a block and norm.weight outside the blocks"):
        TokenBlocks(model, list(model.blocks), resolve(model, {"*.qkv": QKV}, 2))
