"""Products with packed weights: what floats of the same values give, on every instruction set and without kernels."""

import pytest
import torch
from torch.nn import functional

from ls_strategy.ops import linear
from ls_strategy.ops.extra_library import linear_library
from ls_strategy.ops.linear import linear_int4, linear_int8, pack, spell_out_int4, spell_out_int8, unpack
from tests.ops.conftest import limited

SHAPES = [(1, 32, 1), (1, 96, 37), (2, 64, 4), (3, 128, 130), (7, 256, 16), (200, 64, 9)]
"""Rows, input and output features: whole tiles, and what is left of some."""


@pytest.fixture(params=[0, 1, 2, None], ids=["portable", "avx2", "avx512", "floats"])
def implementation(request, monkeypatch):
    if request.param is None:
        monkeypatch.setattr(linear, "SPELL_OUT_ROWS", 0)
        yield
        return
    request.getfixturevalue("compiled")
    if not linear_library.available("cpu"):
        pytest.skip("no products with packed weights")
    monkeypatch.setattr(linear, "SPELL_OUT_ROWS", 1 << 30)
    yield from limited(linear_library, request.param)


def check(actual, x, weight, terms=None):
    """``terms``: absolute values of what is summed in the place of weights, where that is more."""
    expected = functional.linear(x.double(), weight.double())
    assert actual.dtype is x.dtype
    assert actual.shape == expected.shape
    limit = {torch.float32: 3e-7, torch.bfloat16: 6e-3, torch.float16: 1e-3}[x.dtype]
    # What rounding errors of sums are measured by.
    scale = x.double().abs() @ (weight if terms is None else terms).double().abs().T
    assert ((actual.double() - expected).abs() <= limit * scale + 1e-9).all()


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
class TestEvery:
    @pytest.mark.sample(4)
    def test_int8(self, dtype):
        g = torch.Generator().manual_seed(0)
        for rows, width, out in [*SHAPES, (2, 45, 5)]:
            x = torch.randn(rows, width, generator=g).to(dtype)
            levels = torch.randint(-127, 128, (out, width), dtype=torch.int8, generator=g)
            scales = torch.rand(out, generator=g) / 127
            check(linear_int8(x, levels, scales), x, spell_out_int8(levels, scales))

    def test_int4(self, dtype):
        g = torch.Generator().manual_seed(0)
        for rows, width, out in SHAPES:
            for group in (size for size in (32, 64, 128) if width % size == 0):
                x = torch.randn(rows, width, generator=g).to(dtype)
                levels = torch.randint(0, 16, (out, width), dtype=torch.uint8, generator=g)
                scales_zeros = torch.rand(out, width // group, 2, generator=g) / 8
                weight = ((levels.view(out, -1, group) - 8.0) * scales_zeros[..., :1] + scales_zeros[..., 1:]).flatten(
                    1
                )
                packed = pack(levels)
                assert spell_out_int4(packed, scales_zeros).equal(weight)
                # Levels times scale, and separately what belongs to level 0.
                apart = levels.view(out, -1, group) * scales_zeros[..., :1]
                apart = apart + (scales_zeros[..., 1:] - 8 * scales_zeros[..., :1]).abs()
                check(linear_int4(x, packed, scales_zeros), x, weight, apart.flatten(1))

    def test_what_is_not_contiguous(self, dtype):
        x = torch.randn(64, 6).to(dtype).T
        levels = torch.randint(-127, 128, (8, 64), dtype=torch.int8)
        scales = torch.rand(8) / 127
        check(linear_int8(x, levels, scales), x, spell_out_int8(levels, scales))


def test_packing_is_undone():
    levels = torch.randint(0, 16, (6, 96), dtype=torch.uint8)
    packed = pack(levels)
    assert packed.shape == (6, 48)
    assert packed.dtype is torch.int8
    assert unpack(packed).equal(levels)


@pytest.mark.usefixtures("compiled")
def test_shapes_that_do_not_fit_are_refused():
    if not linear_library.available("cpu"):
        pytest.skip("no products with packed weights")
    x, levels = torch.ones(1, 64), torch.ones(8, 64, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.ops.ls_strategy.linear_int8(x, levels, torch.ones(7))
    with pytest.raises(RuntimeError, match="scales must be contiguous"):
        torch.ops.ls_strategy.linear_int8(x, levels, torch.ones(8, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="2 groups do not fit"):
        torch.ops.ls_strategy.linear_int4(x[:, :32].contiguous(), levels[:, :16].contiguous(), torch.ones(8, 2, 2))
