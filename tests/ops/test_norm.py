"""Sum of squares: exact where it can be, the same from every implementation, blind to nothing."""

import math

import pytest
import torch

from ls_strategy.ops import exact_norm, native, norm
from ls_strategy.ops.exact_norm import exact_sum_of_squares
from ls_strategy.ops.norm import BLOCK, CHUNK, sum_of_squares, sum_of_squares_reference, sum_over_chunks

SIZES = (0, 1, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, 100_003)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", [0, 1, 2], indirect=True)
def test_kernel_is_the_reference(isa, dtype):
    for n in SIZES:
        torch.manual_seed(n)
        grad = (torch.randn(n) * 10 ** (torch.rand(n) * 8 - 6)).to(dtype)
        assert torch.equal(sum_of_squares(grad, unscale=0.3), sum_of_squares_reference(grad, 0.3)), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", [0, 1, 2], indirect=True)
def test_exact_sums_of_the_kernel_are_those_of_the_reference(isa, dtype, monkeypatch):
    for n in (*SIZES, exact_norm.BLOCK - 1, exact_norm.BLOCK + 1):
        torch.manual_seed(n)
        grad = (torch.randn(n) * 10 ** (torch.rand(n) * 8 - 6)).to(dtype)
        for bad in (None, math.inf, math.nan):
            if bad is not None:
                grad[n // 2 : n // 2 + 3] = bad
            found = exact_sum_of_squares(grad, unscale=0.3)
            with monkeypatch.context() as patch:
                patch.setattr(native, "available", lambda device_type: False)
                assert torch.equal(found, exact_sum_of_squares(grad, unscale=0.3)), (n, bad)


def test_more_than_one_level(compiled):
    grad = torch.randn(BLOCK * BLOCK + 12345)
    assert torch.equal(sum_of_squares(grad), sum_of_squares_reference(grad, 1.0))


@pytest.mark.parametrize("numel", [0, 5, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 17 * CHUNK + 12345])
def test_chunks_add_up_to_the_sum_of_all(compiled, numel):
    grad = torch.randn(numel).bfloat16()
    grad[::1_000_003] = float("inf") if numel == 5 else 3.0
    parts = [sum_of_squares(part, unscale=0.3).tolist() for part in grad.split(CHUNK) if part.numel()]
    assert torch.equal(sum_over_chunks(parts), sum_of_squares(grad, unscale=0.3))


def test_more_chunks_than_fit_in_a_group(monkeypatch):
    monkeypatch.setattr(norm, "BLOCK", 64)
    monkeypatch.setattr(norm, "GROUP", 32)
    grad = torch.randn(40_000)
    parts = [sum_of_squares_reference(part, 1.0).tolist() for part in grad.split(64 * 32)]
    assert torch.equal(sum_over_chunks(parts), sum_of_squares_reference(grad, 1.0))


def test_threads_change_nothing(compiled):
    grad, threads, results = torch.randn(1_000_003), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(sum_of_squares(grad))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kernels", [True, False])
class TestBoth:
    @pytest.fixture(autouse=True)
    def choose(self, kernels, request, monkeypatch):
        if kernels:
            request.getfixturevalue("compiled")
        else:
            monkeypatch.setattr(native, "available", lambda device_type: False)

    def test_small_numbers_beside_a_large_one(self):
        grad = torch.full((1 << 20,), 1e-4)
        grad[12345] = 1e4
        expected = 1e8 + float(grad[0].double() ** 2) * ((1 << 20) - 1)
        assert sum_of_squares(grad)[0].item() == pytest.approx(expected, rel=1e-14)  # an fp32 sum would be off by 1e-10

    def test_counts_what_is_not_finite(self):
        grad = torch.ones(10_000, dtype=torch.float16)
        grad[[3, 4096, 9999]] = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=torch.float16)
        total, count = sum_of_squares(grad).tolist()
        assert count == 3
        assert math.isnan(total)

    def test_overflow_of_the_product_counts(self):
        assert sum_of_squares(torch.tensor([3e38, 1.0]), unscale=10.0)[1].item() == 1

    def test_squares_beyond_fp32(self):
        total, count = sum_of_squares(torch.tensor([1e30, 1e-30])).tolist()
        assert total == pytest.approx(1e60)
        assert count == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(compiled, dtype):
    op = torch.ops.ls_strategy.sum_of_squares.default
    assert set(torch.library.opcheck(op, (torch.randn(100).to(dtype), 0.5)).values()) == {"SUCCESS"}
