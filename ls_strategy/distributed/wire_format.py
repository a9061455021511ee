"""Formats in which elements are sent between ranks when they are not sent as they are.

Gathers of parameters (`ls_strategy.zero.wire`) and reductions of gradients (`ls_strategy.distributed.quantized_reduce`)
use them. A format has to encode and decode any range that begins and ends at a tile, as shards do, without its
neighbours: so values do not depend on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.config import FrozenFormat
from ls_strategy.distributed.comm import SUM_CHUNK
from ls_strategy.ops.norm import sum_of_squares
from ls_strategy.ops.quantized import TILE, dequantize_, measures, packed_bytes, quantize, rounded
from ls_strategy.registry import Registry

CHUNK = 16 * SUM_CHUNK
"""Elements decoded at a time on a device: 4 MiB in fp32."""


class WireFormat(ABC):
    """The format in which elements are sent. `tests.unit.test_zero_wire` has what every format has to hold."""

    name: str
    """For messages."""

    dtype: torch.dtype
    """Of what is sent."""

    lossless: bool
    """Whether decoding gives back every bit."""

    @abstractmethod
    def numel(self, elements: int) -> int:
        """Return how many values of `dtype` are sent for so many elements, additive over shards."""

    def nbytes(self, elements: int) -> int:
        """Return how many bytes are sent for so many elements."""
        return self.numel(elements) * self.dtype.itemsize

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write ``values``, ``(n,)`` floating-point numbers, to ``out``, ``(numel(n),)``. Any thread."""

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Write the values of ``wire``, ``(numel(n),)``, to ``out``, ``(n,)`` floating-point numbers."""

    @abstractmethod
    def rounded(self, values: Tensor) -> Tensor:
        """Return what decoding gives for ``values``, ``(n,)`` for any n, in their dtype."""

    def encode_measured(self, values: Tensor, out: Tensor) -> Tensor:
        """Encode, and return the sum of squares of what that changes, ``()`` fp64; without numbers that are not finite.

        See `encode`. It decodes what it has encoded, unless a format knows better.
        """
        self.encode(values, out)
        total = torch.zeros((), dtype=torch.float64, device=values.device)
        decoded = values.new_empty(min(values.numel(), chunk_of(values.device)), dtype=torch.float32)
        for lo, hi in ranges_of(values.numel(), values.device):
            part = decoded[: hi - lo]
            self.decode(out[self.numel(lo) : self.numel(hi)], part)
            total += finite_sum_of_squares(part.sub_(values[lo:hi]))
        return total


class QuantizedWire(WireFormat):
    """Blocks of 4 or 8 bits with a common scale, see `ls_strategy.ops.quantized`."""

    dtype = torch.uint8
    lossless = False

    def __init__(self, form: FrozenFormat) -> None:
        self.name = form
        self._form: FrozenFormat = form

    @override
    def numel(self, elements: int) -> int:
        """Return the bytes of full tiles."""
        return packed_bytes(elements, self._form)

    @override
    def encode(self, values: Tensor, out: Tensor) -> None:
        quantize(values, self._form, out=out)

    @override
    def decode(self, wire: Tensor, out: Tensor) -> None:
        dequantize_(wire, out, self._form)

    @override
    def rounded(self, values: Tensor) -> Tensor:
        return rounded(values, self._form)

    @override
    def encode_measured(self, values: Tensor, out: Tensor) -> Tensor:
        """Quantize, and let the kernel measure, if there is one."""
        if not measures(values):
            return super().encode_measured(values, out)
        changes = values.new_empty(values.numel() // TILE, dtype=torch.float64)
        quantize(values, self._form, out=out, changes=changes)
        return torch.where(changes.isfinite(), changes, 0.0).sum()


class CastWireFormat(WireFormat):
    """Elements cast to a dtype of fewer bits, as autocast casts them. Those of 8 bits are sent as bytes."""

    lossless = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._cast = dtype
        self.dtype = dtype if dtype.itemsize > 1 else torch.uint8  # which every back end knows
        self.name = str(dtype).removeprefix("torch.")

    @override
    def numel(self, elements: int) -> int:
        return elements

    @override
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Cast, to the nearest."""
        out.view(self._cast).copy_(values)

    @override
    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(wire.view(self._cast))

    @override
    def rounded(self, values: Tensor) -> Tensor:
        return values.to(self._cast).to(values.dtype)


FORMATS: Registry[WireFormat] = Registry("wire formats", {name: QuantizedWire(name) for name in get_args(FrozenFormat)})
"""By the name that a plan has: ``gathered_as``, ``reduced_as``, or ``quantized`` of weights that are stored so."""


def finite_sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of squares, ``()`` fp64, or 0 if a number is not finite: its gradients are not used."""
    total, others = sum_of_squares(values).unbind()
    return torch.where(others > 0, torch.zeros_like(total), total)


def ranges_of(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield the ranges that are decoded at a time: small ones on the CPU, which stay in its cache."""
    step = chunk_of(device)
    yield from ((lo, min(lo + step, numel)) for lo in range(0, numel, step))


def chunk_of(device: torch.device) -> int:
    """Return the elements that are decoded at a time, a multiple of a tile."""
    return SUM_CHUNK if device.type == "cpu" else CHUNK
