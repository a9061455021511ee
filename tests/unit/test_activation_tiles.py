"""Tiled layers: the results and gradients of one call, with the memory of one tile."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.activations.apply import Activations
from ls_strategy.activations.tiles import Tiles
from ls_strategy.config import RecomputeConfig, TilingConfig
from ls_strategy.errors import PlanError
from recipes.gpt.network import GPT, GPTConfig
from tests.live_bytes import LiveBytes


def make(dtype: torch.dtype = torch.float64, **options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=40, block_size=64, num_layers=2, width=16, **options)).to(dtype)


def run(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(tokens).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


TOKENS = torch.arange(3 * 45).view(3, 45) % 40


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("modules", [(), ("blocks.*.mlp_norm",), ("*.mlp", "norm")])
def test_results_and_gradients_are_those_of_one_call(kind, recompute, modules):
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        model = make(dtype, mlp=kind)
        expected = run(model, TOKENS)
        config = None if recompute is None else RecomputeConfig(policy=recompute)
        tiles = Tiles(model, TilingConfig(modules=modules, tokens=8))
        active = Activations(model, torch.device("cpu"), recompute=config)
        assert "8 tokens at a time" in tiles.describe()
        assert error(run(model, TOKENS), expected) <= bound
        with torch.no_grad():
            tiled = model(TOKENS)
        assert error(run(copy.deepcopy(model), TOKENS), expected) <= bound
        active.remove()
        tiles.remove()
        assert error([tiled], [model(TOKENS).detach()]) <= bound
        assert not any("forward" in vars(m) for m in model.modules())


def test_in_16_bits_the_error_is_at_most_twice_that_of_one_call():
    exact = run(make(), TOKENS)
    plain, tiled = make(torch.bfloat16), make(torch.bfloat16)
    tiles = Tiles(tiled, TilingConfig(tokens=3))
    for a, b, c in zip(run(plain, TOKENS), run(tiled, TOKENS), exact, strict=True):
        assert error([b], [c]) <= 2 * error([a], [c]) + 1e-6
    tiles.remove()


def test_random_numbers_are_the_same_in_both_forwards():
    model = make(dropout=0.5)
    tiles = Tiles(model, TilingConfig(tokens=8))
    probe = model.blocks[0].mlp
    torch.manual_seed(1)
    x = torch.randn(1, 45, 16, dtype=torch.float64, requires_grad=True)
    y = probe(x)
    (y * y.detach()).sum().backward()
    weight = probe.down.weight.grad.clone()
    # The loss is quadratic in the last layer, so its gradient times its weight is the squared output.
    torch.testing.assert_close((weight * probe.down.weight).sum(), y.detach().square().sum())
    tiles.remove()


def test_memory_is_that_of_one_tile():
    wide = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8))
    model = nn.ModuleDict({"layer": wide})
    x = torch.randn(1, 2048, 8, requires_grad=True)

    def peak() -> int:
        wide(x).sum().backward()
        with LiveBytes() as live:
            wide(x).sum().backward()
        return live.peak

    full = peak()
    tiles = Tiles(model, TilingConfig(modules=("layer",), tokens=64))
    assert peak() <= full / 8
    tiles.remove()


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(1, keepdim=True))


def test_what_cannot_be_tiled_is_refused():
    with pytest.raises(PlanError, match="found no feed-forward"):
        Tiles(nn.Sequential(nn.Linear(2, 2)), TilingConfig())
    with pytest.raises(PlanError, match="matches 'blocks"):
        Tiles(make(), TilingConfig(modules=("blocks.mlp",)))
    with pytest.raises(PlanError, match="BatchNorm1d"):
        Tiles(nn.Sequential(nn.Sequential(nn.BatchNorm1d(2))), TilingConfig(modules=("0",)))
    model = nn.ModuleDict({"a": Mixing(), "b": nn.LSTM(4, 4), "c": nn.Bilinear(4, 4, 4)})
    tiles = Tiles(model, TilingConfig(modules=("?",), tokens=4))
    x = torch.randn(2, 16, 4)
    with pytest.raises(PlanError, match="mixes tokens"):
        model["a"](x)
    with pytest.raises(PlanError, match="returned tuple"):
        model["b"](x)
    with pytest.raises(PlanError, match="one floating"):
        model["c"](x, x)
    tiles.remove()
