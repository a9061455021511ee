"""Storage formats of optimizer moments: fp32, bf16, or 8 bits with a scale per block.

Stored values are rounded stochastically. The change of a moving average is often less than half a step of a short
format, so rounding to nearest would never change it.

The 8-bit format truncates an fp32 number. Each block of `BLOCK` elements has a ``scale``, the smallest power of two
that is not below the block's largest magnitude. Each element ``x`` is stored as the top bits of ``x / scale``::

    signed:    s eeee mmm    1 + 7 bits, code 127 = scale, 3 bits of mantissa, down to 2**-16 of the scale; 0 is 0
    unsigned:    eeee mmmm       8 bits, code 255 = scale, 4 bits of mantissa, down to 2**-16 of the scale; 0 is 0

Division by a power of two is exact, so a dequantized value is stored as the same code for any random bits. A second
moment ``v`` is stored as ``sqrt(v)``, with half the range of exponents. A positive one never becomes zero, which would
make the next update of its element explode. A block with a non-finite number becomes NaN completely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ls_strategy.config import MomentFormat
from ls_strategy.ops.portions import portion

BLOCK = 256
"""Elements of an 8-bit moment that share a scale."""

UPDATE_CHUNK = 1 << 15
"""Elements per chunk of a reference on a host: 128 KiB of fp32, so that intermediate results stay in the L2 cache."""

_CODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}

# Bits of an fp32 number that a code drops, and the top code, which means 1.0 (0x3F800000).
_SIGNED = (20, 127)
_UNSIGNED = (19, 255)


@dataclass
class Moment:
    """One moment of the elements of a flat buffer."""

    codes: Tensor
    """``(n,)``, contiguous: fp32 or bf16 values, or uint8 codes."""

    scales: Tensor | None
    """``(ceil(n / BLOCK),)`` fp32 with uint8 codes, None otherwise."""

    signed: bool
    """True for a first moment; False for a second moment, which is never negative."""

    def dequantize(self) -> Tensor:
        """Return the values in a new tensor, ``(n,)`` fp32."""
        if self.scales is None:
            return self.codes.to(torch.float32, copy=True)
        shift, top = _SIGNED if self.signed else _UNSIGNED
        magnitude = (self.codes & top).to(torch.int32)
        bits = torch.where(magnitude > 0, (magnitude + (_ONE >> shift) - top) << shift, 0)
        values = bits.view(torch.float32) * self.scales.repeat_interleave(BLOCK)[: self.codes.numel()]
        if not self.signed:
            return values * values
        return torch.where(self.codes > top, -values, values)

    def store_(self, value: Tensor, *, seed: int, offset: int = 0) -> None:
        """Replace the values.

        Args:
            value: ``(n,)``, fp32.
            seed: of the stochastic rounding.
            offset: position of the first element in the buffer of ``seed``, so that storing a buffer in chunks gives
                the same bits as storing it at once.
        """
        at_a_time = portion(value.device, UPDATE_CHUNK)
        for start in range(0, value.numel(), at_a_time):
            stop = min(start + at_a_time, value.numel())
            part, at = self.narrow(start, stop), offset + start
            if part.codes.dtype == torch.float32:
                part.codes.copy_(value[start:stop])
                continue
            bits = random_bits(stop - start, seed, at, value.device)
            bits = bits & 0xFFFF if self.signed else (bits >> 16) & 0xFFFF
            if part.scales is None:
                part.codes.copy_(round_to_bf16(value[start:stop], bits))
            else:
                part._encode(value[start:stop], bits)

    def narrow(self, start: int, stop: int) -> Moment:
        """Return elements ``[start, stop)`` as a view; with 8-bit codes, ``start`` is a multiple of `BLOCK`."""
        if self.scales is None:
            return Moment(self.codes[start:stop], None, self.signed)
        if start % BLOCK:
            raise ValueError(f"Got start={start} of an 8-bit moment, but it must be a multiple of {BLOCK}.")
        return Moment(self.codes[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)], self.signed)

    def _encode(self, value: Tensor, rounding: Tensor) -> None:
        assert self.scales is not None
        shift, top = _SIGNED if self.signed else _UNSIGNED
        value = value if self.signed else root(value)
        n, blocks = value.numel(), self.scales.numel()
        padded = torch.zeros(blocks * BLOCK, dtype=torch.float32, device=value.device)
        padded[:n] = value
        largest = (padded.view(torch.int32) & _MAGNITUDE).view(blocks, BLOCK).amax(1)
        finite = largest < _INFINITY
        scale = scale_of(largest)
        inverse = torch.where(scale > 0, 1 / scale, 0)
        y = (padded.view(blocks, BLOCK) * inverse[:, None]).view(-1)[:n]
        bits = (y.view(torch.int32) & _MAGNITUDE) + (rounding << (shift - 16))
        codes = (bits >> shift) - ((_ONE >> shift) - top)
        codes = codes.clamp_(0, top) if self.signed else torch.maximum(codes.clamp_(max=top), (value > 0).int())
        if self.signed:
            codes = torch.where(codes > 0, codes + 128 * (value < 0), 0)
        in_finite_block = finite[:, None].expand(blocks, BLOCK).reshape(-1)[:n]
        self.codes.copy_(torch.where(in_finite_block, codes, top))
        self.scales.copy_(torch.where(finite, scale, torch.nan))


_ONE = 0x3F800000  # 1.0
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


def scale_of(largest: Tensor) -> Tensor:
    """Return the scales of blocks from the bit patterns of their largest magnitudes: fp32 from int32, any shape.

    A scale is the smallest power of two that is not smaller, or 0 for 0. It is between 2**-126 and 2**127, so that its
    inverse is finite.
    """
    power = ((largest + 0x7FFFFF) & _INFINITY).clamp(min=0x00800000, max=0x7F000000)
    return torch.where(largest > 0, power, 0).view(torch.float32)


def empty(n: int, format: MomentFormat, signed: bool, device: torch.device | str = "cpu") -> Moment:
    """Return a moment of ``n`` zeros."""
    scales = torch.zeros(-(-n // BLOCK), dtype=torch.float32, device=device) if format == "int8" else None
    return Moment(torch.zeros(n, dtype=_CODES[format], device=device), scales, signed)


def root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of an fp32 tensor.

    torch's own root, which calls MKL on CPUs, is off by one bit for one number in five. The fp64 root of an fp32 number
    is never close enough to the middle of two fp32 numbers for double rounding to matter.
    """
    return x.double().sqrt_().float()


def random_bits(n: int, seed: int, offset: int, device: torch.device | str = "cpu") -> Tensor:
    """Return 32 random bits for each of the positions ``[offset, offset + n)``, ``(n,)`` int32.

    This is the finalizer of MurmurHash3 over a Weyl sequence. It depends only on seed and position, not on chunks,
    threads or vector width.
    """
    start = _int32(offset * 0x9E3779B9 + seed)
    h = torch.arange(n, dtype=torch.int32, device=device).mul_(_int32(0x9E3779B9)).add_(start)
    h ^= (h >> 16) & 0xFFFF  # `>>` keeps the sign, hence the masks
    h *= _int32(0x85EBCA6B)
    h ^= (h >> 13) & 0x7FFFF
    h *= _int32(0xC2B2AE35)
    h ^= (h >> 16) & 0xFFFF
    return h


def _int32(value: int) -> int:
    return (value + 0x80000000) % 0x100000000 - 0x80000000


def round_to_bf16(value: Tensor, rounding: Tensor) -> Tensor:
    """Round fp32 to bf16, ``(n,)``, up or down according to 16 random bits (int32). NaN stays NaN."""
    bits = value.view(torch.int32)
    rounded = ((bits + rounding) >> 16) & 0xFFFF
    rounded = torch.where((bits & _MAGNITUDE) > _INFINITY, 0x7FC0, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)
