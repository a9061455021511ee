"""The product for few rows equals torch's within rounding."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.extras.inference.few_rows import LEAST_WEIGHTS, few_rows_linear


@pytest.mark.parametrize("shape", [(1, 1, 512), (8, 1, 512), (64, 512), (65, 512), (0, 512), (512,)])
def test_few_rows_by_another_way_are_the_product_within_rounding(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=generator), torch.randn(4096, 512, generator=generator)
    assert weight.numel() >= LEAST_WEIGHTS
    with torch.no_grad():
        found = few_rows_linear(x, weight)
        assert torch.equal(few_rows_linear(x, weight[:64]), torch.nn.functional.linear(x, weight[:64]))
        with torch.autocast("cpu", torch.bfloat16):
            assert few_rows_linear(x, weight).dtype == torch.bfloat16
    expected = torch.nn.functional.linear(x.double(), weight.double())
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-4)
    trained = few_rows_linear(x, weight.requires_grad_())
    assert trained.grad_fn is not None
