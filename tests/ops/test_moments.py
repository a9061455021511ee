"""Formats of moments: what is stored is near, unbiased, stable, and never a lost second moment."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ls_strategy.ops import moments
from ls_strategy.ops.moments import BLOCK, Moment, empty, random_bits

SMALLEST = 2.0**-16  # of the scale


def stored(value, moment_format, signed, seed=0, offset=0) -> Moment:
    m = empty(value.numel(), moment_format, signed)
    m.store_(value, seed=seed, offset=offset)
    return m


def fmix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


@given(seed=st.integers(0, 2**31 - 1), offset=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_random_bits_are_the_hash_of_the_position(seed, offset):
    bits = random_bits(5, seed, offset)
    expected = [fmix32(((offset + i) * 0x9E3779B9 + seed) % 2**32) for i in range(5)]
    assert [b % 2**32 for b in bits.tolist()] == expected


def test_empty_is_zero():
    for moment_format in ("fp32", "bf16", "int8"):
        m = empty(257, moment_format, True)
        assert m.dequantize().eq(0).all()
        assert (m.scales is None) == (moment_format != "int8")
    assert m.scales.shape == (2,)


@pytest.mark.parametrize("scale_exponent", [-126, -30, 0, 50])
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_stored_as_itself(signed, scale_exponent):
    codes = torch.arange(BLOCK, dtype=torch.int32)
    codes[128] = 0  # minus zero is not a code
    if signed:
        codes[0] = 127
    m = Moment(codes.to(torch.uint8), torch.full((1,), 2.0**scale_exponent), signed)
    value = m.dequantize()
    if not signed and scale_exponent < -30:
        pytest.skip("squares of these are not fp32 numbers")
    for seed in range(20):
        again = stored(value, "int8", signed, seed)
        assert torch.equal(again.dequantize(), value)
        assert torch.equal(again.codes, m.codes)


@pytest.mark.parametrize("top", [1.0, 1.5, 2.0**-126, 3e38, 1e-45, 65504.0])
def test_the_scale_is_a_power_of_two_not_below(top):
    value = torch.zeros(BLOCK)
    value[7] = -top
    m = stored(value, "int8", True)
    scale = m.scales.item()
    assert torch.frexp(m.scales)[0].item() == 0.5
    assert scale >= min(value.abs().max().item(), 2.0**127)
    assert scale <= max(2 * value.abs().max().item(), 2.0**-126)


@pytest.mark.parametrize("signed", [True, False])
def test_error_bound(signed):
    torch.manual_seed(0)
    x = torch.randn(100 * BLOCK) * 10 ** (torch.rand(100 * BLOCK) * 8 - 8)
    x = x if signed else x.abs()
    root = x if signed else (x * x).sqrt()
    value = stored(x if signed else x * x, "int8", signed).dequantize()
    error = ((value if signed else value.sqrt()) - root).abs()
    scale = root.view(-1, BLOCK).abs().amax(1).log2().ceil().exp2().repeat_interleave(BLOCK)
    step = 1 / 8 if signed else 1 / 16
    assert (error <= root.abs() * step * 1.0001 + SMALLEST * (1 + 2 * step) * scale).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("moment_format", ["bf16", "int8"])
def test_rounding_is_unbiased(moment_format, signed):
    """Of the value, or of its root, which is what is rounded: mean error within four standard errors."""
    n = 1 << 18
    for x in (0.7001, 0.0123, 0.11, 0.9):
        value = torch.full((n,), x if signed else x * x)
        value[::BLOCK] = 1.0
        result = stored(value, moment_format, signed, seed=11).dequantize()
        if not signed and moment_format == "int8":
            value, result = moments.root(value), result.sqrt()
        error = (result - value).double()
        assert error.abs().max() > 0
        assert error.mean().abs() < 4 * error.std() / n**0.5


@pytest.mark.wide
def test_a_small_fraction_adds_up():
    """m = 0.999 m + 0.001 g from 0 towards g: rounding to nearest would stop at a fraction of it."""
    for moment_format in ("bf16", "int8"):
        m = empty(4 * BLOCK, moment_format, True)
        for step in range(1500):
            m.store_(m.dequantize() * 0.999 + 0.001, seed=step)
        assert m.dequantize().mean().item() == pytest.approx(1 - 0.999**1500, rel=0.03)


def test_a_positive_second_moment_stays_positive():
    value = torch.full((BLOCK,), 1e-38)
    value[0], value[1], value[2] = 1e30, 0.0, 1e-45
    m = stored(value, "int8", False)
    codes = m.codes.tolist()
    assert codes[0] > 0
    assert codes[1] == 0
    assert codes[2] == 1
    assert min(codes[2:]) == 1


@pytest.mark.parametrize("moment_format", ["fp32", "bf16", "int8"])
def test_storing_in_portions(moment_format):
    x = torch.randn(1000)
    whole = stored(x, moment_format, True, seed=5, offset=100)
    portions = empty(1000, moment_format, True)
    for lo, hi in ((0, 256), (256, 768), (768, 1000)):
        portions.narrow(lo, hi).store_(x[lo:hi], seed=5, offset=100 + lo)
    assert torch.equal(whole.codes, portions.codes)
    assert torch.equal(whole.dequantize(), portions.dequantize())


def test_narrow_keeps_to_blocks():
    with pytest.raises(ValueError, match="256"):
        empty(1000, "int8", True).narrow(16, 100)


@pytest.mark.parametrize("moment_format", ["bf16", "int8"])
def test_not_finite(moment_format):
    x = torch.randn(600)
    x[300] = float("nan")
    m = stored(x, moment_format, True)
    assert m.dequantize()[300].isnan()
    assert m.dequantize()[:256].isfinite().all()
