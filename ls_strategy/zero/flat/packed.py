"""A flat buffer whose parameters are gathered in 4 or 8 bits (ZeRO++'s qwZ), see `ls_strategy.ops.quantized`.

::

    master      | b | c  |              as without: this rank's shard, stepped by the optimizer
    wire    | a | b | c      |....|     all ranks' tiles, only while they are gathered
    full    | a | b | c      |....|     compute dtype, dequantized; only while gathered

Forward and backward compute with rounded weights, the same on all ranks; gradients are applied to the exact masters.
Parameters and shards start at tiles, so the rounded values do not depend on the number of ranks. What is gathered for
user code outside of a unit's own forward is exact. Wang et al. 2023, "ZeRO++", arXiv:2306.10209, section 3.1.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.config import FrozenFormat
from ls_strategy.distributed.comm import PendingGather
from ls_strategy.ops.quantized import dequantize_, packed_bytes, quantize, rounded
from ls_strategy.zero.flat.flat_buffer import FlatBuffer, allocate

_log = logging.getLogger("ls_strategy.zero")


class PackedFlat(FlatBuffer):
    """Sharded parameters of a unit, which are rounded to few bits on their way to the other ranks."""

    _wire: Tensor
    """The tiles of all ranks: uint8, with memory only while they are gathered."""

    _own: Tensor | None = None
    """This rank's shard on its way into the wire, in the compute dtype."""

    _exact = False
    """Whether the last gather was not rounded."""

    _was_written = False

    @property
    def form(self) -> FrozenFormat:
        """Return the format."""
        assert self.plan.gathered_as is not None
        return self.plan.gathered_as

    @property
    @override
    def wire(self) -> Tensor:
        return self.full if self._exact else self._wire

    @override
    def in_wire(self, start: int, stop: int) -> slice:
        if self._exact:
            return slice(start, stop)
        return slice(packed_bytes(start, self.form), packed_bytes(stop, self.form))

    @property
    @override
    def wire_sizes(self) -> Sequence[int] | None:
        sizes = self.layout.sizes
        return sizes if sizes is None or self._exact else tuple(packed_bytes(n, self.form) for n in sizes)

    @override
    def _fill(self, values: list[Tensor], device: torch.device) -> None:
        super()._fill(values, device)
        self._wire = torch.empty(packed_bytes(self.layout.numel, self.form), dtype=torch.uint8, device=device)
        self._wire.untyped_storage().resize_(0)

    # gathers ---------------------------------------------------------------------------------------------------------

    @override
    def gather_exactly(self) -> None:
        if self.reading is None:
            self._exact = True

    @override
    def _gather_in_node(self) -> PendingGather | None:
        return None if self._exact else super()._gather_in_node()

    @override
    def own_part(self) -> Tensor:
        if self._exact:
            return super().own_part()
        if self._own is None:
            self._own = self.comm.pool.take(self.stepped_numel, self.dtype, self.full.device)
        return self._own

    @override
    def pack_own_part(self) -> None:
        if self._own is not None:
            allocate(self._wire)
            quantize(self._own, self.form, out=self._wire[self.in_wire(*self.stepped)])
            self._give_own()

    def _give_own(self) -> None:
        if self._own is not None:
            self.comm.pool.give([self._own])
            self._own = None

    @override
    def finish_gather(self, *, on_demand: bool = False) -> None:
        if self.gathering is not None and not self._exact:
            self.gathering.wait()
            self.gathering = None
            self._arrived()
            allocate(self.full)
            dequantize_(self._wire, self.full, self.form)
            self._free_wire()
        super().finish_gather(on_demand=on_demand)

    @override
    def _arrived(self) -> None:
        if not self._exact:
            super()._arrived()

    @override
    def release(self) -> None:
        super().release()
        self._give_own()
        self._free_wire()
        self._exact = False

    def _free_wire(self) -> None:
        self._wire.untyped_storage().resize_(0)

    # writes ----------------------------------------------------------------------------------------------------------

    @override
    def gathered_shard(self, master: Tensor) -> Tensor:
        exact = super().gathered_shard(master)
        return exact if self._exact else rounded(exact, self.form)

    @override
    def update_secondary(self) -> None:
        if self.has_secondary and self.secondary is not None:
            self.secondary.written(quantize(self.full, self.form))

    @override
    def take_writes(self) -> bool:
        changed = super().take_writes()
        if changed and not self._exact and not self._was_written and self.comm.rank == 0:
            _log.warning(
                "%s",
                f"a weight of the buffer of {self.name!r} was written to where it is rounded to {self.form}, so what "
                "was written is kept and its precision is that. Write outside of the module's own forward, or leave "
                "sharding.quantized_gathers out.",
            )
            self._was_written = True
        return changed

    # error -----------------------------------------------------------------------------------------------------------

    def gather_error(self) -> Tensor:
        """Return the sums of squares of what rounding changes and of the weights in this rank's shard, ``(2,)`` fp64.

        Not collective.
        """
        own = self.read_master().detach().to(device=self.full.device, dtype=self.dtype)
        change = rounded(own, self.form).double() - own.double()
        return torch.stack([change.square().sum(), own.double().square().sum()])
