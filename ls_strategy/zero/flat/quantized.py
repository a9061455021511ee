"""A flat buffer of frozen weights that are stored, sent and offloaded in 4 or 8 bits, see `ls_strategy.ops.quantized`.

::

    master      | b | c  |              tiles of this rank's shard, or of the full buffer below stage 3
    wire    | a | b | c      |....|     all ranks' tiles; only at stage 3, while they are gathered: sent as stored
    full    | a | b | c      |....|     compute dtype, dequantized; only while gathered, at every stage

A parameter starts at a tile, and so does a shard. So the blocks with a common scale are those of the parameter, for any
number of ranks, and every element has the same value on all of them. Below stage 3 every rank has all tiles, and a
gather sends nothing.

To all others the masters are dequantized values in the compute dtype: checkpoints, `read_master`, a new engine. What is
written is rounded. Writing what was read changes nothing, because the formats are idempotent.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.config import FrozenFormat
from ls_strategy.distributed.comm import PendingGather
from ls_strategy.ops.quantized import TILE, dequantize_, packed_bytes, quantize, rounded
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.initial import full_values, shard_values

_log = logging.getLogger("ls_strategy.zero")


class QuantizedFlat(FlatBuffer):
    """Frozen parameters of a unit, in tiles. ``master`` has bytes; its readers and writers convert."""

    encodes = False

    @property
    def form(self) -> FrozenFormat:
        """Return the format."""
        assert self.plan.quantized is not None
        return self.plan.quantized

    @override
    def _fill(self, values: list[Tensor], device: torch.device) -> None:
        begin = shard_values if self.policy.parameters else full_values
        self.place(quantize(begin(self, values, device), self.form))
        self.full = torch.empty(self.layout.numel, dtype=self.dtype, device=device)

    @override
    def place(self, mine: Tensor) -> None:
        self.master = self.store.create("master", self.optimizer_tier, mine, torch.uint8)

    # masters ---------------------------------------------------------------------------------------------------------

    def _stored_at(self, start: int, stop: int) -> slice:
        """Return where elements ``[start, stop)`` are in tiles."""
        return slice(packed_bytes(start, self.form), packed_bytes(stop, self.form))

    def _packed(self, start: int, stop: int) -> Tensor:
        """Return the tiles of elements ``[start, stop)`` of this rank's range, which begin and end at tiles."""
        self.require_here("masters")
        place = self._stored_at(start, stop)
        return self.store.view("master", place.start, place.stop)

    @override
    def read_master(self) -> Tensor:
        return self.master_range(0, self.stepped_numel)

    @override
    def master_range(self, start: int, stop: int) -> Tensor:
        lo, hi = _tiles_around(start, stop)
        packed = self._packed(lo, hi)
        out = torch.empty(hi - lo, dtype=self.dtype, device=packed.device)
        dequantize_(packed, out, self.form)
        return out[start - lo : stop - lo]

    @override
    def write_master(self, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        lo, hi = _tiles_around(start, stop)
        self.require_here("masters")
        self.before_change()
        if (lo, hi) == (start, stop):
            new = values.detach().to(device=self.master.device, dtype=self.dtype)
        else:
            new = self.master_range(lo, hi)
            new[start - lo : stop - lo].copy_(values)
        packed, place = quantize(new, self.form), self._stored_at(lo, hi)
        self.store.write("master", place.start, packed)

    @override
    def full_master(self) -> Tensor:
        if self.wire is None:
            return self.read_master()
        wire = torch.empty_like(self.wire.values, device=self.full.device)
        wire[self.wire.place(*self.owned)].copy_(self._packed(0, self.stepped_numel))
        self.comm.all_gather(wire, self.name, self.wire.sizes).wait()
        out = torch.empty(self.layout.numel, dtype=self.dtype, device=wire.device)
        dequantize_(wire, out, self.form)
        return out

    @override
    def refresh(self) -> None:
        pass  # there is no other copy

    @override
    def rounded(self, values: Tensor) -> Tensor:
        return rounded(values.to(device=self.full.device, dtype=self.dtype), self.form)

    @override
    def show_stored(self) -> None:
        dequantize_(quantize(self.full, self.form), self.full, self.form)

    @override
    def _warn_of_rounding(self) -> None:
        if not self._rounding_warned and self.comm.rank == 0:
            message = (
                f"a weight of the buffer of {self.name!r} was written to, but it is stored as {self.form}, so the new "
                "values were rounded again. Name its module in precision.frozen_except to keep exact values."
            )
            _log.warning("%s", message)
        self._rounding_warned = True

    @override
    def take_writes(self) -> bool:
        changed = self.writes.take()
        if changed:
            self._warn_of_rounding()
        return changed

    # parameters ------------------------------------------------------------------------------------------------------

    @override
    def start_gather(self) -> None:
        if self.policy.parameters:
            super().start_gather()
            return
        self.require_here("parameters")
        if torch.jit.is_tracing():
            self.refuse_tracing()
        self.writes.begin_gather()
        self._begin_gather(PendingGather((), self.comm))

    @override
    def finish_gather(self, *, on_demand: bool = False) -> None:
        if self.wire is None and self._end_gather():
            self.comm.pool.allocate(self.full)
            dequantize_(self.master, self.full, self.form)
        super().finish_gather(on_demand=on_demand)


def _tiles_around(start: int, stop: int) -> tuple[int, int]:
    return start // TILE * TILE, -(-stop // TILE) * TILE
