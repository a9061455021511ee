"""Sum of squares and number of non-finite elements of a gradient, in one pass.

The order of the additions is part of the definition, so that the result does not depend on threads, on the device, or
on whether the gradient is in memory or comes in chunks. `BLOCK` numbers are added in `LANES` lanes: lane ``j`` adds
numbers ``j``, ``j + LANES``, ``j + 2 * LANES``, ... in order, and the lanes are then folded in halves, upper onto
lower. The sums of blocks are added in the same way, `GROUP` at a time, until one number is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_strategy.ops import native
from ls_strategy.ops.portions import NORM_ON_DEVICE, portion

BLOCK = 4096
"""Numbers per sum."""

GROUP = 256
"""Sums per sum of sums. On a GPU a warp adds them."""

CHUNK = BLOCK * GROUP
"""Numbers whose sum is a term of a later sum, whatever comes before and after them."""

LANES = 32
"""Parallel sums within a block: a warp, or four AVX-512 registers of fp64."""


def sum_of_squares(grad: Tensor, *, unscale: float = 1.0) -> Tensor:
    """Return the sum of the squares of ``grad * unscale``, and its number of non-finite elements.

    Args:
        grad: ``(n,)``, contiguous, fp64, fp32, bf16, fp16 or complex: then of its real and imaginary parts.
        unscale: factor. The product is rounded to fp32 and its square is exact, except for fp64, which stays fp64.

    Returns:
        ``(2,)`` fp64 on the device of ``grad``, without synchronization. Sums are accumulated in fp64, since an fp32
        sum stops growing when it is 2**24 times as large as its terms. See `sum_over_chunks` for a gradient in parts.
    """
    if grad.is_complex():
        grad = torch.view_as_real(grad).flatten()
    if native.available(grad.device.type) and grad.dtype != torch.float64:
        return torch.ops.ls_strategy.sum_of_squares(grad, unscale)
    return sum_of_squares_reference(grad, unscale)


def sum_over_chunks(parts: Sequence[Sequence[float]]) -> Tensor:
    """Return `sum_of_squares` of a gradient whose chunks had the results ``parts``, in order.

    Args:
        parts: each ``(2,)``, of `CHUNK` elements; the last may be of fewer.

    Returns:
        ``(2,)`` fp64 on the host.
    """
    if not parts:
        return torch.zeros(2, dtype=torch.float64, device="cpu")
    together = torch.tensor(parts, dtype=torch.float64, device="cpu")
    return torch.stack([_last_sum(together[:, 0]), together[:, 1].sum()])


def sum_of_squares_reference(grad: Tensor, unscale: float) -> Tensor:
    """Compute `sum_of_squares` by its definition."""
    sums: list[Tensor] = []
    count = torch.zeros((), dtype=torch.int64, device=grad.device)
    for part in grad.split(portion(grad.device, CHUNK, NORM_ON_DEVICE)):  # to bound the memory of intermediate results
        x = part.to(torch.promote_types(part.dtype, torch.float32)) * unscale
        count += x.numel() - x.isfinite().sum()
        sums.append(block_sums(x.double().square_(), BLOCK))
    return torch.stack([_last_sum(torch.cat(sums)), count.double()])


def _last_sum(sums: Tensor) -> Tensor:
    """Add sums in groups until one is left: ``()`` from ``(n,)``, both fp64."""
    while sums.numel() > 1:
        sums = block_sums(sums, GROUP)
    return sums.sum()  # of one or none


def block_sums(x: Tensor, block: int) -> Tensor:
    """Sum blocks, as the kernels add: ``(ceil(n / block),)`` from ``(n,)``, both fp64."""
    if missing := -x.numel() % block:
        x = torch.nn.functional.pad(x, (0, missing))
    rows = x.view(-1, block // LANES, LANES).unbind(1)
    lanes = rows[0].clone()
    for row in rows[1:]:
        lanes += row
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes.view(-1)
