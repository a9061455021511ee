"""The language of tensor-parallel plans: names, checks against a model, and refusals before anything is changed."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.parallel.random import Streams, fork_seed, forked
from ls_strategy.parallel.resolved_plan import ParamShard, resolve
from ls_strategy.parallel.sequence import TokenBlocks
from ls_strategy.parallel.styles import (
    NAMES,
    REFUSED,
    Attributes,
    Column,
    Divide,
    Features,
    PartialGradient,
    Replicate,
    Row,
    Vocab,
    parse,
    parse_all,
    resolve_sections,
)
from ls_strategy.parallel.tensor import apply_tensor_parallel


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


def test_names_are_styles() -> None:
    assert parse("column") == parse("colwise") == Column()
    assert parse("row") == parse("rowwise") == Row()
    assert parse("vocab") == parse("embedding_rowwise") == Vocab()
    assert parse("column_gather") == parse("colwise_rep") == parse("colwise_gather_output") == Column(gather=True)
    assert parse("rowwise_rep") == parse("rowwise_split_input") == Row(split=True)
    assert parse("packed_colwise") == Column(sections=(-1, -1))
    assert parse("replicated_with_grad_allreduce") == PartialGradient()
    assert parse("features") == Features()
    assert parse("replicate") == Replicate()
    assert parse("divide:heads, kv_heads") == Divide(("heads", "kv_heads"))
    assert parse_all(["row", QKV, "divide:heads"]) == (Row(), QKV, Divide(("heads",)))


@pytest.mark.parametrize("name", [*REFUSED, "divide:", "divide", "colwize"])
def test_unknown_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        parse(name)


def test_every_name_of_hugging_face_is_known_or_refused_with_a_reason() -> None:
    pytest.importorskip("transformers")
    try:
        module = importlib.import_module("transformers.distributed.parallel_utils")
        importlib.import_module("transformers.integrations.tensor_parallel")
    except ImportError:
        pytest.skip("this version of transformers keeps its styles elsewhere")
    unknown = [name for name in module.ALL_PARALLEL_STYLES if name not in NAMES and name not in REFUSED]
    assert not unknown


def test_other_values_are_refused() -> None:
    with pytest.raises(PlanError, match=r"Got 3 \(int\) as a tensor-parallel style"):
        parse_all(3)  # type: ignore[arg-type]


def test_styles_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QKV.granule = 2  # type: ignore[misc]


def test_sections_that_do_not_add_up() -> None:
    for sections in ((4, 4), (4, 8), (0, 10), (-1, -1, -1), (10, -1), (-2, 12)):
        with pytest.raises(PlanError, match="do not add up to 10"):
            resolve_sections(sections, 10, "rows")


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


def test_fewer_heads_than_ranks_become_one() -> None:
    assert Divide(("heads",)).local("attention", "heads", 2, 4) == 1
    assert Divide(("heads",)).local("attention", "heads", 4, 4) == 1
    with pytest.raises(PlanError, match=r"attention.heads=6 is not divisible by the 4 tensor-parallel ranks"):
        Divide(("heads",)).local("attention", "heads", 6, 4)
    with pytest.raises(PlanError, match=r"attention.heads=1.5 must be a positive integer"):
        Divide(("heads",)).local("attention", "heads", 1.5, 4)


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


# --- sequence --------------------------------------------------------------------------------------------------------


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


# --- random numbers --------------------------------------------------------------------------------------------------


@given(st.integers(1, 2**31 - 1), st.integers(0, 63), st.integers(0, 1023))
def test_a_seed_says_which_fork_it_is(number: int, phase: int, rank: int) -> None:
    seed = fork_seed(number, phase, rank)
    assert 0 <= seed < 2**63
    assert forked(seed) == (number, phase)
    assert (seed == fork_seed(number, phase, rank + 1)) == (phase % 2 == 1 or rank == rank + 1)


@given(st.integers(0, 2**32 - 1))
def test_seeds_of_32_bits_are_no_forks(seed: int) -> None:
    assert forked(seed) is None


def test_regions_leave_one_draw_behind_and_nothing_else() -> None:
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        outer = torch.randint(1, 1 << 31, ()), torch.rand(3)
        first, second = Streams(0), Streams(1)
        drawn = []
        for streams, numbers in ((first, 3), (second, 5)):
            torch.manual_seed(1)
            assert streams.open(cpu)
            assert not streams.open(cpu)
            own = torch.rand(numbers)
            streams.common(cpu)
            common = torch.rand(2)
            streams.own(cpu)
            again = torch.rand(2)
            assert streams.is_open(cpu)
            streams.close(cpu)
            streams.close_all()
            assert torch.equal(torch.rand(3), outer[1])
            drawn.append((own[:3], common, again))
        (own0, common0, again0), (own1, common1, again1) = drawn
        assert torch.equal(common0, common1)
        assert not torch.equal(own0, own1)
        assert not torch.equal(again0, again1)
        assert not torch.equal(own0[:2], again0)


def test_a_region_restored_with_the_generator_goes_on() -> None:
    """What recomputation does: the state of inside a region comes back, long after the region was closed."""
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        streams = Streams(1)
        streams.open(cpu)
        inside = torch.random.get_rng_state()
        streams.common(cpu)
        common = torch.rand(2)
        streams.own(cpu)
        own = torch.rand(2)
        streams.close(cpu)
        torch.random.set_rng_state(inside)
        assert streams.is_open(cpu)
        streams.common(cpu)
        assert torch.equal(torch.rand(2), common)
        streams.own(cpu)
        assert torch.equal(torch.rand(2), own)
