"""Encode numbers as the bytes that islands exchange, exactly or rounded.

==========  ==========================================  ====================================================
format      bytes of n numbers                          values
==========  ==========================================  ====================================================
``exact``   4 n (8 n in fp64)                           as they are
``bf16``    2 n                                         rounded to nearest
``int8``    528 per 512 numbers, or part of them        multiples of 1/127 of the largest of 64 adjacent numbers
``int4``    272 per 512 numbers, or part of them        multiples of 1/7 of it
==========  ==========================================  ====================================================

The sender also computes with the rounded numbers, so all islands compute with the same ones.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ls_strategy.ops import quantized

WireFormat: TypeAlias = Literal["exact", "bf16", "int8", "int4"]


def nbytes(numel: int, form: WireFormat, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of ``numel`` numbers.

    >>> [nbytes(1000, form) for form in ("exact", "bf16", "int8", "int4")]
    [4000, 2000, 1056, 544]
    """
    if form == "exact":
        return numel * dtype.itemsize
    if form == "bf16":
        return 2 * numel
    return -(-numel // quantized.TILE) * quantized.tile_bytes(form)


def encode(values: Tensor, form: WireFormat) -> bytes:
    """Return the bytes of ``values``, ``(n,)`` on the CPU."""
    if form == "bf16":
        values = values.bfloat16()
    elif form != "exact":
        padded = values.new_zeros(-(-values.numel() // quantized.TILE) * quantized.TILE, dtype=torch.float32)
        padded[: values.numel()] = values
        values = quantized.quantize(padded, form)
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def decode(data: bytes | bytearray, numel: int, form: WireFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers, ``(numel,)`` in ``dtype``."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if form == "exact":
        return raw.view(dtype)
    if form == "bf16":
        return raw.view(torch.bfloat16).to(dtype)
    out = torch.empty(-(-numel // quantized.TILE) * quantized.TILE, dtype=torch.float32)
    quantized.dequantize_(raw, out, form)
    return out[:numel].to(dtype)
