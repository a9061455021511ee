"""Plans from names and shapes of layers: which layers are recognised, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.errors import PlanError
from ls_strategy.moe.feed_forward import GatedFeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.parallel.styles import Attributes, Column, Features, PartialGradient, Row, Vocab
from ls_strategy.parallel.tensor.plan_from_names import uniform_blocks
from ls_strategy.parallel.tensor.plans import resolve_tensor_plan

WIDTH, HEADS, KEYS, SIZE, HIDDEN, TOKENS = 16, 4, 2, 4, 24, 32


class Attention(nn.Module):
    """Grouped queries, reshaped by the numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = HEADS, KEYS, HEADS // KEYS, SIZE
        self.wq = nn.Linear(WIDTH, HEADS * SIZE)
        self.wk = nn.Linear(WIDTH, KEYS * SIZE)
        self.wv = nn.Linear(WIDTH, KEYS * SIZE)
        self.wo = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k, v = (w(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2) for w in (self.wk, self.wv))
        k, v = k.repeat_interleave(self.n_rep, 1), v.repeat_interleave(self.n_rep, 1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, WIDTH)
        self.w3 = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.attention = attention()
        self.feed_forward = FeedForward()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.ffn_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, attention: type[nn.Module] = Attention, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([block() if block else Block(attention) for _ in range(2)])
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


# --- inferred ---------------------------------------------------------------------------------------------------------


def test_the_common_block() -> None:
    plan = resolve_tensor_plan(Decoder(), "auto", 4)
    first = {name: styles for name, styles in plan.styles.items() if not name.startswith("layers.1")}
    assert first == {
        "layers.0.attention": [Attributes((("n_heads", 1), ("n_kv_heads", 1), ("n_rep", 1)))],
        "layers.0.attention.wq": [Column(granule=SIZE)],
        "layers.0.attention.wk": [Column(granule=SIZE, copies=2)],
        "layers.0.attention.wv": [Column(granule=SIZE, copies=2)],
        "layers.0.attention.wo": [Row(granule=SIZE)],
        "layers.0.feed_forward.w1": [Column()],
        "layers.0.feed_forward.w3": [Column()],
        "layers.0.feed_forward.w2": [Row()],
        "tok_embeddings": [Vocab()],
        "output": [Vocab()],
    }
    assert len(plan.styles) == 2 * 8 + 2
    assert [type(block) for block in plan.blocks] == [Block, Block]
    assert plan.source == "names and shapes of the layers"


def test_the_table_says_what_becomes_of_every_layer() -> None:
    lines = resolve_tensor_plan(Decoder(), "auto", 4).describe().splitlines()
    assert "names and shapes" in lines[0]
    assert "not listed are replicated" in lines[0]
    found = {" ".join(line.split()) for line in lines[2:]}
    assert "layers.*.attention.wk Linear Column(granule=4, copies=2) (8, 16) -> (4, 16) 2" in found
    assert "output Linear Vocab (32, 16) -> (8, 16) 1" in found
    assert "layers.*.attention.n_heads Attention attribute 4 -> 1 2" in found


def test_attributes_that_stay_are_not_set() -> None:
    """Two ranks have a key head each: queries per key stay as they are."""
    plan = resolve_tensor_plan(Decoder(), "auto", 2)
    assert plan.styles["layers.0.attention"] == [Attributes((("n_heads", 2), ("n_kv_heads", 1)))]


def test_head_norms_see_some_heads_only() -> None:
    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm = nn.RMSNorm(SIZE)

    assert resolve_tensor_plan(Decoder(Normed), "auto", 2).styles["layers.0.attention.q_norm"] == [PartialGradient()]


def test_without_a_head_module_the_embedding_is_replicated() -> None:
    model = Decoder()
    del model.output
    assert "tok_embeddings" not in resolve_tensor_plan(model, "auto", 2).styles


def test_tied_parameters_are_sharded_in_the_same_way_or_not_at_all() -> None:
    class Tied(Decoder):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.output = nn.Linear(WIDTH, rows)
            self.tok_embeddings = nn.Embedding(rows, WIDTH)
            self.output.weight = self.tok_embeddings.weight
            self.bias = self.output.bias

    styles = resolve_tensor_plan(Tied(32), "auto", 4).styles
    assert [styles[name] for name in ("tok_embeddings", "output", "bias")] == [[Vocab()], [Vocab()], [Features(dim=0)]]
    assert not {"tok_embeddings", "output", "bias"} & set(resolve_tensor_plan(Tied(33), "auto", 4).styles)


def test_the_meta_device_is_enough() -> None:
    assert (
        resolve_tensor_plan(Decoder().to("meta"), "auto", 2).styles == resolve_tensor_plan(Decoder(), "auto", 2).styles
    )


def test_blocks_are_the_outermost_lists() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList([Attention(), Attention()])

    model = nn.ModuleDict({"a": nn.Sequential(Inner(), Inner()), "heads": nn.ModuleList([nn.Linear(4, 4)])})
    assert [name for name, _ in uniform_blocks(model)] == ["a.0", "a.1"]


# --- refused ----------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, given: Any = "auto", size: int = 2) -> str:
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    with pytest.raises(PlanError) as caught:
        resolve_tensor_plan(model, given, size)
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    return str(caught.value)


def with_part(key: str, make: Callable[[], nn.Module]) -> Decoder:
    """A decoder whose blocks have one more part."""

    def block() -> nn.Module:
        it = Block()
        it.add_module(key, make())
        return it

    return Decoder(block=block)


def test_a_linear_layer_of_unknown_purpose() -> None:
    message = refused(with_part("adapter", lambda: nn.Linear(WIDTH, WIDTH)))
    assert "'layers.0.adapter' (Linear)" in message
    assert 'parallel.tensor.plan={"layers.*.adapter": ...}' in message


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (lambda: nn.MultiheadAttention(WIDTH, HEADS), "fused weights"),
        (lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN), "fused weights"),
        (lambda: nn.Conv1d(WIDTH, WIDTH, 3), "'weight' of shape (16, 16, 3)"),
        (lambda: nn.LayerNorm(HIDDEN), "between sharded layers"),
        (lambda: nn.ParameterList([nn.Parameter(torch.ones(3))]), "'0' of shape (3,)"),
    ],
)
def test_parts_of_blocks_that_are_not_recognised(part: Callable[[], nn.Module], expected: str) -> None:
    message = refused(with_part("part", part))
    assert expected in message
    assert "'layers.0.part" in message


def test_experts() -> None:
    class SparseExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(2, 3, 4))

    assert "mixture of experts" in refused(with_part("moe", SparseExperts))


def test_layers_of_experts_are_replicated() -> None:
    model = Decoder()
    for layer in model.layers:
        layer.feed_forward = MoE(WIDTH, lambda: GatedFeedForward(WIDTH, HIDDEN), 4, use_residual=True)
    plan = resolve_tensor_plan(model, "auto", 2)
    assert "layers.0.attention.wo" in plan.styles
    assert not [name for name in plan.styles if "feed_forward" in name]


def test_quantised_weights() -> None:
    def quantised() -> nn.Module:
        linear = nn.Linear(WIDTH, WIDTH)
        linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)
        return linear

    assert "is quantised (torch.int8 weights)" in refused(with_part("q_proj", quantised))


def test_numbers_of_heads() -> None:
    assert "has 4 attention heads, which is not divisible by parallel.tensor=3" in refused(Decoder(), size=3)

    class ThreeKeys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head_dim = 4
            self.q, self.k, self.v = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
            self.o = nn.Linear(24, WIDTH)

    assert "3 key and value heads, which is neither a multiple" in refused(Decoder(ThreeKeys), size=2)
    assert resolve_tensor_plan(Decoder(ThreeKeys), "auto", 3).styles["layers.0.attention.k"] == [Column(granule=4)]
    assert resolve_tensor_plan(Decoder(ThreeKeys), "auto", 6).styles["layers.0.attention.k"] == [
        Column(granule=4, copies=2)
    ]


def test_unknown_heads() -> None:
    class Silent(Attention):
        def __init__(self) -> None:
            super().__init__()
            del self.n_heads, self.head_dim

    assert "has none of the attributes that hold the number of heads" in refused(Decoder(Silent))


def test_widths_that_do_not_fit() -> None:
    model = Decoder()
    model.layers[1].feed_forward.w1 = nn.Linear(WIDTH, HIDDEN + 2)  # type: ignore[union-attr]
    assert "'layers.1.feed_forward.w1' (Linear) computes 26 features" in refused(model)
    model = Decoder()
    model.layers[0].attention.wo = nn.Linear(WIDTH + 4, WIDTH)  # type: ignore[union-attr]
    assert "takes 20 features, but gets 4 heads of 4" in refused(model)


def test_feed_forwards_of_indivisible_width() -> None:
    model = Decoder()
    for layer in model.layers:
        layer.feed_forward.w1 = nn.Linear(WIDTH, 26)  # type: ignore[union-attr]
        layer.feed_forward.w3 = nn.Linear(WIDTH, 26)  # type: ignore[union-attr]
        layer.feed_forward.w2 = nn.Linear(26, WIDTH)  # type: ignore[union-attr]
    message = refused(model, size=4)
    assert "layers.0.feed_forward" in message
    assert "26" in message


class FromInput(nn.Module):
    """The shape of teaching code: the width comes from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            w(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for w in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class Computed(FromInput):
    """The size of a head from two numbers, of which one would become local."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        size = self.embed_dim // self.n_head
        q, k, v = (w(x).unflatten(-1, (-1, size)) for w in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj((q * k * v).flatten(2))


class Joint(FromInput):
    """The width of all heads, by the model's name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim = WIDTH
        self.head_dim = SIZE

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.embed_dim * 1
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj((q * k * v).reshape(*x.shape[:-1], self.embed_dim))


class JointOnly(Joint):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj((q * k * v).reshape(*x.shape[:-1], self.embed_dim))


def test_shapes_that_are_wired_into_the_code() -> None:
    message = refused(Decoder(FromInput))
    assert "takes the width of all heads from the shape of its input ('c' in forward()" in message
    assert "computes with self.embed_dim = 16 in forward()" in refused(Decoder(Computed))
    assert "computes with self.embed_dim" in refused(Decoder(Joint))
    styles = resolve_tensor_plan(Decoder(JointOnly), "auto", 2).styles["layers.0.attention"]
    assert styles == [Attributes((("n_head", 2), ("embed_dim", 8)))]


def test_source_that_cannot_be_read() -> None:
    scope: dict[str, Any] = {"Attention": Attention}
    exec("class Typed(Attention):\n    pass\n", scope)
    assert "has no readable source" in refused(Decoder(scope["Typed"]))


def test_fused_matrices_of_unknown_layout() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_head = HEADS
            self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    message = refused(Decoder(Fused))
    assert "'layers.0.attention.c_attn' (Linear) computes query, key and value by one matrix" in message
    assert "Column(sections=(-1, -1, -1)" in message


def test_a_norm_over_all_heads() -> None:
    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.q_norm = nn.RMSNorm(HEADS * SIZE)

    assert "a norm over all heads" in refused(Decoder(Normed))


def test_a_model_without_blocks() -> None:
    assert "no list of repeated blocks" in refused(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
