"""Out-of-memory errors that say what to do, instead of an allocator's statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ls_strategy.errors import LSError

_CPU_MESSAGES = ("can't allocate memory", "not enough memory")
"""Messages of torch's CPU allocator, which raises a plain RuntimeError."""


class OutOfMemory(LSError, RuntimeError):  # noqa: N818 - a RuntimeError, like `torch.OutOfMemoryError`
    """A step did not fit into memory. The message says what uses how much, and what uses less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES)


def raise_explained(error: BaseException, describe: Callable[[], str]) -> None:
    """Raise an error with the text of ``describe`` if ``error`` is a failed allocation. Call it where that is handled.

    Raises:
        OutOfMemory: caused by the allocator's error.
    """
    if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
        return
    try:
        explanation = describe()
    except Exception:  # the first error matters more
        raise error from None
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise OutOfMemory(f"out of memory: {first_line}\n{explanation}") from error
