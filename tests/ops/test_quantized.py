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
    measures,
    packed_bytes,
    quantize,
    quantize_reference,
    rounded,
    tile_bytes,
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


@pytest.mark.sample(3)
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


def with_hard_numbers(dtype, tiles):
    """Ties between levels, the ends of the dtype, subnormal numbers, and what is not finite, in blocks of their own."""
    values = weights(tiles, torch.float32, seed=tiles)
    blocks = values.view(-1, BLOCK)
    blocks[0] = (torch.arange(BLOCK) - 31.5) * 2
    blocks[0, 0] = 127.0  # halves between the levels of int8
    blocks[1] = (torch.arange(BLOCK) / 4 - 8).clamp(-7, 7)  # and of int4
    blocks[2] = torch.linspace(-1, 1, BLOCK)
    blocks[2, 1:15] = (torch.tensor(NF4)[1:] + torch.tensor(NF4)[:-1])[:14] / 2
    blocks[3] = torch.finfo(dtype).max
    blocks[3, ::2] *= -0.4999
    blocks[4] = torch.arange(BLOCK) * torch.finfo(dtype).smallest_normal / 64
    blocks[5] = 65504.0
    blocks[6] = -0.0
    for i, bad in enumerate((float("nan"), float("inf"), -float("inf"), -float("nan"))):
        blocks[10 + 8 * i, 7 * i] = bad
    blocks[20, ::3], blocks[20, 1::3] = float("inf"), float("nan")
    return values.to(dtype)


def without_nan(packed, form):
    """Tiles with one NaN for all: its bits are not the same in all operations of torch."""
    rows = packed.clone().view(-1, tile_bytes(form))
    scales = rows[:, : TILE // BLOCK * 2].contiguous().view(torch.bfloat16)
    scales = torch.where(scales.isnan(), torch.full_like(scales, torch.nan), scales)
    rows[:, : TILE // BLOCK * 2] = scales.view(torch.uint8)
    return rows.flatten()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_quantizes_as_the_reference(dtype, form):
    for tiles in (0, 1, 8, 300):
        values = with_hard_numbers(dtype, tiles) if tiles >= 8 else weights(tiles, dtype)
        assert measures(values)
        expected = torch.empty(packed_bytes(values.numel(), form), dtype=torch.uint8)
        quantize_reference(values, expected, form)
        shifted = torch.cat([values.new_zeros(1), values])[1:]  # not aligned
        for given in (values, shifted, values.clone().requires_grad_()):
            assert torch.equal(without_nan(quantize(given, form), form), without_nan(expected, form))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_measures_what_it_changes(dtype, form):
    values = with_hard_numbers(dtype, 300)
    changes, plain = torch.empty(300, dtype=torch.float64), quantize(values, form)
    assert torch.equal(quantize(values, form, changes=changes), plain)
    result = torch.empty(values.numel())
    dequantize_(plain, result, form)
    expected = (result - values.float()).double().square().view(-1, TILE).sum(1)
    finite = values.view(-1, TILE).isfinite().all(1)
    assert not changes[~finite].isfinite().any()
    assert (finite.sum(), (~finite).sum()) == (296, 4)
    torch.testing.assert_close(changes[finite], expected[finite], rtol=1e-12, atol=0, equal_nan=True)


def test_tiles_are_written_where_they_are_wanted():
    values, wire = weights(5, torch.bfloat16), torch.zeros(packed_bytes(7 * TILE, "int8"), dtype=torch.uint8)
    part = wire[packed_bytes(TILE, "int8") : packed_bytes(6 * TILE, "int8")]
    assert quantize(values, "int8", out=part) is part
    assert torch.equal(part, quantize(values, "int8"))
    assert not wire[: packed_bytes(TILE, "int8")].any()
    assert not wire[packed_bytes(6 * TILE, "int8") :].any()
    with pytest.raises(ValueError, match="are not 2560 elements of int4"):
        quantize(values, "int4", out=part)


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
    values, changes = torch.zeros(TILE), torch.zeros(1, dtype=torch.float64)
    operation = torch.ops.ls_strategy.quantize_
    for bad, match in (((values[:-1], packed, None, 0), "are not 511 elements"),
                       ((values.double(), packed, None, 0), "values must be fp32"),
                       ((torch.zeros(2 * TILE)[::2], packed, None, 0), "values must be contiguous"),
                       ((values, packed.char(), None, 0), "packed must be contiguous uint8"),
                       ((values, packed, changes.float(), 0), "changes must be fp64"),
                       ((values, packed, changes[:0], 0), "changes must be fp64"),
                       ((values, packed, None, -1), "format -1")):  # fmt: skip
        with pytest.raises(RuntimeError, match=match):
            operation(*bad)
    with pytest.raises(ValueError, match="are not 512 elements of int8"):
        dequantize_(packed, out, "int8")
