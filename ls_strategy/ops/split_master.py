"""fp32 master weights that are stored as the bf16 weight of the forward and the bits that complete it.

::

    fp32    hhhhhhhh hhhhhhhh  llllllll llllllll       high = fp32 rounded to the nearest bf16, ties to even
    stored        high              low       t        low  = the lower 16 bits of the fp32 number

``high`` is the upper half, or one more where the lower half was rounded up. That is where ``low`` is above the middle,
0x8000. At the middle itself, ties go to even: an even ``high`` may have come from above or from below. So 65,537 fp32
numbers round to an even bf16 number (65,535 to an odd one), and 16 bits alone cannot tell them apart. The bit ``t``
does: it is set where a number in the middle was rounded up. All bit patterns but those of NaN are restored exactly.

Master weights of 24 bits are fp32 numbers whose last byte is zero, and have the same upper part::

    24 bits    hhhhhhhh hhhhhhhh  llllllll             high = rounded to the nearest bf16, ties to even
    stored           high            low               low  = the distance from high, a signed number

The distance is counted in 256ths of that of two bf16 numbers, from -128 to 128. A byte has all but 128, the number in
the middle above an even one, which is one in 512 and left out. Rounding to 24 bits never changes ``high``: next to the
middle it goes to the neighbor on the own side. So it changes a number by 2**-16 of its magnitude at most, there by
twice that; casting the result to bf16 gives ``high``, as casting the fp32 number does; splitting it again changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ls_strategy.config import SplitFormat

PER_BYTE = 8
"""Elements whose bits for ties share a byte."""

BYTES: dict[SplitFormat, float] = {"split": 2 + 1 / PER_BYTE, "24": 1.0}
"""Bytes per element in addition to the bf16 weight."""

LOW: dict[SplitFormat, torch.dtype] = {"split": torch.int16, "24": torch.int8}
"""Dtype of the lower bits. Only 16 of them need a bit for ties."""

_MIDDLE = 0x8000


@dataclass
class SplitMaster:
    """The master weights of some elements of a flat buffer."""

    high: Tensor
    """``(n,)`` bf16, contiguous: the weights that the forward reads."""

    low: Tensor
    """``(n,)`` int16: the lower bits of the fp32 numbers; int8: those of numbers of 24 bits."""

    ties: Tensor | None
    """``(ceil(n / PER_BYTE),)`` uint8: element ``i`` has bit ``i % PER_BYTE`` of byte ``i // PER_BYTE``. None with
    numbers of 24 bits."""

    @property
    def device(self) -> torch.device:
        """Return where ``low`` and ``ties`` are."""
        return self.low.device

    def numel(self) -> int:
        """Return the number of elements."""
        return self.low.numel()

    def __getitem__(self, where: slice) -> SplitMaster:
        """Return a range as views. It starts at a multiple of `PER_BYTE`."""
        start, stop = where.start, where.stop
        if start % PER_BYTE:
            raise ValueError(f"Got start={start} of split master weights, but it must be a multiple of {PER_BYTE}.")
        ties = None if self.ties is None else self.ties[start // PER_BYTE : -(-stop // PER_BYTE)]
        return SplitMaster(self.high[start:stop], self.low[start:stop], ties)

    def join(self) -> Tensor:
        """Return the fp32 numbers in a new tensor, ``(n,)``, on the device of ``low``."""
        high = self.high.view(torch.int16).to(device=self.low.device, dtype=torch.int32)
        if self.ties is None:
            return ((high << 16) + (self.low.to(torch.int32) << 8)).view(torch.float32)
        low = self.low.to(torch.int32) & 0xFFFF
        bits = torch.arange(PER_BYTE, dtype=torch.uint8, device=low.device)
        tied = ((self.ties[:, None] >> bits) & 1).view(-1)[: low.numel()]
        return ((high - (low + tied > _MIDDLE).int() << 16) | low).view(torch.float32)

    def store_(self, values: Tensor) -> None:
        """Replace the numbers by ``values``, ``(n,)`` fp32."""
        bits = values.contiguous().view(torch.int32)
        self.high.copy_(values)
        if self.ties is None:
            rounded = bits + (0x7F + (bits >> 8 & 1)) >> 8
            high = self.high.view(torch.int16).to(device=values.device, dtype=torch.int32)
            distance = torch.maximum((rounded - (high << 8)).clamp_(max=127), (high & 1) - 128)
            self.low.copy_(torch.where(values.isnan(), 0, distance))
            return
        self.low.copy_(((bits & 0xFFFF) ^ _MIDDLE) - _MIDDLE)  # as a signed number
        tied = torch.zeros(self.ties.numel() * PER_BYTE, dtype=torch.int32, device=values.device)
        tied[: values.numel()] = (bits & 0x1FFFF) == 0x18000
        weights = 1 << torch.arange(PER_BYTE, dtype=torch.int32, device=values.device)
        self.ties.copy_((tied.view(-1, PER_BYTE) * weights).sum(1))


def split(values: Tensor, form: SplitFormat = "split") -> SplitMaster:
    """Return fp32 numbers, ``(n,)``, in parts of their own."""
    n, device = values.numel(), values.device
    parts = SplitMaster(
        torch.empty(n, dtype=torch.bfloat16, device=device),
        torch.empty(n, dtype=LOW[form], device=device),
        torch.empty(-(-n // PER_BYTE), dtype=torch.uint8, device=device) if form == "split" else None,
    )
    parts.store_(values)
    return parts
