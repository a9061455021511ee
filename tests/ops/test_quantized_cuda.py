"""The CUDA kernels of quantized weights: that they compile, without a GPU; that they are the reference, with one."""

import re
import subprocess
import sys

import pytest
import torch

from ls_strategy.ops import _build
from ls_strategy.ops.extra_library import quantized_library
from ls_strategy.ops.quantized import TILE, dequantize_, dequantize_reference, quantize
from tests.ops.test_cuda import recipe
from tests.ops.test_quantized import DTYPES, FORMS, same_bits, weights


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_compiles_without_spills_or_fused_operations(capability, tmp_path):
    (unit,) = quantized_library.recipe(recipe(capability)).units
    result = subprocess.run(
        [*unit.command, "-Xptxas", "-v", "--keep", f"--keep-dir={tmp_path}", "-o", str(tmp_path / "object.o")],
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    spills = re.findall(r"(\d+) bytes spill", result.stderr)
    assert spills
    assert set(spills) == {"0"}
    ptx = (tmp_path / "quantized.ptx").read_text()
    # The exact division of fp32 is made of fused operations; nothing else is, and the kernels of 4 bits do not divide.
    four = ptx[: ptx.index("dequantize8")]
    assert not re.search(r"\bfma\.", four)
    assert not re.search(r"div\.(approx|full)", ptx)


@pytest.mark.slow
def test_links_and_loads(tmp_path, monkeypatch, compiled):
    """The library finds all it needs in torch and in that of the CPU; its kernels are not run."""
    monkeypatch.setattr(_build, "cache_dir", lambda: tmp_path)
    cpu = _build.library(quantized_library.recipe(_build.cpu_recipe()))
    cuda = _build.library(quantized_library.recipe(recipe((9, 0))))
    code = f"import torch; torch.ops.load_library({str(cpu)!r}); torch.ops.load_library({str(cuda)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
