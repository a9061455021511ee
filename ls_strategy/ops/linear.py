"""Products with 8-bit and 4-bit weights, which the kernels dequantize in registers.

=========  =============================  ====================================  ==============================
format     packed weight                  scales, fp32                          value of a weight
=========  =============================  ====================================  ==============================
``int8``   (out, in) int8, -127 ... 127   (out,)                                ``level * scale``
``int4``   (out, in / 2) int8             (out, in / group, 2), zeros too       ``(level - 8) * scale + zero``
=========  =============================  ====================================  ==============================

Levels of int4 are 0 to 15. Of `PACKED` adjacent levels, the first half is in the low bits of ``PACKED / 2`` bytes, the
second half in the high bits, so that a register is filled without shuffles. A group is a multiple of `PACKED`.

With few rows, a product takes as long as reading its weights: a quarter or an eighth of the time of fp32 weights. The
products of torch with such weights are fast only in bf16. On a CPU in fp32, products with fp32 weights are faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy.ops.extra_library import linear_library

PACKED = 32
"""Number of int4 levels that are packed together."""

SPELL_OUT_ROWS = 192
"""From this number of rows on, a product with a dequantized weight is faster."""


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return the product of ``x`` (rows, in), of any floating dtype, and the transposed weight: (rows, out).

    Kernels accumulate in fp32. Without kernels, the accumulation is that of the device's product in the dtype of ``x``.
    """
    if len(x) < SPELL_OUT_ROWS and linear_library.available(x.device.type):
        return torch.ops.ls_strategy.linear_int8(x.float().contiguous(), weight, scales).to(x.dtype)
    if x.dtype is torch.float16:  # sums of levels may exceed its range
        return functional.linear(x, spell_out_int8(weight, scales).to(x.dtype))
    # Scaling the result is less work than scaling the weight.
    return functional.linear(x, weight.to(x.dtype)).mul_(scales)


def linear_int4(x: Tensor, weight: Tensor, scales_zeros: Tensor) -> Tensor:
    """Return the product as `linear_int8` does, with int4 weights."""
    if len(x) < SPELL_OUT_ROWS and linear_library.available(x.device.type):
        return torch.ops.ls_strategy.linear_int4(x.float().contiguous(), weight, scales_zeros).to(x.dtype)
    return functional.linear(x, spell_out_int4(weight, scales_zeros).to(x.dtype))


def spell_out_int8(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the dequantized weight (out, in), fp32."""
    return weight * scales[:, None]


def spell_out_int4(weight: Tensor, scales_zeros: Tensor) -> Tensor:
    """Return the dequantized weight (out, in), fp32."""
    groups = unpack(weight).unflatten(1, (scales_zeros.shape[1], -1))
    return ((groups - 8.0) * scales_zeros[..., :1] + scales_zeros[..., 1:]).flatten(1)


def pack(levels: Tensor) -> Tensor:
    """Pack levels from 0 to 15, uint8 (out, in), into int8 (out, in / 2)."""
    halves = levels.unflatten(1, (-1, 2, PACKED // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).view(torch.int8)


def unpack(packed: Tensor) -> Tensor:
    """Unpack levels; the inverse of `pack`."""
    both = packed.view(torch.uint8).unflatten(1, (-1, PACKED // 2))
    return torch.stack((both & 15, both >> 4), 2).flatten(1)
