"""The compiled kernels as torch operations, ``torch.ops.ls_strategy.*``."""

from __future__ import annotations

import ctypes
import functools

import torch

from ls_strategy.ops import _build, schemas
from ls_strategy.ops.cuda.update import UPDATES

NAMES = ("adamw_", "lion_", "sgd_", "adagrad_")
"""The updates. The other operations are ``sum_of_squares`` and, on the CPU, ``block_square_sums``."""


@functools.cache  # every update asks
def available(device_type: str) -> bool:
    """Return whether there are kernels for a device type. The first call builds them."""
    found = _build.load(device_type, UPDATES.load if device_type == "cuda" else None)
    if found:
        _register_fakes()
    return found


def path() -> str:
    """Return the library for CPUs, built or shipped with the wheel."""
    if not available("cpu"):
        raise RuntimeError(f"no kernels for the CPU: {_build.status()['cpu']}")
    return _build.status()["cpu"].removeprefix("native: ")


def limit_isa(limit: int) -> int:
    """Limit the CPU's instruction set to 0 portable, 1 AVX2, 2 AVX-512; return the one in use. For tests."""
    return ctypes.CDLL(path()).ls_strategy_limit_isa(limit)


META = torch.library.Library(schemas.LIBRARY.ns, "IMPL", "Meta")
"""Shapes and dtypes of results, for tracing. `torch.library.register_fake` would cost 0.1 s per process, because it
searches all modules for its caller's source."""


@functools.cache
def _register_fakes() -> None:
    for name in NAMES:
        META.impl(name, lambda *args, **kwargs: None)
    META.impl("sum_of_squares", lambda grad, unscale: grad.new_empty(2, dtype=torch.float64))
    META.impl("block_square_sums", lambda grad, unscale: grad.new_empty(-(-grad.numel() // 256), dtype=torch.float64))
