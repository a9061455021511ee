"""The compiled kernels on a GPU: more elements than an int counts, and what the tools of CUDA find.

`tests/ops/test_cuda.py` and `test_permute_cuda.py` compare them with their references.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from ls_strategy import device as dev
from ls_strategy.ops import _build, native
from tests.gpu.kernels import BOUNDARY, WINDOW, large_sum, large_sum_bytes, large_update, large_update_bytes
from tests.processes import output_of

N = BOUNDARY + 3 * WINDOW + 77


def gpu_with(nbytes: int) -> torch.device:
    """The GPU, if so much of its memory is free."""
    assert native.available("cuda"), _build.status()
    device = torch.empty(1, device="cuda:0").device
    free = dev.free_bytes(device)
    if free < nbytes:
        pytest.skip(f"{nbytes} bytes of device memory are needed, {free} are free")
    return device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_more_elements_than_an_int_counts(dtype: torch.dtype) -> None:
    """Notices an index of 32 bits in the kernels of sums: the sum would be of fewer elements."""
    assert large_sum(gpu_with(large_sum_bytes(N)), N, dtype).tolist() == [N + 32, 0]


def test_an_update_of_more_elements_than_an_int_counts() -> None:
    """Notices an index of 32 bits in the update: elements above 2**31 would keep their values, or overwrite others."""
    assert large_update(gpu_with(large_update_bytes(N)), N, BOUNDARY) == []


def sanitizer() -> str:
    """The tool, from PATH or from the toolkit."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(Path(home) / "bin"))
    if found is None:
        pytest.skip(f"no compute-sanitizer on PATH or in {home}/bin")
    return found


@pytest.mark.timeout(420)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_tools_of_cuda_find_nothing(tool: str) -> None:
    """Notices reads past the end of a buffer, and shared memory that is read before it is written."""
    assert native.available("cuda"), _build.status()  # compiled before it is watched
    command = [sanitizer(), f"--tool={tool}", "--error-exitcode=99", sys.executable, "-m", "tests.gpu.kernels", "cuda"]
    # Without torch's cache of memory, so that every tensor has bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(__file__).parents[2]
    printed = output_of(command, cwd=root, env=environment, timeout=400)
    assert "all kernels have run" in printed
