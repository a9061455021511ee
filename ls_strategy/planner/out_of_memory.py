"""Out of memory, with what to do about it in place of an allocator's statistics."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from ls_strategy.errors import LSError

_CPU_MESSAGES = ("can't allocate memory", "not enough memory")
"""Of torch's allocator for the CPU, which raises a plain RuntimeError."""


class OutOfMemory(LSError, RuntimeError):  # noqa: N818 - as `torch.OutOfMemoryError` is caught by RuntimeError
    """A step did not fit into memory; the message says what takes how much, and what takes less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_MESSAGES)


@contextmanager
def explaining(describe: Callable[[], str]) -> Generator[None, None, None]:
    """Inside, a failed allocation becomes an error that says what to do.

    Args:
        describe: what takes how much, and what to use instead. Called when an allocation has failed; should it fail
            too, the first error is what is raised.

    Raises:
        OutOfMemory: in place of the allocator's error, which is its cause.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        try:
            words = describe()
        except Exception:  # the first error matters more
            raise error from None
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OutOfMemory(f"out of memory: {first_line}\n{words}") from error
