"""A plan is checked against a model, and refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.parallel.styles import (
    Attributes,
    Column,
    Features,
    Row,
)
from ls_strategy.parallel.tensor.resolved_plan import ParamShard, resolve
from ls_strategy.parallel.tensor.shard import apply_tensor_parallel


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = 4, 2, 4
        self.qkv, self.output = nn.Linear(16, 32), nn.Linear(16, 16)
        self.bias_table = nn.Parameter(torch.zeros(3, 4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embedding.weight


QKV = Column(sections=(16, 8, 8), granule=4)


def test_resolve_finds_layers_attributes_and_shards() -> None:
    model = Model()
    resolved = resolve(
        model,
        {
            "blocks.*.attention": ["divide:heads,kv_heads", Attributes((("width", 9),))],
            "blocks.*.attention.qkv": QKV,
            "*.output": "row",
            "*.bias_table": Features(),
            "embedding": "vocab",
            "head": "vocab",
        },
        2,
    )
    shards = {owned.name: shard for owned, shard in resolved.shards()}
    assert shards["blocks.1.attention.qkv.weight"] == ParamShard(0, (16, 8, 8), 4)
    assert shards["blocks.1.attention.qkv.bias"] == ParamShard(0, (16, 8, 8), 4)
    assert shards["blocks.0.attention.output.weight"] == ParamShard(1, (16,))
    assert "blocks.0.attention.output.bias" not in shards
    assert shards["embedding.weight"] == shards["head.weight"] == ParamShard(0, (13,))
    assert shards["blocks.0.attention.bias_table"] == ParamShard(1, (4,))
    values = {key: value for _, key, value in resolved.attributes.values()}
    assert values == {"heads": 2, "kv_heads": 1, "width": 9}
    assert model.blocks[0].attention.heads == 4  # type: ignore[union-attr]


REFUSALS: dict[str, tuple[dict[str, Any], int, str]] = {
    "no such module": ({"blocks.*.attn": "row"}, 2, r"'blocks.\*.attn' .* no module .* modules are embedding, blocks"),
    "wrong class": ({"*.norm": "column"}, 2, r"'blocks.0.norm' .* requires nn.Linear .* LayerNorm"),
    "vocabulary of a norm": ({"*.norm": "vocab"}, 2, "requires nn.Embedding or nn.Linear"),
    "heads": ({"*.qkv": QKV}, 4, r"'blocks.0.attention.qkv': 8 output features in granules of 4 \(2\) .* 4 equal"),
    "granule": ({"*.output": Row(granule=5)}, 2, "16 input features are not a multiple of granule=5"),
    "input": ({"*.output": "row"}, 3, "16 input features cannot be split into 3 equal shards"),
    "sections": ({"*.qkv": Column(sections=(16, 8))}, 2, "'blocks.0.attention.qkv', output features: .* add up to 32"),
    "copies": ({"*.output": Column(copies=3)}, 4, "copies must divide the number of .* ranks, 4"),
    "copies and gather": ({"*.output": Column(copies=2, gather=True)}, 4, "gather=True cannot be combined with copies"),
    "tied": ({"embedding": "vocab"}, 2, "head.weight and embedding.weight are one parameter"),
    "tied, sharded otherwise": (
        {"embedding": "features", "head": "vocab"},
        2,
        "one parameter, but the plan shards it as",
    ),
    "too many ranks": ({"embedding": "vocab", "head": "vocab"}, 14, "13 rows, fewer than the 14"),
    "two styles": ({"*.output": "row", "*.attention.o*": "column"}, 2, "by pattern .* Make the patterns narrower"),
    "attribute": (
        {"*.attention": "divide:n_heads"},
        2,
        "no attribute 'n_heads'. Use one of its integers: heads, kv_heads, width",
    ),
    "attribute twice": ({"*.attention": ["divide:heads", Attributes((("heads", 3),))]}, 2, "heads to 2 and to 3"),
    "column of a parameter": ({"*.bias_table": "column"}, 2, "matches parameter 'blocks.0.attention.bias_table'"),
    "features": ({"*.bias_table": Features(dim=0)}, 2, r"of shape \(3, 4\) .* dimension 0 is not divisible by the 2"),
    "unknown name": ({"*.output": "rowwize"}, 2, "unknown tensor-parallel style 'rowwize'"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals_come_before_any_change(what: str) -> None:
    plan, size, message = REFUSALS[what]
    model = Model()
    axis = Axis("tensor")
    axis.size = size  # no collective may be reached
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(PlanError, match=message):
        apply_tensor_parallel(model, {"blocks.0.attention": Attributes((("width", 9),)), **plan}, axis)
    assert model.blocks[0].attention.width == 4  # type: ignore[union-attr]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_modules_that_cannot_be_sharded() -> None:
    attention = nn.MultiheadAttention(16, 4)
    with pytest.raises(PlanError, match=r"part of nn.MultiheadAttention"):
        resolve(attention, {"out_proj": "row"}, 2)
    options: tuple[dict[str, Any], ...] = ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True})
    for option in options:
        with pytest.raises(PlanError, match=next(iter(option))):
            resolve(nn.ModuleDict({"e": nn.Embedding(8, 4, **option)}), {"e": "vocab"}, 2)
    with pytest.raises(PlanError, match="has no shape yet"):
        resolve(nn.ModuleDict({"lazy": nn.LazyLinear(8)}), {"lazy": "column"}, 2)

    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    with pytest.raises(PlanError, match="overrides forward and has a bias"):
        resolve(nn.ModuleDict({"own": Own(8, 8)}), {"own": "row"}, 2)
    assert resolve(nn.ModuleDict({"own": Own(8, 8, bias=False)}), {"own": "row"}, 2).layers


def test_names_that_a_compiled_module_adds_are_not_in_the_way() -> None:
    compiled: Any = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    model = nn.ModuleDict({"mlp": compiled})
    assert [layer.name for layer in resolve(model, {"mlp.0": "row"}, 2).layers] == ["mlp.0"]
