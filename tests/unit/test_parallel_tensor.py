"""Layers that are sharded in place compute what the full layers compute, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.parallel.logits import gather
from ls_strategy.parallel.styles import Column, ExpertFeatures, Features, PartialGradient, Plan, Replicate, Row, Vocab
from ls_strategy.parallel.tensor.shard import apply_tensor_parallel
from tests.unit.thread_ranks import ThreadAxis, on_ranks

WIDTH, INNER, ROWS = 6, 8, 5


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Language(nn.Module):
    """Embedding and head of one weight; 5 rows are not divisible by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return gather(self.head(self.embedding(x)))


class SharedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.intermediate_dim = 4
        self.gate_up_proj = nn.Parameter(torch.randn(2, 2 * 4, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(2, WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.gate_up_proj[1].T).split(self.intermediate_dim, -1)
        return (functional.silu(gate) * up) @ self.down_proj[1].T


def floats() -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(2))


def tokens() -> Tensor:
    return torch.tensor([[0, 4, 3], [2, 1, 0]])


CASES: dict[str, tuple[Callable[[], nn.Module], Plan, Callable[[], Tensor]]] = {
    "column, row": (Mlp, {"up": "column", "down": "row"}, floats),
    "without bias": (lambda: Mlp(bias=False), {"up": "column", "down": "row"}, floats),
    "gathered column": (Mlp, {"up": Column(gather=True)}, floats),
    "split row": (Mlp, {"down": Row(split=True)}, floats),
    "sections": (Mlp, {"up": Column(sections=(2, 6), gather=True), "down": Row(sections=(2, 6), split=True)}, floats),
    "vocabulary": (Language, {"embedding": Vocab(), "head": Vocab()}, tokens),
    "features": (lambda: nn.Sequential(nn.Embedding(ROWS, WIDTH)), {"0": Features(gather=True)}, tokens),
    "experts": (lambda: nn.Sequential(SharedExperts()), {"0": ExpertFeatures()}, floats),
    "replicate": (Mlp, {"up": Replicate(), "down": Replicate()}, floats),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name][0]()


def run(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    (y * torch.arange(y.numel()).view(y.shape).to(y.dtype)).sum().backward()
    return y.detach()


def sharded(name: str, body: Callable[[nn.Module, Any], Any], size: int = 2) -> list[Any]:
    models = [build(name) for _ in range(size)]  # here, since threads share the default generator

    def on_rank(axis: ThreadAxis) -> Any:
        model = models[axis.rank]
        return body(model, apply_tensor_parallel(model, CASES[name][1], axis))

    return on_ranks(size, on_rank)


def local(value: Tensor | None, part: Any) -> Tensor:
    assert value is not None
    return value if part is None else torch.cat([value.narrow(part.dim, *run) for run in part.runs], part.dim)


@pytest.mark.parametrize("name", CASES)
def test_values_outputs_and_gradients_are_those_of_one_process(name: str) -> None:
    full = build(name)
    values = [p.detach().clone() for p in full.parameters()]
    expected = run(full, CASES[name][2]())

    def body(model: nn.Module, parallel: Any) -> tuple[Tensor, list[tuple[Any, Any, Any]]]:
        assert bool(parallel.parts) == (name != "replicate")
        mine = [p.detach().clone() for p in model.parameters()]
        y = run(model, CASES[name][2]())
        params = list(model.parameters())
        return y, [(v, p.grad, parallel.parts.get(id(p))) for v, p in zip(mine, params, strict=True)]

    for y, rank in sharded(name, body):
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        for value, parameter, (mine, grad, part) in zip(values, full.parameters(), rank, strict=True):
            assert torch.equal(mine, local(value, part))
            torch.testing.assert_close(grad, local(parameter.grad, part), rtol=1e-5, atol=1e-5)


def test_values_become_those_of_rank_0() -> None:
    def body(axis: ThreadAxis) -> Tensor:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, axis.rank + 1.0)
        apply_tensor_parallel(model, {"": Replicate()}, axis)
        return model.weight.detach()

    assert all((weight == 1).all() for weight in on_ranks(2, body))


def test_attributes_hold_local_lengths_and_the_padding_index_of_the_rank_that_holds_it() -> None:
    for model in sharded("column, row", lambda model, _: model):
        assert (model.up.out_features, model.down.in_features) == (INNER // 2, INNER // 2)
    models = sharded("vocabulary", lambda model, _: model)
    assert [model.embedding.padding_idx for model in models] == [None, 0]


def test_a_partial_gradient_is_summed() -> None:
    def body(axis: ThreadAxis) -> Tensor:
        norm = nn.LayerNorm(2)
        apply_tensor_parallel(nn.ModuleDict({"norm": norm}), {"norm": PartialGradient()}, axis)
        (norm(torch.randn(3, 2)) * (axis.rank + 1)).sum().backward()
        assert norm.bias.grad is not None
        return norm.bias.grad

    assert [grad.tolist() for grad in on_ranks(2, body)] == [[9.0, 9.0], [9.0, 9.0]]


def test_parameters_on_meta_get_the_local_shape() -> None:
    def body(axis: ThreadAxis) -> tuple[int, ...]:
        model = Mlp().to("meta")
        apply_tensor_parallel(model, {"up": "column", "down": "row"}, axis)
        return tuple(model.up.weight.shape)

    assert on_ranks(2, body) == [(INNER // 2, WIDTH)] * 2


def test_a_removed_plan_leaves_local_layers() -> None:
    def body(model: Any, parallel: Any) -> tuple[Tensor, Tensor]:
        parallel.remove()
        parallel.remove()
        up, down, x = model.up, model.down, floats()
        expected = functional.linear(functional.gelu(functional.linear(x, up.weight, up.bias)), down.weight, down.bias)
        return model(x), expected

    for actual, expected in sharded("column, row", body):
        assert torch.equal(actual, expected)


def test_a_copy_in_memory_computes_the_same() -> None:
    def body(model: nn.Module, parallel: Any) -> tuple[Tensor, Tensor]:
        return model(floats()), copy.deepcopy(model)(floats())

    for original, copied in sharded("gathered column", body):
        assert torch.equal(original, copied)


def test_the_summary_counts_layers_and_elements() -> None:
    descriptions = sharded("column, row", lambda _, parallel: parallel.describe())
    assert descriptions[0].splitlines() == [
        "tensor parallelism over 2 ranks: 1 Column, 1 Row",
        "sharded parameters: 3, 104 elements, of which this rank holds 52",
    ]


def test_a_single_rank_only_checks() -> None:
    model = Mlp()
    parallel = apply_tensor_parallel(model, {"up": "column", "down": "row"}, Axis("tensor"))
    assert not parallel.parts
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_copies_by_section_are_refused_for_training() -> None:
    axis = Axis("tensor")
    axis.size = 2  # no collective may be reached
    plan: Plan = {"up": Column(sections=(4, 4), copies=(1, 2))}
    with pytest.raises(PlanError, match=r"Only inference \(init_inference\) can shard it"):
        apply_tensor_parallel(Mlp(), plan, axis)
