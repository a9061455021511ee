"""Sum of squares and number of non-finite elements of a gradient, in one pass.

The order of the additions is part of the definition, so that the result does not depend on threads or device. `BLOCK`
numbers are added in `LANES` lanes: lane ``j`` adds numbers ``j``, ``j + LANES``, ``j + 2 * LANES``, ... in order, and
the lanes are then folded in halves, upper onto lower. The sums of the blocks are added in the same way, until one
number is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy.ops import native

BLOCK = 4096
"""Numbers per sum."""

LANES = 32
"""Parallel sums within a block: a warp, or four AVX-512 registers of fp64."""

_BLOCKS_AT_A_TIME = 256  # of the reference: a million elements, to bound the memory of intermediate results


def sum_of_squares(grad: Tensor, *, unscale: float = 1.0) -> Tensor:
    """Return the sum of the squares of ``grad * unscale``, and its number of non-finite elements.

    Args:
        grad: ``(n,)``, contiguous, fp64, fp32, bf16 or fp16.
        unscale: factor. The product is rounded to fp32 and its square is exact, except for fp64, which stays fp64.

    Returns:
        ``(2,)`` fp64 on the device of ``grad``, without synchronization. Sums are accumulated in fp64, since an fp32
        sum stops growing when it is 2**24 times as large as its terms. The sum over chunks may differ from the sum of
        the full tensor in the last bits.
    """
    if native.available(grad.device.type) and grad.dtype != torch.float64:
        return native.sum_of_squares(grad, unscale)
    return sum_of_squares_reference(grad, unscale)


def sum_of_squares_reference(grad: Tensor, unscale: float) -> Tensor:
    """Compute `sum_of_squares` by its definition."""
    sums: list[Tensor] = []
    count = torch.zeros((), dtype=torch.int64, device=grad.device)
    for part in grad.split(_BLOCKS_AT_A_TIME * BLOCK):
        x = part.to(torch.promote_types(part.dtype, torch.float32)) * unscale
        count += x.numel() - x.isfinite().sum()
        sums.append(_block_sums(x.double().square_()))
    total = torch.cat(sums) if sums else torch.zeros(1, dtype=torch.float64, device=grad.device)
    while total.numel() > 1:
        total = _block_sums(total)
    if not total.numel():
        total = total.new_zeros(1)
    return torch.cat([total, count.double().view(1)])


def _block_sums(x: Tensor) -> Tensor:
    """Sum blocks: ``(ceil(n / BLOCK),)`` from ``(n,)``, both fp64."""
    blocks = -(-x.numel() // BLOCK)
    padded = x.new_zeros(blocks * BLOCK)
    padded[: x.numel()] = x
    rows = padded.view(blocks, BLOCK // LANES, LANES).unbind(1)
    lanes = rows[0].clone()
    for row in rows[1:]:
        lanes += row
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes.view(-1)
