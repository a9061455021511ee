"""Sum of squares of a gradient that does not depend on how the gradient is split over ranks.

The squares of `BLOCK` adjacent elements of the flat buffer are added in fp64, in lanes as in `ls_strategy.ops.norm`.
The sums of blocks are then added exactly: a sum is ``m * 2**e`` with an integer ``m`` of 53 bits, and the halves of the
``m`` with the same ``e`` are added as integers. Integers may be added in any order and on any number of ranks, if
shards begin at multiples of `BLOCK`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ls_strategy.ops import native
from ls_strategy.ops.norm import block_sums

BLOCK = 256
"""Elements whose squares are added in fp64. Shards begin at multiples of it."""

_CHUNK = {True: 1 << 16, False: 1 << 22}
"""Elements at a time, by whether they are in host memory: 512 KiB of intermediate results, which stay in its cache."""

_LOWEST, _HIGHEST = -1074, 1025
"""Exponents of the sums of blocks, numbers in fp64."""

_EXPONENTS = _HIGHEST - _LOWEST
_LOW_BITS = 26

SIZE = 2 * _EXPONENTS + 2
"""Integers of an exact sum: high and low halves by exponent, the number of infinities, and that of NaNs."""


def exact_sum_of_squares(grad: Tensor, *, unscale: float = 1.0) -> Tensor:
    """Return the sum of the squares of ``grad * unscale`` as integers that can be added to others, ``(SIZE,)`` int64.

    Args:
        grad: ``(n,)``, on the CPU or an accelerator. It begins at a multiple of `BLOCK` of its flat buffer.
        unscale: factor; the product is rounded to fp32, and stays fp64 for fp64.
    """
    if grad.is_complex():
        grad = torch.view_as_real(grad).flatten()
    result = torch.zeros(SIZE, dtype=torch.int64, device=grad.device)
    halves = result[: 2 * _EXPONENTS].view(_EXPONENTS, 2)
    if grad.device.type == "cpu" and grad.dtype != torch.float64 and native.available("cpu"):
        sums = torch.ops.ls_strategy.block_square_sums(grad, unscale)
        if bool(sums.isfinite().all()):
            _add(halves, sums)
            return result
    for part in grad.split(_CHUNK[grad.device.type == "cpu"]):
        x = part.to(torch.promote_types(part.dtype, torch.float32))
        x = x if unscale == 1.0 else x * unscale
        sums = block_sums(x.double().square(), BLOCK)  # a copy: of fp64, `x` may be the gradients
        if not bool(sums.isfinite().all()):  # one pass over the elements less, nearly always
            result[-2] += x.isinf().sum()
            result[-1] += x.isnan().sum()
            sums = block_sums(torch.where(x.isfinite(), x, 0.0).double().square_(), BLOCK)
            result[-2] += sums.isinf().sum()  # squares of fp64 numbers beyond its range
            sums = torch.where(sums.isfinite(), sums, 0.0)
        _add(halves, sums)
    return result


def _add(halves: Tensor, sums: Tensor) -> None:
    """Add finite numbers, ``(n,)`` fp64, to integers by exponent, ``(_EXPONENTS, 2)``."""
    mantissa, exponent = torch.frexp(sums)
    integer = (mantissa * 2.0**53).to(torch.int64)
    split = torch.stack([integer >> _LOW_BITS, integer & ((1 << _LOW_BITS) - 1)], dim=1)
    halves.index_add_(0, (exponent - _LOWEST).long(), split)


def value_of(exact: Tensor) -> Tensor:
    """Return an exact sum as a number, ``()`` fp64 on its device: the same for the same integers."""
    halves = exact[: 2 * _EXPONENTS].view(_EXPONENTS, 2).double()
    total = ((halves[:, 0] * 2.0**_LOW_BITS + halves[:, 1]) * _powers(exact.device)).sum()
    total = torch.where(exact[-2] > 0, torch.full_like(total, torch.inf), total)
    return torch.where(exact[-1] > 0, torch.full_like(total, torch.nan), total)


def nonfinite(exact: Tensor) -> Tensor:
    """Return the number of infinities and NaNs, ``()`` fp64."""
    return exact[-2:].sum().double()


@functools.cache
def _powers(device: torch.device) -> Tensor:
    exponents = torch.arange(_LOWEST, _HIGHEST, dtype=torch.float64, device=device) - 53
    return torch.exp2(exponents)
