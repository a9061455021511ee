"""Numbers of heads: where a module holds them, what its forward does with them, and fused layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from ls_strategy.errors import PlanError
from ls_strategy.parallel.styles import Attributes, Column
from ls_strategy.parallel.tensor.fused import fused_heads
from ls_strategy.parallel.tensor.heads import Heads, refusal, starred, width_in, width_out


class Attention(nn.Module):
    """Holds what a test sets, and computes nothing."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Conv1D(nn.Module):
    """transformers' linear layer, with a weight (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(nn.Linear(outputs, inputs).weight.detach())


@pytest.mark.parametrize("layer", [nn.Linear(6, 4), Conv1D(6, 4)])
def test_widths(layer: nn.Module) -> None:
    assert (width_in(layer), width_out(layer)) == (6, 4)


def test_layer_numbers_are_starred() -> None:
    assert starred("model.layers.11.mlp.w1") == "model.layers.*.mlp.w1"


def test_a_refusal_names_the_module_and_the_option() -> None:
    message = str(refusal("layers.0.mlp", nn.Linear(1, 1), "is odd"))
    assert "module 'layers.0.mlp' (Linear) is odd. Set the complete plan" in message
    assert 'parallel.tensor.plan={"layers.*.mlp": ...}' in message


@pytest.mark.parametrize(
    "attributes",
    [
        {"num_heads": 4},
        {"head_dim": 8},
        {"n_head": 4, "head_size": 8},
        {"config": SimpleNamespace(num_attention_heads=4)},
        {"num_heads": True, "head_dim": 8},
    ],
    ids=str,
)
def test_heads_follow_from_their_number_or_their_size(attributes: dict[str, Any]) -> None:
    assert Heads.of("attention", Attention(**attributes), 32, 16) == Heads(4, 2, 8)


@pytest.mark.parametrize(
    ("attributes", "key", "message"),
    [
        ({}, 32, "has none of the attributes that hold the number of heads: head_dim, "),
        ({"num_heads": 4, "head_dim": 4}, 32, "has 4 heads of 4 features, but its query and key layers have 32 and 32"),
        ({"num_heads": 4}, 12, "query and key layers have 32 and 12"),
        ({"num_heads": 4}, 24, "query and key layers have 32 and 24"),
    ],
)
def test_heads_that_do_not_fit_the_layers_are_refused(attributes: dict[str, Any], key: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Heads.of("attention", Attention(**attributes), 32, key)


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_key_heads_are_copied_where_there_are_fewer_than_ranks(ranks: int, copies: int) -> None:
    assert Heads(8, 2, 4).copies(ranks) == copies


@pytest.mark.parametrize(
    ("heads", "ranks", "words"),
    [
        (Heads(8, 2, 4), 3, r"has 8 attention heads, which is not divisible by parallel.tensor=3"),
        (Heads(12, 6, 4), 4, r"has 6 key and value heads, .* a divisor of parallel.tensor=4"),
    ],
    ids=["query heads", "key heads"],
)
def test_heads_must_be_divisible_or_key_heads_a_divisor(heads: Heads, ranks: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        heads.check("attention", Attention(), ranks)


@pytest.mark.parametrize(
    ("heads", "ranks", "attributes", "changed"),
    [
        (Heads(8, 2, 4), 4, {"num_heads": (8, 2), "num_key_value_heads": (2, 1), "num_key_value_groups": (4, 2)}, True),
        (Heads(8, 4, 4), 2, {"num_heads": (8, 4), "num_key_value_groups": (2, 2)}, True),
        (Heads(8, 2, 4), 1, {"num_heads": (8, 8)}, False),
        (Heads(8, 8, 4), 2, {"inner_dim": (32, 16)}, True),
    ],
    ids=["numbers of heads", "groups stay where every rank has key heads", "nothing changes", "the width of all heads"],
)
def test_local_numbers_are_set(heads: Heads, ranks: int, attributes: dict[str, Any], changed: bool) -> None:
    attention = Attention(other=8, **{name: before for name, (before, _) in attributes.items()})
    expected = Attributes(tuple((name, after) for name, (before, after) in attributes.items() if before != after))
    assert heads.attributes("attention", attention, ranks) == (expected if changed else None)


class Base(Attention):
    embed_dim: int

    def reshape(self, x: Tensor) -> Tensor:
        return x * self.embed_dim


class Overrides(Base):
    def reshape(self, x: Tensor) -> Tensor:
        return x


class Extends(Base):
    def reshape(self, x: Tensor) -> Tensor:
        return super().reshape(x)


class OnlyChecks(Attention):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.embed_dim:
            raise ValueError(f"expected {self.embed_dim}")
        return x


def test_methods_that_compute_with_the_width_are_found_in_base_classes() -> None:
    """Those that are overridden do not count, nor those that only compare."""
    for kind in (Overrides, OnlyChecks):
        assert Heads(8, 8, 4).attributes("attention", kind(embed_dim=32), 2) is None
    with pytest.raises(PlanError, match=r"computes with self.embed_dim = 32 in reshape\(\)"):
        Heads(8, 8, 4).attributes("attention", Extends(embed_dim=32), 2)


# --- fused layers -----------------------------------------------------------------------------------------------------


def fused(name: str, width: int, size: int = 2, **attributes: Any) -> tuple[Heads, Column]:
    attention = type(name, (Attention,), {})(**attributes)
    return fused_heads("attention", attention, "attention.qkv", nn.Linear(32, width), size)


@pytest.mark.parametrize(
    ("name", "width", "attributes", "heads", "style"),
    [
        ("GPT2Attention", 96, {"num_heads": 4}, Heads(4, 4, 8), Column(sections=(-1, -1, -1), granule=8)),
        ("GPTNeoXAttention", 96, {"head_size": 8}, Heads(4, 4, 8), Column(granule=24)),
        ("FalconAttention", 96, {"head_dim": 8}, Heads(4, 4, 8), Column(granule=24)),
        (
            "FalconAttention",
            64,
            {"head_dim": 8, "num_kv_heads": 2, "new_decoder_architecture": True},
            Heads(4, 2, 8),
            Column(granule=32),
        ),
        (
            "GPTBigCodeAttention",
            48,
            {"head_dim": 8, "multi_query": True},
            Heads(4, 1, 8),
            Column(sections=(-1, 8, 8), granule=8, copies=(1, 2, 2)),
        ),
    ],
    ids=["sections", "per head", "falcon per head", "grouped", "shared"],
)
def test_layouts(name: str, width: int, attributes: dict[str, Any], heads: Heads, style: Column) -> None:
    assert fused(name, width, **attributes) == (heads, style)


def test_an_unknown_layout_is_refused_with_an_example() -> None:
    with pytest.raises(PlanError, match=r"one matrix of unknown layout.*\"attention.qkv\": Column\(sections="):
        fused("OwnAttention", 96, num_heads=4)


def test_groups_that_are_not_divisible_are_refused() -> None:
    with pytest.raises(PlanError, match=r"has 1 groups of query heads .* not divisible by parallel.tensor=2"):
        fused("FalconAttention", 48, head_dim=8, num_kv_heads=1, new_decoder_architecture=True)
