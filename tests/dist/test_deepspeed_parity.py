"""The GPT recipe trained through ``deepspeed_config``, against DeepSpeed's own run of the same file, model and data.

The two sides are `tests.dist.deepspeed_side` and `benchmarks.deepspeed_parity`, which also writes the record.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from benchmarks.deepspeed_parity import CASES, DRIVE, FILES, compare
from tests.dist.deepspeed_side import CONFIGS, RANKS, STEPS

GOLDEN = {
    "zero2_fp16": "gpt_zero2_fp16",
    "zero2_offload": "zero2_cpu_offload",
    "zero3_offload": "zero3_cpu_offload",
    "zero3_nvme": "zero3_nvme",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_of_the_gpt_recipe(name, tmp_path):
    """fp32: to the last bits. bf16: DeepSpeed sums gradients over ranks in bf16, and this package in fp32."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    case = CASES[name]
    if "nvme" in name:
        needs_libaio()
    result = compare(case, tmp_path)
    assert result.losses == STEPS * case.accumulation * RANKS
    assert result.moved > 1e-3
    assert result.last_loss < result.first_loss
    if case.precision == "fp32":
        assert result.largest_difference <= 1e-5
        assert result.weight_difference <= 2e-6
    else:
        assert result.largest_difference <= 1e-3


def needs_libaio() -> None:
    """DeepSpeed compiles its reading and writing against libaio's headers."""
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportMissingImports]

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's aio cannot be built here: it needs libaio's headers")


@pytest.mark.parametrize("name", [*FILES, *DRIVE])
def test_the_files_are_those_that_are_translated_and_tested_elsewhere(name):
    golden = CONFIGS.parents[3] / "tests" / "golden" / "deepspeed" / f"{GOLDEN[name]}.json"
    assert json.loads((CONFIGS / f"{name}.json").read_text()) == json.loads(golden.read_text())
