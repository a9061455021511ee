"""A failed allocation says what to do; other errors pass."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.extras.planner.out_of_memory import OutOfMemory, explaining, is_out_of_memory


def test_a_real_failed_allocation_is_explained():
    with pytest.raises(OutOfMemory, match="use less") as caught, explaining(lambda: "use less"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_devices_error_is_explained_and_others_pass():
    with pytest.raises(OutOfMemory, match="CUDA out of memory"), explaining(lambda: "words"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nstatistics")
    with pytest.raises(RuntimeError, match=r"^shape$"), explaining(lambda: "words"):
        raise RuntimeError("shape")


def test_an_explanation_that_fails_leaves_the_first_error():
    def fails():
        raise ValueError("no words")

    with pytest.raises(torch.OutOfMemoryError), explaining(fails):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("not enough memory"), False),
    ],
    ids=repr,
)
def test_which_errors_are_failed_allocations(error, expected):
    assert is_out_of_memory(error) is expected
