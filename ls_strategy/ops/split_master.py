"""fp32 master weights that are stored as the bf16 weight of the forward and the bits that complete it.

::

    fp32    hhhhhhhh hhhhhhhh  llllllll llllllll       high = fp32 rounded to the nearest bf16, ties to even
    stored        high              low       t        low  = the lower 16 bits of the fp32 number

``high`` is the upper half, or one more where the lower half was rounded up. That is where ``low`` is above the middle,
0x8000. At the middle itself, ties go to even: an even ``high`` may have come from above or from below. So 65,537 fp32
numbers round to an even bf16 number (65,535 to an odd one), and 16 bits alone cannot tell them apart. The bit ``t``
does: it is set where a number in the middle was rounded up. All bit patterns but those of NaN are restored exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PER_BYTE = 8
"""Elements whose bits for ties share a byte."""

BYTES = 2 + 1 / PER_BYTE
"""Bytes per element in addition to the bf16 weight."""

_MIDDLE = 0x8000


@dataclass
class SplitMaster:
    """The master weights of some elements of a flat buffer."""

    high: Tensor
    """``(n,)`` bf16, contiguous: the weights that the forward reads."""

    low: Tensor
    """``(n,)`` int16: the lower bits of the fp32 numbers."""

    ties: Tensor
    """``(ceil(n / PER_BYTE),)`` uint8: element ``i`` has bit ``i % PER_BYTE`` of byte ``i // PER_BYTE``."""

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
        return SplitMaster(
            self.high[start:stop], self.low[start:stop], self.ties[start // PER_BYTE : -(-stop // PER_BYTE)]
        )

    def join(self) -> Tensor:
        """Return the fp32 numbers in a new tensor, ``(n,)``, on the device of ``low``."""
        low = self.low.to(torch.int32) & 0xFFFF
        bits = torch.arange(PER_BYTE, dtype=torch.uint8, device=low.device)
        tied = ((self.ties[:, None] >> bits) & 1).view(-1)[: low.numel()]
        upper = self.high.view(torch.int16).to(device=low.device, dtype=torch.int32) - (low + tied > _MIDDLE).int()
        return ((upper << 16) | low).view(torch.float32)

    def store_(self, values: Tensor) -> None:
        """Replace the numbers by ``values``, ``(n,)`` fp32."""
        bits = values.contiguous().view(torch.int32)
        self.high.copy_(values)
        self.low.copy_(((bits & 0xFFFF) ^ _MIDDLE) - _MIDDLE)  # as a signed number
        tied = torch.zeros(self.ties.numel() * PER_BYTE, dtype=torch.int32, device=values.device)
        tied[: values.numel()] = (bits & 0x1FFFF) == 0x18000
        weights = 1 << torch.arange(PER_BYTE, dtype=torch.int32, device=values.device)
        self.ties.copy_((tied.view(-1, PER_BYTE) * weights).sum(1))


def split(values: Tensor) -> SplitMaster:
    """Return fp32 numbers, ``(n,)``, in parts of their own."""
    n, device = values.numel(), values.device
    parts = SplitMaster(
        torch.empty(n, dtype=torch.bfloat16, device=device),
        torch.empty(n, dtype=torch.int16, device=device),
        torch.empty(-(-n // PER_BYTE), dtype=torch.uint8, device=device),
    )
    parts.store_(values)
    return parts
