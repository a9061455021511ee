"""The CUDA kernels are the references, on a GPU. `test_emulated_kernels.py` says so without one."""

import pytest
import torch

from ls_strategy.ops import _build, native
from ls_strategy.ops.norm import BLOCK, sum_of_squares, sum_of_squares_reference
from tests.ops.cases import CASES, DTYPES, FORMATS, assert_same_bits, make, run

SIZES = (0, 1, 15, 16, 17, 255, 256, 257, 4097, 100_003)


@pytest.mark.gpu
@pytest.mark.parametrize("moment_format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_kernel_is_the_reference(name, moment_format):
    assert native.available("cuda"), _build.status()
    case = CASES[name]
    for n in SIZES:
        for grad_dtype in DTYPES:
            for out_dtype in (None, *DTYPES):
                result = make(case, n, moment_format, grad_dtype, out_dtype, device="cuda")
                expected = make(case, n, moment_format, grad_dtype, out_dtype)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(native, "available", lambda device_type: False)
                    run(case, expected)
                run(case, result, clip=torch.tensor(0.37, device="cuda"))
                result.param, result.out = result.param.cpu(), None if result.out is None else result.out.cpu()
                for m in result.moments:
                    m.codes, m.scales = m.codes.cpu(), None if m.scales is None else m.scales.cpu()
                assert_same_bits(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares_is_the_reference(dtype):
    assert native.available("cuda"), _build.status()
    for n in (*SIZES, BLOCK, BLOCK * BLOCK + 12345):
        grad = torch.randn(n).to(dtype)
        grad[n // 2 : n // 2 + 1] = float("inf") if n % 2 else 1.0
        result = sum_of_squares(grad.cuda(), unscale=0.3).cpu()
        assert torch.equal(result, sum_of_squares_reference(grad, 0.3))
