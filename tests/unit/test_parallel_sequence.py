"""Blocks with sharded tokens: what gathers, whose gradient is partial, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.parallel.tensor.resolved_plan import resolve
from ls_strategy.parallel.tensor.sequence import TokenBlocks, owners
from ls_strategy.parallel.tensor.shard import apply_tensor_parallel
from tests.unit.test_parallel_resolved_plan import QKV, Model
from tests.unit.thread_ranks import ThreadAxis, on_ranks


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


# --- on ranks ---------------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Mixes tokens by their running mean, which needs all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.down((self.up(x).cumsum(1) / counts).relu())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(4), Mixer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(), Layer()), nn.Linear(4, 4))


PLAN: dict[str, Any] = {"*.up": "column", "*.down": "row"}
X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))


def on_two_ranks(body: Any) -> list[Any]:
    models = [network() for _ in range(2)]  # here, since threads share the default generator

    def on_rank(axis: ThreadAxis) -> Any:
        model = models[axis.rank]
        parallel = apply_tensor_parallel(model, PLAN, axis, sequence=True, blocks=list(model[1].children()))
        return body(model, parallel)

    return on_ranks(2, on_rank)


def test_outputs_and_gradients_are_those_of_one_process() -> None:
    expected = network()
    output = expected(X)
    output.square().sum().backward()
    shapes: list[Any] = []

    def body(model: nn.Module, parallel: Any) -> tuple[torch.Tensor, list[tuple[Any, Any]]]:
        model.get_submodule("1.1.norm").register_forward_hook(lambda _m, _args, y: shapes.append(tuple(y.shape)))
        y = model(X)
        y.square().sum().backward()
        return y.detach(), [(p.grad, parallel.parts.get(id(p))) for p in model.parameters()]

    for y, rank in on_two_ranks(body):
        torch.testing.assert_close(y, output.detach())
        for (name, parameter), (grad, part) in zip(expected.named_parameters(), rank, strict=True):
            full = parameter.grad
            assert full is not None
            local = full if part is None else torch.cat([full.narrow(part.dim, *run) for run in part.runs], part.dim)
            torch.testing.assert_close(grad, local, msg=lambda m, name=name: f"{name}: {m}")
    assert shapes == [(2, 3, 4)] * 2, "between the layers of a block each rank has its tokens"


class Memory(Mixer):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.down((self.up(x) + self.up(memory).mean(1, keepdim=True)).relu())


class Crossed(nn.Module):
    """A block that also gets hidden states from outside, as those of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Memory()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(x, memory)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.blocks = nn.Linear(4, 4), nn.ModuleList([Crossed()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x, self.encoder(x))


def test_other_hidden_states_get_the_gradients_of_all_ranks() -> None:
    expected = Decoder()
    expected(X).square().sum().backward()
    models = [Decoder() for _ in range(2)]

    def on_rank(axis: ThreadAxis) -> Any:
        model = models[axis.rank]
        apply_tensor_parallel(model, PLAN, axis, sequence=True, blocks=list(model.blocks))
        model(X).square().sum().backward()
        return model.encoder.weight.grad

    for grad in on_ranks(2, on_rank):
        torch.testing.assert_close(grad, expected.encoder.weight.grad)


def test_tokens_that_are_not_divisible_are_refused() -> None:
    def body(model: nn.Module, _: Any) -> None:
        with pytest.raises(PlanError, match=r"over 2 ranks, but the first block got \(2, 5, 4\). Pad T"):
            model(X[:, :5])

    on_two_ranks(body)


def test_the_summary_counts_the_blocks() -> None:
    lines = on_two_ranks(lambda _, parallel: parallel.describe())[0].splitlines()
    assert lines[-1] == "activations between 2 blocks are sharded along the tokens"


def test_children_of_lists_belong_to_the_module_that_calls_them() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(1, 1)})])
    assert [(parent, child) for parent, child in owners(model)] == [(model, model.layers[0]["a"])]  # type: ignore[index]
