"""The sum of squares that does not depend on how a gradient is split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ls_strategy.ops.exact_norm import BLOCK, exact_sum_of_squares, nonfinite, value_of


def gradient(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(6 * torch.randn(numel, generator=generator, dtype=torch.float64))
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * spread).to(dtype)


@given(st.integers(1, 5000), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_the_sum_is_that_of_any_split_in_blocks(numel: int, cuts: list[int], seed: int) -> None:
    grad = gradient(numel, seed)
    whole = exact_sum_of_squares(grad)
    parts = torch.tensor_split(grad, sorted(min(cut * BLOCK, numel) for cut in cuts))
    assert torch.equal(sum(exact_sum_of_squares(part) for part in parts), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_sum_of_a_block_depends_on_nothing_else(threads: int) -> None:
    """Neither on the number of blocks that are added in one call, nor on that of threads."""
    grad = gradient(512 * BLOCK, 5)
    expected = [exact_sum_of_squares(block) for block in grad.split(BLOCK)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for blocks in (1, 2, 3, 17, 127, 128, 129, 256, 511, 512):
            found = [exact_sum_of_squares(part) for part in grad.split(blocks * BLOCK)]
            wanted = [sum(expected[i : i + blocks]) for i in range(0, 512, blocks)]
            assert all(map(torch.equal, found, wanted)), blocks
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unscale", [1.0, 2.0**-10])
def test_the_value_is_the_sum_of_squares(dtype: torch.dtype, unscale: float) -> None:
    grad = gradient(70_001, 3, dtype).clamp(-1e4, 1e4)
    expected = math.fsum((grad.double() * unscale).square().tolist())
    assert value_of(exact_sum_of_squares(grad, unscale=unscale)).item() == pytest.approx(expected, rel=1e-14)


def test_extremes() -> None:
    tiny, huge = torch.tensor([2.0**-149]), torch.tensor([3e38] * 300)
    assert value_of(exact_sum_of_squares(tiny)).item() == 2.0**-298
    assert value_of(exact_sum_of_squares(huge)).item() == pytest.approx(300 * float(huge[0]) ** 2)
    assert value_of(exact_sum_of_squares(torch.zeros(0))).item() == 0.0
    beyond = exact_sum_of_squares(torch.tensor([1e200, 1.0], dtype=torch.float64))
    assert value_of(beyond).item() == math.inf


def test_infinities_and_nans_count() -> None:
    grad = torch.ones(1000)
    grad[[3, 500]] = math.inf
    found = exact_sum_of_squares(grad)
    assert nonfinite(found).item() == 2
    assert value_of(found).item() == math.inf
    grad[7] = math.nan
    found += exact_sum_of_squares(grad)
    assert nonfinite(found).item() == 5
    assert math.isnan(value_of(found).item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unscale", [1.0, 0.5])
def test_what_is_measured_stays_as_it_is(dtype: torch.dtype, unscale: float) -> None:
    for grad in (torch.tensor([0.5, -3.0, 2.0], dtype=dtype), torch.tensor([0.5, float("inf"), 2.0], dtype=dtype)):
        before = grad.clone()
        exact_sum_of_squares(grad, unscale=unscale)
        assert torch.equal(grad, before)
