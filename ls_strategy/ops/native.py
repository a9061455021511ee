"""The compiled kernels as torch operations, ``torch.ops.ls_strategy.*``."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from ls_strategy.ops import _build
from ls_strategy.ops.moments import Moment

NAMES = ("adamw_", "lion_", "sgd_", "adagrad_")
"""The updates; there is ``sum_of_squares`` besides."""


def available(device_type: str) -> bool:
    """Whether there are kernels for this kind of device. Builds them at the first call."""
    if not _build.load(device_type):
        return False
    _register_fakes()
    return True


def update(
    name: str,
    param: Tensor,
    moments: list[Moment],
    grad: Tensor,
    scalars: dict[str, float],
    **rest: Any,
) -> None:
    """Run an update; ``scalars`` and ``rest`` by the names in ``schemas.cpp``."""
    stored = [t for m in moments for t in (m.codes, m.scales)] or [None, None]
    getattr(torch.ops.ls_strategy, name)(param, *stored, grad, **scalars, **rest)


def sum_of_squares(grad: Tensor, unscale: float) -> Tensor:
    """See `ls_strategy.ops.norm`."""
    return torch.ops.ls_strategy.sum_of_squares(grad, unscale)


def limit_isa(limit: int) -> int:
    """Use no better instruction set of the CPU than 0 portable, 1 AVX2, 2 AVX-512; returns the one in use. Tests."""
    if not available("cpu"):
        raise RuntimeError(f"no kernels for the CPU: {_build.status()['cpu']}")
    return ctypes.CDLL(_build.status()["cpu"].removeprefix("native: ")).ls_strategy_limit_isa(limit)


META = torch.library.Library("ls_strategy", "IMPL", "Meta")
"""Shapes and dtypes of results, for tracing. `torch.library.register_fake` would also look its caller's source up among
all modules, 0.1 s in every process."""


@functools.cache
def _register_fakes() -> None:
    for name in NAMES:
        META.impl(name, lambda *args, **kwargs: None)
    META.impl("sum_of_squares", lambda grad, unscale: grad.new_empty(2, dtype=torch.float64))
