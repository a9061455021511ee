"""A failed allocation says what to do; other errors pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from ls_strategy.extras.planner.fit import OutOfMemory, is_out_of_memory, raise_explained


@contextmanager
def handling(describe: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise_explained(error, describe)
        raise


def test_a_real_failed_allocation_is_explained():
    with pytest.raises(OutOfMemory, match="use less") as caught, handling(lambda: "use less"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_devices_error_is_explained_and_others_pass():
    with pytest.raises(OutOfMemory, match="CUDA out of memory"), handling(lambda: "words"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nstatistics")
    with pytest.raises(RuntimeError, match=r"^shape$"), handling(lambda: "words"):
        raise RuntimeError("shape")


def test_an_explanation_that_fails_leaves_the_first_error():
    def fails():
        raise ValueError("no words")

    with pytest.raises(torch.OutOfMemoryError), handling(fails):
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
