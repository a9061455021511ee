"""Divided layers compute what whole ones do: forward, gradients, traffic, dropout.

Trusted run: the same model, unsharded, in the process of the test.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import make_comm
from ls_strategy.errors import PlanError, StateError
from ls_strategy.layout import TensorPart
from ls_strategy.parallel import regions
from ls_strategy.parallel.random import Streams, share_random_state
from ls_strategy.parallel.styles import Column, Divide, Features, PartialGradient, Plan, Row, Vocab
from ls_strategy.parallel.tensor.shard import TensorParallel, apply_tensor_parallel
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks

pytestmark = [pytest.mark.wide, pytest.mark.dist]

B, T, D, HEADS, VOCAB = 2, 8, 16, 4, 13
EXACT = {torch.float64: 1e-13, torch.float32: 1e-6}  # of the norm of the full gradient: sums in another order


@dataclass(frozen=True)
class Shape:
    """Of the model."""

    kv_heads: int = 4
    bias: bool = False
    fused: bool = False
    tied: bool = True
    dropout: float = 0.0
    blocks: int = 2
    dtype: torch.dtype = torch.float64


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = HEADS, shape.kv_heads, D // HEADS
        self.fused, self.dropout = shape.fused, shape.dropout
        kv = shape.kv_heads * self.width
        if shape.fused:
            self.qkv = nn.Linear(D, D + 2 * kv, bias=shape.bias)
        else:
            self.query = nn.Linear(D, D, bias=shape.bias)
            self.key = nn.Linear(D, kv, bias=shape.bias)
            self.value = nn.Linear(D, kv, bias=shape.bias)
        self.output = nn.Linear(D, D, bias=shape.bias)
        self.after = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.fused:
            q, k, v = self.qkv(x).split([n * self.width for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        else:
            q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (y.view(b, t, -1, self.width).transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        p = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.after(self.output(y.transpose(1, 2).reshape(b, t, -1)))


class Gated(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 2 * D, bias=shape.bias)
        self.up = nn.Linear(D, 2 * D, bias=shape.bias)
        self.inner = nn.Dropout(shape.dropout)
        self.down = nn.Linear(2 * D, D, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(functional.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(D), Attention(shape)
        self.norm2, self.mlp = nn.LayerNorm(D), Gated(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D, padding_idx=0)
        self.position = nn.Parameter(torch.randn(T, D))
        self.start = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCAB, bias=shape.bias)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.start(self.embedding(tokens) + self.position)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def build(shape: Shape) -> Model:
    torch.manual_seed(3)
    model = Model(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(shape.dtype)


def plan(shape: Shape, size: int) -> Plan:
    width, copies = D // HEADS, max(1, size // shape.kv_heads)
    kv = shape.kv_heads * width
    return {
        "blocks.*.attention": Divide(("heads", "kv_heads")),
        **(
            {"*.qkv": Column(sections=(D, kv, kv), granule=width)}
            if shape.fused
            else {
                "*.query": Column(granule=width),
                "*.attention.[kv]*": Column(granule=width, copies=copies),
            }
        ),
        "*.output": Row(granule=width),
        "*.mlp.gate": "column",
        "*.mlp.up": "colwise",
        "*.mlp.down": "row",
        "embedding": "vocab",
        "head": Vocab(),
    }


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (B, T + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module) -> Tensor:
    tokens, targets = batch()
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


Gradients = dict[str, tuple[TensorPart | None, Tensor]]


def gradients(model: nn.Module, tp: TensorParallel) -> Gradients:
    return {n: (tp.parts.get(id(p)), p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None}


def full_gradient(ranks: list[Gradients], name: str) -> Tensor:
    """The full gradient from the ranks' parts; copies, and what is replicated, must be equal to the last bit."""
    part, first = ranks[0][name]
    if part is None:
        for rank in ranks[1:]:
            assert torch.equal(rank[name][1], first), f"{name} differs between ranks"
        return first
    full = torch.full(part.full_shape, math.nan, dtype=first.dtype)
    for rank in ranks:
        part, local = rank[name]
        assert part is not None
        assert part.shape == tuple(local.shape)
        at = 0
        for start, length in part.runs:
            place, value = full.narrow(part.dim, start, length), local.narrow(part.dim, at, length)
            assert place.isnan().all() or torch.equal(place, value), f"copies of {name} differ"
            place.copy_(value)
            at += length
    assert not full.isnan().any()
    return full


def errors_of(model: nn.Module, ranks: list[Gradients]) -> dict[str, float]:
    """Relative to the norm of each gradient; or to a thousandth of that of all, as a key's bias has a gradient of 0."""
    total = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    result = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        result[name] = float((full_gradient(ranks, name) - p.grad).norm() / torch.maximum(p.grad.norm(), total / 1000))
    return result


SHAPES = {
    "llama": Shape(),
    "fp32": Shape(dtype=torch.float32),
    "biases": Shape(bias=True, tied=False),
    "fused": Shape(fused=True, bias=True),
    "gqa": Shape(kv_heads=2, bias=True),
}
MODES = {"plain": (False, False), "recompute": (False, True), "sequence": (True, False), "both": (True, True)}


def _train(rank: int, size: int) -> dict[tuple[str, str], tuple[float, Gradients]]:
    axis = Axis("tensor", make_comm())
    result = {}
    for name, shape in SHAPES.items():
        for mode, (sequence, recompute) in MODES.items():
            model = build(shape)
            if rank:  # rank 0's values count
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
            tp = apply_tensor_parallel(model, plan(shape, size), axis, sequence=sequence, blocks=list(model.blocks))
            model.recompute = recompute
            loss = loss_of(model)
            loss.backward()
            result[name, mode] = (loss.item(), gradients(model, tp))
    return result


@pytest.fixture(scope="module", params=[2, 4])
def trained(request: pytest.FixtureRequest) -> Any:
    return spawn(_train, request.param)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHAPES)
def test_divided_model_equals_the_whole_one(name: str, mode: str, trained: Any) -> None:
    """Loss and every gradient; and what several ranks hold has the same gradient on each, to the last bit."""
    shape = SHAPES[name]
    model = build(shape)
    loss = loss_of(model)
    loss.backward()
    ranks = [rank[name, mode] for rank in trained]
    errors = errors_of(model, [grads for _, grads in ranks])
    errors["loss"] = max(abs(value / loss.item() - 1) for value, _ in ranks)
    assert max(errors.values()) <= EXACT[shape.dtype], errors


# --- traffic ---------------------------------------------------------------------------------------------------------


def _traffic(rank: int, size: int) -> dict[str, Any]:
    axis = Axis("tensor", make_comm())
    shape = Shape(blocks=1)
    block = nn.Sequential(build(shape).blocks[0])
    x = torch.randn(B, T, D, dtype=shape.dtype, requires_grad=True)
    block_plan = {f"{k}": v for k, v in plan(shape, size).items() if k.startswith("*.")}
    full_plan = {"*.attention": "divide:heads,kv_heads", **block_plan}
    result: dict[str, Any] = {}
    for recompute in (False, True):
        model = copy.deepcopy(block)
        apply_tensor_parallel(model, full_plan, axis)
        axis.traffic.reset()
        y = checkpoint(model[0], x, use_reentrant=False) if recompute else model(x)
        forward = axis.traffic.elements["all_reduce"]
        y.sum().backward()
        result[f"recompute={recompute}"] = (forward, dict(axis.traffic.elements))
    model = copy.deepcopy(block)
    apply_tensor_parallel(model, full_plan, axis, sequence=True, blocks=[model[0]])
    axis.traffic.reset()
    model(x).sum().backward()
    result["sequence"] = dict(axis.traffic.elements)
    model.eval()
    axis.traffic.reset()
    with torch.no_grad():
        model(x)
    result["no_grad"] = dict(axis.traffic.elements)
    return result


@pytest.mark.parametrize("size", [2, 4])
def test_a_block_costs_four_all_reduces(size: int) -> None:
    one = 2 * (size - 1) * B * T * D // size  # an all-reduce of b * s * h
    half = one // 2  # an all-gather, or a reduce-scatter
    for result in spawn(_traffic, size):
        assert result["recompute=False"] == (2 * one, {"all_reduce": 4 * one})
        # Two are recomputed: the second sum is the last thing of the block, which nothing in backward needs.
        assert result["recompute=True"] == (2 * one, {"all_reduce": 5 * one})
        norms = 2 * (size - 1) * 3 * D // size
        # Entry: nothing forward, a gather backward; exit: a gather forward. The rest as many bytes as all-reduces.
        assert result["sequence"] == {"all_gather": 6 * half, "reduce_scatter": 4 * half, "all_reduce": norms}
        assert result["no_grad"] == {"all_gather": 3 * half, "reduce_scatter": 2 * half}


# --- dropout ---------------------------------------------------------------------------------------------------------


class Mask(nn.Module):
    """A dropout that remembers its masks: those of the first forward, and those of recomputation after them."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = self.drop(torch.ones_like(x)).detach()
        self.seen.append(mask)
        return x * mask


def _dropout(rank: int, size: int, sequence: bool, recompute: str) -> dict[str, Any]:
    axis = Axis("tensor", make_comm())
    shape = Shape(dropout=0.5, blocks=2)
    model = build(shape)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout):
            model.set_submodule(name, Mask())
    apply_tensor_parallel(model, plan(shape, size), axis, sequence=sequence, blocks=list(model.blocks))
    if recompute == "outside":  # around the hooks of the block
        model.recompute = True
    elif recompute == "inside":  # inside them
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    torch.manual_seed(100 + rank)
    share_random_state(axis, torch.device("cpu"))
    result: dict[str, Any] = {}
    after_forward = torch.empty(0)
    for step in range(2):
        for mask in model.modules():
            if isinstance(mask, Mask):
                mask.seen.clear()
        loss = loss_of(model)
        after_forward = torch.random.get_rng_state()
        loss.backward()
        result[f"backward draws nothing {step}"] = torch.equal(after_forward, torch.random.get_rng_state())
        masks = {name: list(m.seen) for name, m in model.named_modules() if isinstance(m, Mask)}
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        result[f"step {step}"] = (loss.item(), masks, grads)
    result["state"] = after_forward
    model.eval()
    loss_of(model)
    result["evaluation draws nothing"] = torch.equal(torch.random.get_rng_state(), result["state"])
    return result


def _all_dropout(rank: int, size: int) -> dict[tuple[bool, str], Any]:
    cases = [(s, r) for s in (False, True) for r in ("", "outside", "inside")]
    return {case: _dropout(rank, size, *case) for case in cases}


@pytest.fixture(scope="module")
def dropped() -> Any:
    return spawn(_all_dropout, 2)


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_is_equal_for_replicated_activations_and_differs_for_sharded_ones(sequence: bool, dropped: Any) -> None:
    first, second = (rank[sequence, ""] for rank in dropped)
    for step in ("step 0", "step 1"):
        for name, masks in first[step][1].items():
            same = all(torch.equal(a, b) for a, b in zip(masks, second[step][1][name], strict=True))
            sharded = name.endswith("inner") or (sequence and name != "start")
            assert same != sharded, f"{name}: {'the same' if same else 'different'} in {step}"
    assert not torch.equal(first["step 0"][1]["start"][0], first["step 1"][1]["start"][0])
    assert torch.equal(first["state"], second["state"]), "the ranks' generators are apart after the step"
    assert first["evaluation draws nothing"]


@pytest.mark.parametrize("how", ["outside", "inside"])
@pytest.mark.parametrize("sequence", [False, True])
def test_recomputation_draws_the_same_numbers(sequence: bool, how: str, dropped: Any) -> None:
    for rank in dropped:
        plain, recomputed = rank[sequence, ""], rank[sequence, how]
        for step in (0, 1):
            loss, masks, grads = recomputed[f"step {step}"]
            assert loss == plain[f"step {step}"][0]
            for name, seen in masks.items():
                before = plain[f"step {step}"][1][name]
                assert all(torch.equal(mask, before[0]) for mask in seen), name
                assert len(seen) == (1 if name == "start" else 2)
            for name, grad in grads.items():
                assert torch.equal(grad, plain[f"step {step}"][2][name]), name
            assert recomputed[f"backward draws nothing {step}"]


def _failing_region(rank: int, size: int) -> tuple[bool, bool]:
    axis = Axis("tensor", make_comm())
    shape = Shape(dropout=0.5, blocks=1)
    model = build(shape)
    apply_tensor_parallel(model, plan(shape, size), axis)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    streams, cpu = Streams(rank), torch.device("cpu")
    handle = model.blocks[0].mlp.inner.register_forward_pre_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model)
    was_open = streams.is_open(cpu)
    handle.remove()
    loss_of(model)
    states = axis.comm.exchange_objects(torch.random.get_rng_state())
    return was_open, torch.equal(states[0], states[1])


def test_an_exception_inside_ends_the_region() -> None:
    assert spawn(_failing_region, 2) == [(False, True)] * 2


# --- layers one by one -----------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """As transformers has it, down to the name."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view((*x.shape[:-1], self.nf))


class Scaled(nn.Embedding):
    """A subclass with a forward of its own, as many models have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class Heads(nn.Module):
    """A table with a column per head, and a bare parameter with a row per head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.sink = nn.Embedding(T, 4), nn.Parameter(torch.randn(4))
        self.project, self.output = nn.Linear(D, 4), nn.Linear(4, D)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x) * self.scale + self.table(torch.arange(x.shape[1])) + self.sink
        return self.output(torch.tanh(y))


class MLP(nn.Module):
    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = linear(D, 4 * D), linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(torch.tanh(gate) * up)


class Embedded(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x.abs().sum(-1) * 100).long() % self.rows) + x

    rows = 5


class Reversed(nn.Module):
    """Row before column, full in between: the input is split, the output gathered; fused parts on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3 * D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.second(torch.tanh(self.first(x))).split([D // 2, D // 2, 2 * D], -1)
        return torch.cat([a * b, c], -1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Plan]] = {
    "linear": (lambda: MLP(nn.Linear), {"up": "packed_colwise", "down": "rowwise"}),
    "conv1d": (lambda: MLP(lambda nx, nf: Conv1D(nf, nx)), {"up": Column(sections=(-1, -1)), "down": "row"}),
    "heads": (
        Heads,
        {
            "project": "column",
            "output": "row",
            "table": "features",
            "sink": Features(dim=0),
            "scale": PartialGradient(),
        },
    ),
    "vocab": (lambda: Embedded(nn.Embedding(5, D)), {"embedding": "vocab"}),
    "scaled": (lambda: Embedded(Scaled(5, D)), {"embedding": "embedding_rowwise"}),
    "columns of an embedding": (lambda: Embedded(nn.Embedding(5, D)), {"embedding": "embedding_colwise"}),
    "full in between": (
        Reversed,
        {"first": Row(split=True, sections=(4, 12)), "second": Column(gather=True, sections=(8, 8, 32))},
    ),
}


def _run_layer(model: nn.Module) -> Tensor:
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).double().view_as(y)).sum().backward()
    assert x.grad is not None
    return torch.cat([y.detach().flatten(), x.grad.flatten()])


def _layers(rank: int, size: int) -> dict[str, tuple[Tensor, Gradients]]:
    axis = Axis("tensor", make_comm())
    result = {}
    for name, (make, layer_plan) in LAYERS.items():
        torch.manual_seed(2)
        model = make().double()
        tp = apply_tensor_parallel(model, layer_plan, axis)
        result[name] = (_run_layer(model), gradients(model, tp))
        assert tp.describe().startswith("tensor parallelism over 2 ranks")
    return result


@pytest.fixture(scope="module")
def layers() -> Any:
    return spawn(_layers, 2)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_the_whole_one(name: str, layers: Any) -> None:
    torch.manual_seed(2)
    model = LAYERS[name][0]().double()
    expected = _run_layer(model)
    for output, _ in (rank[name] for rank in layers):
        assert float((output - expected).norm() / expected.norm()) <= EXACT[torch.float64]
    errors = errors_of(model, [rank[name][1] for rank in layers])
    assert errors
    assert max(errors.values()) <= EXACT[torch.float64], errors


# --- the rest of the surface -----------------------------------------------------------------------------------------


@on_ranks(4, timeout_s=120, init_process_group=True)
def test_parameters_on_meta_are_cut_and_filled_later(rank: int, world_size: int) -> None:
    """Parameters on meta are cut without memory, filled by `parts`, and get their hooks when they have values."""
    axis = Axis("tensor", make_comm())
    shape = SHAPES["gqa"]
    results: list[Any] = []
    for meta in (False, True):
        model = build(shape)
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        if meta:
            model = model.to("meta")
            model.head.weight = model.embedding.weight
        before = dict(model.named_parameters())
        tp = apply_tensor_parallel(model, plan(shape, world_size), axis, sequence=True, blocks=list(model.blocks))
        assert all(p is before[name] for name, p in model.named_parameters())
        for name, p in model.named_parameters():
            if meta:
                assert p.is_meta
                part = tp.parts.get(id(p))
                value = values[name]
                if part is not None:
                    value = torch.cat([value.narrow(part.dim, at, n) for at, n in part.runs], part.dim)
                assert p.shape == value.shape
                torch.utils.swap_tensors(p, nn.Parameter(value.clone()))
        loss = loss_of(model)
        loss.backward()
        results += [loss.item(), gradients(model, tp)]
    loss, grads, meta_loss, meta_grads = tuple(results)
    assert loss == meta_loss
    for name, (part, grad) in grads.items():
        assert meta_grads[name][0] == part
        assert torch.equal(meta_grads[name][1], grad), name


@on_ranks(2, timeout_s=120, init_process_group=True)
def test_copies_compilation_removal_and_refusals(rank: int, world_size: int) -> None:
    axis = Axis("tensor", make_comm())
    shape = Shape(blocks=2)
    model = build(shape)
    names = [name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()]
    copied = copy.deepcopy(model)
    loss_of(copied).backward()
    tp = apply_tensor_parallel(model, plan(shape, world_size), axis)
    assert names == ([name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()])
    assert model.blocks[0].attention.heads == HEADS // world_size  # type: ignore[union-attr]

    # A copy is sharded too, and does not share parameters.
    twin = copy.deepcopy(model)
    loss = loss_of(model)
    assert torch.equal(loss, loss_of(twin))
    loss_of(twin).backward()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(model)

    # Nothing is held after the step: what was shared goes with its source.
    loss.backward()
    assert tp._copy._copy is None

    # A compiled block breaks the graph, and computes the same.
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for block in model.blocks[:1]:
        block.compile(backend="aot_eager")
    loss_of(model).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.allclose(p.grad, grads[name], rtol=1e-12, atol=1e-15), name

    tp.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    alone = build(shape)
    assert apply_tensor_parallel(alone, plan(shape, 1), Axis("tensor")).parts == {}
    assert torch.equal(loss_of(alone), loss_of(copied))

    # Tokens that are not divisible are refused on every rank before anything is sent.
    model = build(shape)
    apply_tensor_parallel(model, plan(shape, world_size), axis, sequence=True, blocks=list(model.blocks))
    axis.traffic.reset()
    with pytest.raises(PlanError, match=r"first block got \(2, 7, 16\)"):
        model.blocks[0](torch.randn(2, 7, 16).double())
    assert not axis.traffic.elements


@on_ranks(4, timeout_s=120, init_process_group=True)
def test_regions_are_adjoint_to_their_backward(rank: int, world_size: int) -> None:
    axis = Axis("tensor", make_comm())
    torch.manual_seed(rank)
    x = torch.randn(4, 8, 4, 3, dtype=torch.float64, requires_grad=True)
    everyone = axis.all_gather(x.detach().unsqueeze(0), 0)

    # Tokens are sharded, then heads: rank r has head r of all tokens, in order.
    y = regions.exchange(x, axis, 2, 1)
    assert y.shape == (4, 8 * world_size, 4 // world_size, 3)
    assert torch.equal(y, torch.cat(list(everyone), 1).chunk(world_size, 2)[rank])
    assert torch.equal(regions.exchange(y, axis, 1, 2), x)
    with pytest.raises(PlanError, match="is not divisible"):
        regions.exchange(x, axis, 3, 1)

    # <ahead(x), y> summed over the ranks equals <x, back(y)> summed: true for maps whose inputs differ by rank.
    for ahead in (
        lambda t: regions.exchange(t, axis, 2, 1),
        lambda t: regions.gather_sequence(t, axis),
        lambda t: regions.scatter_sequence(t, axis),
    ):
        out = ahead(x)
        weight = torch.randn_like(out)
        (grad,) = torch.autograd.grad(out, x, weight)
        both = axis.all_reduce(torch.stack([(out * weight).sum(), (x * grad).sum()]).detach())
        assert torch.allclose(both[0], both[1], rtol=1e-12)

    # An expanded gradient, as that of a sum is; and a second derivative.
    for region in (regions.copy_to, regions.reduce_from, regions.gather_from):
        (grad,) = torch.autograd.grad(region(x, axis).sum(), x)
        assert torch.equal(grad, torch.full_like(x, world_size if region is regions.copy_to else 1))
    (grad,) = torch.autograd.grad((regions.copy_to(x, axis) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.allclose(grad, 3 * axis.all_reduce(x.detach() ** 2), rtol=1e-12)
    assert torch.allclose(second, 6 * axis.all_reduce(x.detach()), rtol=1e-12)
    with torch.no_grad():
        assert torch.equal(regions.copy_to(x, axis), x)
        assert not regions.reduce_from(x, axis).requires_grad

    # Two adjacent copies sum among themselves, in 16 bits too; 7 is not divisible by 2.
    for dtype in (torch.float64, torch.bfloat16):
        axis.traffic.reset()
        summed = regions.sum_copies(torch.full((7,), rank + 1.0, dtype=dtype), axis, 2)
        assert torch.equal(summed, torch.full((7,), 3.0 if rank < 2 else 7.0, dtype=dtype))
        assert axis.traffic.elements["all_to_all"] == 7

    # The copy that layers share: for the same tensor, unchanged, and no longer than it lives.
    shared = regions.SharedCopy(axis)
    y = x * 1
    assert shared(y) is shared(y)
    first = shared(y)
    assert shared(x * 1) is not first
    first = shared(y)
    y.add_(1)
    assert shared(y) is not first
    with torch.no_grad():
        assert shared(y) is y
    del y, first
    assert shared._copy is None
