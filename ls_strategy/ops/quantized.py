"""Weights in 4 and 8 bits, in one row of tiles: `quantize` and `dequantize_`.

A block of 64 adjacent elements shares a scale, its largest absolute value. An element is the product of the scale and
one of the format's levels:

========  ======  ==============================================================================  =================
format    levels  values                                                                          bytes per element
========  ======  ==============================================================================  =================
``nf4``   16      quantiles of the normal distribution, and 0 (Dettmers et al., "QLoRA")          0.53
``int4``  15      multiples of 1/7 from -1 to 1                                                   0.53
``int8``  255     multiples of 1/127 from -1 to 1                                                 1.03
========  ======  ==============================================================================  =================

Eight blocks are a tile: eight scales in bf16, then the levels; two of 4 bits in a byte, in the order of `linear.pack`.
So a tile is a multiple of 16 bytes, and a row of tiles can be cut between any two of them.

The blocks are those of the flattened parameter, unlike those of `ops.linear`, which end with a row: a shard may end
inside a row. Scales are rounded to bf16, which takes half the bytes of fp32 and makes the formats *idempotent*: the
largest element becomes exactly the scale, so ``quantize`` finds the same scales and levels in dequantized values, also
in those that were rounded to bf16 or fp16. QLoRA: arXiv:2305.14314, section 3 (blocks, levels) and appendix E (values).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy.config import FrozenFormat
from ls_strategy.ops import linear
from ls_strategy.ops.extra_library import quantized_library
from ls_strategy.ops.levels import BLOCK, NF4, TILE
from ls_strategy.ops.portions import portion

BITS: dict[FrozenFormat, int] = {"nf4": 4, "int4": 4, "int8": 8}

_NUMBERS: dict[FrozenFormat, int] = {"nf4": 0, "int4": 1, "int8": 2}
"""Numbers of the formats in the kernels."""

_CHUNK_TILES = 1 << 11
"""Tiles at a time on a host without kernels, a million elements: the temporary tensors are some ten times as large."""

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LARGEST_FP16 = 65280.0
"""The largest bf16 number that fp16 has, too."""


def tile_bytes(form: FrozenFormat) -> int:
    """Return the bytes of a tile.

    >>> tile_bytes("nf4"), tile_bytes("int8")
    (272, 528)
    """
    return TILE // BLOCK * 2 + TILE * BITS[form] // 8


def packed_bytes(numel: int, form: FrozenFormat) -> int:
    """Return the bytes of ``numel`` elements, a multiple of `TILE`.

    >>> packed_bytes(1024, "nf4")
    544
    """
    if numel % TILE:
        raise ValueError(f"{numel} elements are not full tiles of {TILE}")
    return numel // TILE * tile_bytes(form)


def quantize(values: Tensor, form: FrozenFormat, out: Tensor | None = None, changes: Tensor | None = None) -> Tensor:
    """Return the tiles of floating-point values ``(n,)``, with n a multiple of `TILE`: uint8 ``(packed_bytes(n),)``.

    Scales are finite in the dtype of ``values``. A block with a value that is not finite becomes one of NaN and
    infinities.

    Args:
        values: contiguous.
        form: the format.
        out: memory for the result, contiguous.
        changes: fp64 ``(n / TILE,)``, for the sum of the squares of what rounding changes in every tile; not finite in
            tiles with a value that is not. Only where `measures` says so.
    """
    values = values.detach()
    if out is None:
        out = torch.empty(packed_bytes(values.numel(), form), dtype=torch.uint8, device=values.device)
    elif out.numel() != packed_bytes(values.numel(), form):
        raise ValueError(f"{out.numel()} bytes are not {values.numel()} elements of {form}")
    if measures(values):
        torch.ops.ls_strategy.quantize_(values, out, changes, _NUMBERS[form])
    else:
        quantize_reference(values, out, form)
    return out


def measures(values: Tensor) -> bool:
    """Return whether a kernel quantizes these values; only the kernel can measure the rounding error."""
    on_cpu = values.device.type == "cpu" and values.dtype in _KERNEL_DTYPES
    return on_cpu and quantized_library.available("cpu")


def quantize_reference(values: Tensor, packed: Tensor, form: FrozenFormat) -> None:
    """Compute `quantize` by operations of torch, with equal bits but for those of NaN."""
    rows, tiles = packed.view(-1, tile_bytes(form)), values.view(-1, TILE)
    count = portion(values.device, _CHUNK_TILES * TILE) // TILE
    for first in range(0, len(rows), count):
        some = tiles[first : first + count]
        scales = some.unflatten(1, (-1, BLOCK)).abs().amax(2).bfloat16()
        if values.dtype is torch.float16:
            too_large = (scales > _LARGEST_FP16) & scales.isfinite()
            scales = torch.where(too_large, torch.full_like(scales, _LARGEST_FP16), scales).half().bfloat16()
        divisors = torch.where(scales == 0, torch.ones_like(scales), scales).float()
        ratios = (some.float().unflatten(1, (-1, BLOCK)) / divisors[..., None]).flatten(1)
        levels = _nearest(ratios, form)
        row = rows[first : first + count]
        row[:, : TILE // BLOCK * 2] = scales.view(torch.uint8)
        row[:, TILE // BLOCK * 2 :] = levels if form == "int8" else linear.pack(levels).view(torch.uint8)


def _nearest(ratios: Tensor, form: FrozenFormat) -> Tensor:
    """Return the numbers of the nearest levels, uint8."""
    if form == "nf4":
        levels = torch.tensor(NF4, dtype=torch.float32).to(ratios.device)
        return torch.bucketize(ratios, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    most = 127 if form == "int8" else 7
    return ((ratios * most).round_().nan_to_num_(0.0).clamp_(-most, most) + (most + 1)).to(torch.uint8)


def dequantize_(packed: Tensor, out: Tensor, form: FrozenFormat) -> None:
    """Write the values of tiles into ``out``, ``(n,)`` in fp32, bf16 or fp16: products in fp32, rounded to nearest.

    Args:
        packed: uint8, ``(packed_bytes(n),)``, contiguous.
        out: contiguous, on the device of ``packed``.
        form: as for `quantize`.
    """
    if packed.numel() != packed_bytes(out.numel(), form):
        raise ValueError(f"{packed.numel()} bytes are not {out.numel()} elements of {form}")
    if quantized_library.available(out.device.type):
        torch.ops.ls_strategy.dequantize_(packed, out, _NUMBERS[form])
    else:
        dequantize_reference(packed, out, form)


def dequantize_reference(packed: Tensor, out: Tensor, form: FrozenFormat) -> None:
    """Compute `dequantize_` by operations of torch, with equal bits."""
    rows, tiles = packed.view(-1, tile_bytes(form)), out.view(-1, TILE)
    count = portion(out.device, _CHUNK_TILES * TILE) // TILE
    for first in range(0, len(rows), count):
        row = rows[first : first + count]
        scales = row[:, : TILE // BLOCK * 2].contiguous().view(torch.bfloat16).float()
        codes = row[:, TILE // BLOCK * 2 :]
        values = _values(codes if form == "int8" else linear.unpack(codes.contiguous()), form)
        products = values.unflatten(1, (-1, BLOCK)) * scales[..., None]
        tiles[first : first + count] = products.flatten(1)


def _values(numbers: Tensor, form: FrozenFormat) -> Tensor:
    """Return the levels with these numbers, fp32."""
    if form == "nf4":
        levels = torch.tensor(NF4, dtype=torch.float32).to(numbers.device)
        return levels.index_select(0, numbers.flatten().int()).view(numbers.shape)
    most = 127 if form == "int8" else 7
    # A tensor as divisor: some devices multiply by the reciprocal of a number.
    return (numbers.float() - (most + 1)) / torch.full((1,), float(most), device=numbers.device)


def rounded(values: Tensor, form: FrozenFormat) -> Tensor:
    """Return what `dequantize_` makes of the tiles of ``values``, ``(n,)`` for any n, in their dtype."""
    padded = values.new_zeros(-(-values.numel() // TILE) * TILE)
    padded[: values.numel()] = values
    out = torch.empty_like(padded)
    dequantize_(quantize(padded, form), out, form)
    return out[: values.numel()]
