"""Names of layers and their roles."""

from __future__ import annotations

import pytest

from ls_strategy.parallel.tensor.families import role_of


@pytest.mark.parametrize(
    ("name", "siblings", "role"),
    [
        ("self_attn.o_proj", [], "out"),
        ("attn.c_proj", ["c_attn"], "out"),
        ("mlp.c_proj", ["c_fc"], "down"),
        ("attention.wo", ["wq", "wk", "wv"], "out"),
        ("layer.1.DenseReluDense.wo", ["wi_0", "wi_1"], "down"),
        ("attention.dense", ["query_key_value"], "out"),
        ("attention.output.dense", [], "out"),
        ("crossattention.output.dense", [], "out"),
        ("output.dense", [], "down"),
        ("mlp.down", ["gate", "up"], "down"),
        ("mlp.gate", ["up", "down"], "up"),
        ("mlp.gate", [], None),
        ("dense", [], None),
        ("adapter", ["q_proj"], None),
    ],
)
def test_roles(name: str, siblings: list[str], role: str | None) -> None:
    assert role_of(name, siblings) == role
