"""Products with weights in 8 and 4 bits, which become floats in registers, a few at a time.

=========  =============================  ====================================  ==============================
format     packed weight                  scales, fp32                          a weight is
=========  =============================  ====================================  ==============================
``int8``   (out, in) int8, -127 ... 127   (out,)                                ``level * scale``
``int4``   (out, in / 2) int8             (out, in / group, 2), zeros too       ``(level - 8) * scale + zero``
=========  =============================  ====================================  ==============================

Levels of int4 are 0 to 15. Of every `PACKED` of them that follow one another, the first half is in the low bits of as
many bytes, the second half in the high ones, so that a register is filled without shuffles. A group is a multiple of
that.

At few rows a product takes as long as its weights are read: a quarter, or an eighth, of what fp32 weights take. torch's
own products with such weights are fast for bf16 alone; on a CPU, in fp32, they take longer than fp32 weights do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy.ops.extra_library import linear_library

PACKED = 32
"""Levels of int4 that are packed together."""

SPELL_OUT_ROWS = 192
"""From so many rows on, a product with floats made for the purpose is faster."""


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """``x`` (rows, in), of any floating dtype, times the transpose of the packed weight; (rows, out), of that dtype.

    Sums are taken in fp32, or on a device without kernels as its own product of that dtype does.
    """
    if len(x) < SPELL_OUT_ROWS and linear_library.available(x.device.type):
        return torch.ops.ls_strategy.linear_int8(x.float().contiguous(), weight, scales).to(x.dtype)
    if x.dtype is torch.float16:  # sums of levels may leave its range
        return functional.linear(x, spell_out_int8(weight, scales).to(x.dtype))
    # Scaling what comes out is less work than scaling the weight.
    return functional.linear(x, weight.to(x.dtype)).mul_(scales)


def linear_int4(x: Tensor, weight: Tensor, scales_zeros: Tensor) -> Tensor:
    """As `linear_int8`."""
    if len(x) < SPELL_OUT_ROWS and linear_library.available(x.device.type):
        return torch.ops.ls_strategy.linear_int4(x.float().contiguous(), weight, scales_zeros).to(x.dtype)
    return functional.linear(x, spell_out_int4(weight, scales_zeros).to(x.dtype))


def spell_out_int8(weight: Tensor, scales: Tensor) -> Tensor:
    """The weight (out, in), fp32."""
    return weight * scales[:, None]


def spell_out_int4(weight: Tensor, scales_zeros: Tensor) -> Tensor:
    """The weight (out, in), fp32."""
    groups = unpack(weight).unflatten(1, (scales_zeros.shape[1], -1))
    return ((groups - 8.0) * scales_zeros[..., :1] + scales_zeros[..., 1:]).flatten(1)


def pack(levels: Tensor) -> Tensor:
    """Levels uint8 (out, in) of 0 to 15, in int8 (out, in / 2)."""
    halves = levels.unflatten(1, (-1, 2, PACKED // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).view(torch.int8)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    both = packed.view(torch.uint8).unflatten(1, (-1, PACKED // 2))
    return torch.stack((both & 15, both >> 4), 2).flatten(1)
