"""Weights in 8 and 4 bits: rounding, products, and layers that are changed in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ls_strategy
from ls_strategy import ConfigError, PlanError, StateError
from ls_strategy.extras.inference import rounding
from ls_strategy.extras.inference.linear import QuantizedLinear, quantize_linear
from ls_strategy.extras.inference.measure import perplexity
from ls_strategy.extras.inference.quantize import weight_bytes
from ls_strategy.ops.linear import pack, spell_out_int4, spell_out_int8


def weight_of(out: int, width: int, seed: int = 0) -> Tensor:
    """Normal, with channels of different sizes and a few outliers, as trained weights have them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator) * torch.rand(out, 1, generator=generator)
    weight.view(-1)[:: out * width // 7] *= 6
    return weight


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def test_int8_is_off_by_half_a_level_at_most() -> None:
    weight = weight_of(48, 96)
    levels, scales = rounding.round_int8(weight)
    assert levels.dtype is torch.int8
    assert scales.shape == (48,)
    assert levels.abs().amax(1).eq(127).all()
    error = (spell_out_int8(levels, scales) - weight).abs()
    assert (error <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize("group", rounding.GROUPS)
def test_int4_is_better_than_the_full_range_of_each_group(group: int) -> None:
    weight = weight_of(48, 256)
    levels, scales_zeros = rounding.round_int4(weight, group)
    assert levels.dtype is torch.uint8
    assert levels.max() <= 15
    assert scales_zeros.shape == (48, 256 // group, 2)
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    plain = (((groups - low) / scale).round() * scale + low).flatten(1)
    ours = spell_out_int4(pack(levels), scales_zeros)
    for mine, its, exact in zip(
        *(w.unflatten(1, (-1, group)).flatten(0, 1) for w in (ours, plain, weight)), strict=True
    ):
        assert (mine - exact).square().sum() <= (its - exact).square().sum() * 1.0001
    assert relative(ours, weight) < 0.96 * relative(plain, weight)


def test_int4_of_equal_weights_and_zeros_is_exact() -> None:
    weight = torch.full((16, 64), 0.37)
    weight[3] = 0
    levels, scales_zeros = rounding.round_int4(weight, 32)
    torch.testing.assert_close(spell_out_int4(pack(levels), scales_zeros), weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("format", "out"), [("int8", 48), ("int8", 37), ("int4", 48), ("int4", 37)])
def test_the_product_is_that_of_the_rounded_weight(format: Any, out: int, dtype: torch.dtype, rows: int) -> None:
    """200 rows spell the weight out."""
    module = nn.Linear(192, out, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(weight_of(out, 192))
    expected_weight = module.weight.detach().float()
    levels, scales = rounding.round_int8(expected_weight)
    expected = spell_out_int8(levels, scales)
    if format == "int4":
        levels, scales = rounding.round_int4(expected_weight, 64)
        expected = spell_out_int4(pack(levels), scales)
    bias = module.bias
    quantized = quantize_linear(module, format)
    assert quantized is module
    assert isinstance(quantized, QuantizedLinear)
    assert quantized.bias is bias
    assert quantized.weight.dtype is torch.int8
    limit = 1e-6 if dtype is torch.float32 else 4e-3
    assert relative(quantized.dequantized().float(), expected) < limit
    x = torch.randn(2, rows, 192).to(dtype)
    y = quantized(x)
    assert y.shape == (2, rows, out)
    assert y.dtype is dtype
    assert relative(y.float(), functional.linear(x.float(), expected, bias.float())) < 4 * limit


def test_calls_that_cannot_work_are_refused() -> None:
    layer = quantize_linear(nn.Linear(64, 32), "int4")
    with pytest.raises(StateError, match="casts them to the dtype of the weight"):
        layer(torch.ones(1, 64, dtype=torch.int8))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 128, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, 96, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


@pytest.mark.parametrize(("format", "bits", "limit"), [("int8", 8, 0.01), ("int4", 4, 0.12)])
def test_a_model_in_fewer_bits(format: Any, bits: int, limit: float) -> None:
    torch.manual_seed(0)
    model, tokens = Net(), torch.arange(40).view(2, 20)
    exact = model(tokens)
    names = [name for name, _ in model.named_modules()]
    blocks = weight_bytes(model.blocks)
    engine = ls_strategy.init_inference(model, quantize=format)
    assert [name for name, _ in model.named_modules()] == names
    assert relative(engine(tokens), exact) < limit
    report = engine.quantization
    assert report is not None
    assert report.layers == {
        **{f"blocks.{i}.{name}": format for i in (0, 1) for name in ("up", "down")},
        "lm_head": "int8",
    }
    assert report.bytes_after == weight_bytes(model) < report.bytes_before
    weights = sum(b.up.weight.nbytes + b.down.weight.nbytes for b in model.blocks)
    floats = 2 * 2 * 4 * 128 * 128 * 4  # two blocks of two matrices in fp32
    assert weights * 32 // bits == floats
    assert weight_bytes(model.blocks) < blocks * (bits / 32 + 0.05)


def test_what_stays_as_it_is() -> None:
    model = Net(width=40, tied=True)
    engine = ls_strategy.init_inference(model, quantize="int4")
    assert engine.quantization is not None
    assert engine.quantization.kept == {"lm_head": "shares its weight with another module"}
    assert engine.quantization.layers["blocks.0.up"] == "int8"  # no group divides 40
    assert engine.quantization.layers["blocks.0.down"] == "int4"  # 160 in groups of 32
    assert model.lm_head.weight is model.embed.weight
    with pytest.raises(PlanError, match="no linear layer in a list of repeated blocks"):
        ls_strategy.init_inference(nn.Sequential(nn.Linear(4, 4)), quantize="int8")


def test_perplexity_of_known_models() -> None:
    tokens = torch.randint(0, 16, (500,))
    even = perplexity(lambda rows: torch.zeros(*rows.shape, 16), tokens, context=50, batch=3)
    assert even == pytest.approx(16)

    class Output:
        def __init__(self, rows: Tensor) -> None:
            self.logits = 50.0 * functional.one_hot(rows.roll(-1, 1), 16).float()

    assert perplexity(Output, tokens, context=50, windows=4) == pytest.approx(1, abs=1e-4)
    with pytest.raises(ConfigError, match="give a longer text"):
        perplexity(Output, tokens[:10], context=50)
