"""Weights gathered as the fp8 bytes that products read (stage 3 with ``precision.matmul="fp8"``, one scale per weight).

A layer that multiplies in fp8 casts its weight with a scale that the weight's largest magnitude decides. So ranks
agree on the magnitudes of a buffer's weights, in one small all-reduce, and cast their shards before they gather: the
same bytes as casting after a gather. That is one byte per element on the wire and in memory, and backward reads it too.

All else is as in `ls_strategy.zero.flat.cast`: the parameter stays what it is, and another use gathers it so.

The first gather of a step computes the scales. Whether one does has to be the same on all ranks, but only the rank
whose shard it changes notices a write of user code. So once user code could write, every gather does until the next
step.

Source: torchao.float8 (https://github.com/pytorch/ao), whose bits these are, and whose integration with FSDP2 this is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy._torch import current_transform, saved_for_recomputation, without_dispatch_modes
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.distributed.comm import Comm
from ls_strategy.layout import FlatLayout, Piece
from ls_strategy.zero.flat.cast import CastFlat, CastWire
from ls_strategy.zero.flat.parameters import ShardedParameter, home_of
from ls_strategy.zero.flat.states import ParameterState
from ls_strategy.zero.wire import Wire

_LEAST = 1e-12
"""Smaller magnitudes count as this, so that no scale is infinite."""


def float8_weight(param: nn.Parameter) -> tuple[Tensor, Tensor] | None:
    """Return a parameter in fp8 and its scale, ``()`` fp32, if it was gathered so. Otherwise None.

    Autograd may save both: the first is refused, as the parameter would be, once its values have changed.
    """
    home = home_of(param)
    return home.in_float8(param) if isinstance(home, Float8Flat) else None


def scales_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 scales of weights with these largest magnitudes, fp32. Any shape."""
    return (torch.finfo(dtype).max / largest.double().clamp(min=_LEAST)).float()


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` times ``scale`` in fp32, within the range of ``dtype``."""
    limit = torch.finfo(dtype).max
    return (values.float() * scale).clamp_(-limit, limit)


class Float8Wire(CastWire):
    """The memory of gathers in fp8."""

    def __init__(
        self,
        dtype: torch.dtype,
        layout: FlatLayout,
        shard: tuple[int, int],
        *,
        stored: torch.dtype,
        device: torch.device,
        pool: BufferPool,
        comm: Comm,
    ) -> None:
        """Describe the wire, see `CastWire`. ``comm``: the ranks with the other shards."""
        super().__init__(dtype, layout, shard, stored=stored, device=device, pool=pool)
        self._comm = comm
        self._pieces, self._all = layout.pieces(*shard), layout.pieces(0, layout.numel)
        self.scales = torch.ones(len(layout.slots), device=device).unbind()
        """One per parameter, fp32. Autograd may save them, so they are replaced and not changed."""
        self.measured = False
        """Whether they are those of the parameters. The same on all ranks."""
        self.exposed = False
        """Whether user code may write to the parameters without a trace on every rank. The same on all ranks."""

    @override
    def casts_now(self) -> bool:
        return False  # autocast never casts to this dtype

    @override
    def encode_own_part(self) -> None:
        """Cast this rank's shard. Collective if scales have to be computed."""
        if self._own is None:
            return
        if self.exposed or not self.measured:
            largest = _largest(self._own, self._pieces)
            if self._comm.world_size > 1:
                there = largest if self._comm.native else largest.cpu()
                largest = self._comm.reduce_numbers(there, dist.ReduceOp.MAX).to(self.values.device)
            self._scale_for(largest)
            self.measured = True
        self._pool.allocate(self.values)
        self._encode(self._own, self._pieces, self.values[self.place(*self._shard)])
        self._give_own()

    @override
    def fill(self, full: Tensor) -> None:
        self._scale_for(_largest(full, self._all))
        self._pool.allocate(self.values)
        self._encode(full, self._all, self.values)
        self.arrived()

    @override
    def encoded(self, full: Tensor) -> Tensor:
        self._scale_for(_largest(full, self._all))
        out = torch.empty_like(self.values)
        self._encode(full, self._all, out)
        return out

    def _scale_for(self, largest: Tensor) -> None:
        """Take the scales from what `_largest` returns."""
        self.scales = scales_for(largest.view(torch.float32), self.cast_to).unbind()

    def _encode(self, values: Tensor, pieces: Sequence[Piece], out: Tensor) -> None:
        out.zero_()  # between the parameters
        for piece, scale in zip(pieces, self.scales, strict=True):
            if piece.numel:
                part = slice(piece.start, piece.stop)
                self.form.encode(scaled(values[part], scale, self.cast_to), out[part])

    @override
    def _differs(self, index: int, full: Tensor) -> bool:
        piece = self._all[index]
        values = full[piece.start : piece.stop]
        scale = scales_for(_largest(full, [piece]).view(torch.float32), self.cast_to)[0]
        now = scaled(values, scale, self.cast_to).to(self.cast_to).view(torch.uint8)
        same = torch.equal(scale, self.scales[index]) and torch.equal(now, self.values[piece.start : piece.stop])
        return not same

    @override
    def outdate(self) -> None:
        super().outdate()
        self.measured = self.exposed = False


class Float8Flat(CastFlat):
    """A flat buffer that is gathered in fp8 while only layers that multiply in fp8 use it."""

    _casts: Float8Wire  # pyright: ignore[reportIncompatibleVariableOverride]

    @override
    def _make_wire(self, device: torch.device) -> Wire:
        assert self.plan.cast_to is not None
        self._casts = Float8Wire(  # pyright: ignore[reportIncompatibleVariableOverride]
            self.plan.cast_to, self.layout, self.stepped,
            stored=self.dtype, device=device, pool=self.comm.pool, comm=self.comm,
        )  # fmt: skip
        return self._casts

    def in_float8(self, param: nn.Parameter) -> tuple[Tensor, Tensor] | None:
        """Return a parameter in fp8 and its scale, see `float8_weight`."""
        if self.state is ParameterState.CAST and current_transform() is None and not torch.jit.is_tracing():
            index = self._index[id(param)]
            return self._casts.read(index), self._casts.scales[index]
        # Autograd saves no view of what is gathered on demand. Recomputation compares what its two runs save, and user
        # code may have had one of them gathered exactly.
        again = type(param) is ShardedParameter or (torch.is_grad_enabled() and saved_for_recomputation())
        return self._cast_again(param) if again else None

    def _cast_again(self, param: nn.Parameter) -> tuple[Tensor, Tensor]:
        to = self._casts.cast_to
        # Selective recomputation looks for the operations of its second run among those of the first.
        with torch.no_grad(), without_dispatch_modes():
            values = param.clone()
            scale = scales_for(values.abs().max().float(), to)
            return scaled(values, scale, to).to(to), scale

    @override
    def gather_exactly(self) -> None:
        super().gather_exactly()
        self._casts.exposed = True

    @override
    def full_master(self) -> Tensor:
        self._casts.exposed = True  # user code may write to a state dict of it
        return super().full_master()

    @override
    def require_refresh(self, due: bool = True) -> None:
        super().require_refresh(due)
        self._casts.measured = False

    @override
    def write_fetched(self, start: int, values: Tensor) -> None:
        if self.state is ParameterState.CAST:
            self.release()  # for the scale of a part of the parameter is not known
        super().write_fetched(start, values)


def _largest(values: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Return the largest magnitude of each piece as the bits of an fp32, ``(pieces,)`` int32.

    They are in the order of the numbers, and NaN is above all, which a maximum of floating-point numbers may drop.
    """
    none = values.new_zeros(())
    found = [torch.linalg.vector_norm(values[p.start : p.stop], torch.inf) if p.numel else none for p in pieces]
    return torch.stack(found).float().view(torch.int32) & 0x7FFFFFFF
