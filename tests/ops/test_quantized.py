"""Tiles of weights in 4 and 8 bits: levels, scales, and kernels that are the reference bit for bit."""

from itertools import pairwise
from statistics import NormalDist

import pytest
import torch

from ls_strategy.ops import linear, quantized
from ls_strategy.ops.extra_library import quantized_library
from ls_strategy.ops.quantized import (
    BITS,
    BLOCK,
    NF4,
    TILE,
    dequantize_,
    dequantize_reference,
    packed_bytes,
    quantize,
    rounded,
)
from tests.ops.conftest import limited

FORMS = tuple(BITS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = {"nf4": NF4, "int4": [i / 7 for i in range(-7, 8)], "int8": [i / 127 for i in range(-127, 128)]}


def weights(tiles, dtype, seed=0):
    """Blocks of very different sizes, some of zeros; some elements at the borders between levels."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randn(tiles * TILE // BLOCK, BLOCK, generator=g)
    sizes = torch.logspace(-9, 4, len(blocks))[torch.randperm(len(blocks), generator=g)]
    values = blocks * sizes[:, None]
    values[3::7] = 0
    values[5::11, ::2] = 0
    return values.to(dtype).flatten()


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_values_are_quantized_to_themselves(dtype, form):
    """Whatever was rounded to the dtype of the forward, saved and loaded is the same to the last bit."""
    values = weights(64, dtype)
    if dtype is torch.float16:
        values[:BLOCK] = 65504.0  # more than the largest bf16 number that fp16 has
        values[BLOCK : 2 * BLOCK] = torch.arange(BLOCK) * 2.0**-24  # the smallest numbers
    once = rounded(values, form)
    assert same_bits(rounded(once, form), once)
    if dtype is not torch.float16:  # there, several levels of a tiny scale are one number
        assert torch.equal(quantize(once, form), quantize(values, form))


@pytest.mark.parametrize("form", FORMS)
def test_every_element_becomes_its_nearest_level(form):
    values = weights(16, torch.float32)
    blocks, result = values.view(-1, BLOCK), rounded(values, form).view(-1, BLOCK)
    scales = blocks.abs().amax(1).bfloat16().float()
    levels = torch.tensor(LEVELS[form], dtype=torch.float64)
    nearest = (blocks[..., None] - levels * scales[:, None, None]).abs().amin(2)
    assert (((blocks - result).abs() - nearest).abs() <= 1e-6 * scales[:, None]).all()
    assert torch.equal(result.abs().amax(1), scales)


def test_levels_are_those_of_qlora():
    """Appendix E: quantiles of the normal distribution, eight positive and seven negative ones, and zero."""
    offset, normal = 0.9677083, NormalDist()
    up = [normal.inv_cdf(offset + (0.5 - offset) * i / 8) for i in range(8)]
    down = [-normal.inv_cdf(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = sorted([*up, 0.0, *down])
    assert [x / max(expected) for x in expected] == pytest.approx(NF4, abs=2e-6)
    assert all(a < b for a, b in pairwise(NF4))


@pytest.mark.parametrize("form", FORMS)
def test_tiles_do_not_depend_on_each_other(form):
    values = weights(6, torch.bfloat16)
    parts = [quantize(part, form) for part in values.split([2 * TILE, TILE, 3 * TILE])]
    assert torch.equal(torch.cat(parts), quantize(values, form))


def test_bytes_of_a_weight():
    for form, most in (("nf4", 0.3), ("int4", 0.3), ("int8", 0.52)):
        assert quantize(torch.zeros(4 * TILE), form).numel() == packed_bytes(4 * TILE, form) <= most * 2 * 4 * TILE
    with pytest.raises(ValueError, match="not full tiles"):
        packed_bytes(TILE - 1, "nf4")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(form, bad):
    values = weights(2, torch.float32)
    values[100] = bad
    result = rounded(values, form).view(-1, BLOCK)
    assert not result[1].isfinite().all()
    assert result[0].isfinite().all()
    assert result[2:].isfinite().all()


def test_chunks_change_nothing(monkeypatch):
    values = weights(9, torch.bfloat16)
    expected = {form: (quantize(values, form), rounded(values, form)) for form in FORMS}
    monkeypatch.setattr(quantized, "_CHUNK_TILES", 4)
    for form, (packed, result) in expected.items():
        assert torch.equal(quantize(values, form), packed)
        out = torch.empty_like(values)
        dequantize_reference(packed, out, form)
        assert same_bits(out, result)


def test_codes_are_packed_as_in_the_products():
    values = torch.randn(TILE)
    codes = quantize(values, "nf4")[TILE // BLOCK * 2 :]
    levels = torch.tensor(NF4)[linear.unpack(codes[None]).long()].view(-1, BLOCK)
    assert torch.equal(
        (levels * values.view(-1, BLOCK).abs().amax(1).bfloat16()[:, None]).flatten(), rounded(values, "nf4")
    )


@pytest.fixture(params=[0, 1, 2], ids=["portable", "avx2", "avx512"])
def kernels(request, compiled):
    if not quantized_library.available("cpu"):
        pytest.skip("no kernels of quantized weights")
    yield from limited(quantized_library, request.param)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_is_the_reference(dtype, form):
    for tiles in (0, 1, 300):
        values = weights(tiles, torch.float32, seed=tiles)
        if tiles:
            values[7] = float("inf")
        packed = quantize(values, form)
        result, expected = (torch.empty(values.numel(), dtype=dtype) for _ in range(2))
        dequantize_(packed, result, form)
        dequantize_reference(packed, expected, form)
        assert torch.equal(result.isnan(), expected.isnan())
        assert same_bits(result.nan_to_num(), expected.nan_to_num())


@pytest.mark.usefixtures("compiled")
def test_shapes_that_do_not_fit_are_refused():
    if not quantized_library.available("cpu"):
        pytest.skip("no kernels of quantized weights")
    packed, out = quantize(torch.zeros(TILE), "nf4"), torch.zeros(TILE)
    operation = torch.ops.ls_strategy.dequantize_
    for bad, match in (((packed[:-1], out, 0), "are not 512 elements"), ((packed, out.double(), 0), "out must be fp32"),
                       ((packed, out, 3), "format 3"), ((packed.char(), out, 0), "must be uint8")):  # fmt: skip
        with pytest.raises(RuntimeError, match=match):
            operation(*bad)
    with pytest.raises(ValueError, match="are not 512 elements of int8"):
        dequantize_(packed, out, "int8")
