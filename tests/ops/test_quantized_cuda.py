"""The CUDA kernels of quantized weights are the reference, on a GPU."""

import pytest
import torch

from ls_strategy.ops import _build
from ls_strategy.ops.extra_library import quantized_library
from ls_strategy.ops.quantized import TILE, dequantize_, dequantize_reference, quantize
from tests.ops.test_quantized import DTYPES, FORMS, same_bits, weights


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_is_the_reference(dtype, form):
    assert quantized_library.available("cuda"), _build.status()
    for tiles in (1, 7, 300):
        values = weights(tiles, torch.float32, seed=tiles)
        packed = quantize(values.cuda(), form)
        assert torch.equal(packed.cpu(), quantize(values, form))
        result, expected = torch.empty(tiles * TILE, dtype=dtype, device="cuda"), torch.empty(tiles * TILE, dtype=dtype)
        dequantize_(packed, result, form)
        dequantize_reference(packed.cpu(), expected, form)
        assert same_bits(result.cpu(), expected)
