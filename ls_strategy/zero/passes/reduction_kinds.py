"""How one buffer's gradients become averages: a seam. The reducer knows when a buffer is sent, a kind knows how.

==================  ================================================================================================
kind                how
==================  ================================================================================================
`InRankOrder`       one reduce-scatter, of the transport or in the order of the ranks; also over groups of ranks
`Encoded`           in another `WireFormat`, hop by hop: inside the nodes, between them, between replicas
`InTree`            this round's terms of a sum over virtual ranks, in one fixed tree on any number of ranks
==================  ================================================================================================

A further kind is an entry of `Reducer.kinds`. `tests.unit.test_zero_reduction` has what every kind has to hold.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ls_strategy.distributed.comm import PendingReduce
from ls_strategy.distributed.quantized_reduce import Rounding, reduce_quantized
from ls_strategy.distributed.reduction import Reduction
from ls_strategy.distributed.rounds import VirtualRound
from ls_strategy.distributed.tree_sum import RoundInFlight, exchange_leaves
from ls_strategy.distributed.wire_format import WireFormat
from ls_strategy.zero.flat.flat_buffer import FlatBuffer


class ReductionKind(Protocol):
    """A way to average."""

    def start(self, flat: FlatBuffer, full: Tensor) -> Reduction:
        """Start averaging this rank's gradients ``full``, ``(numel,)``, over ``flat.comm``. Collective.

        ``full`` does not change and stays allocated until `Reduction.finish` or `Reduction.collect`.
        """
        ...


class InRankOrder:
    """A reduce-scatter of the gradients as they are; sums are in the order of the ranks, unless the transport sums."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Record the least dtype of sums of the transport; None: that of the gradients."""
        self._dtype = dtype

    def start(self, flat: FlatBuffer, full: Tensor) -> Reduction:
        """Start. Collective."""
        dtype = None if self._dtype is None else torch.promote_types(self._dtype, full.dtype)
        return flat.comm.reduce_scatter(full, dtype, flat.name, flat.layout.sizes)


class Encoded:
    """A reduce-scatter of encoded terms, see `ls_strategy.distributed.quantized_reduce`."""

    def __init__(self, form: WireFormat, meter: Rounding) -> None:
        """Record the format, and what adds up the rounding error of gradients that no other rank reduces too."""
        self._form, self._meter = form, meter

    def start(self, flat: FlatBuffer, full: Tensor) -> Reduction:
        """Start the first hop. Collective."""
        meter = self._meter if flat.reduces_alone else Rounding()
        return reduce_quantized(flat.comm, full, self._form, of=flat.name, sizes=flat.layout.sizes, meter=meter)


class InTree:
    """One round of a sum over virtual ranks, see `ls_strategy.distributed.tree_sum`."""

    def __init__(self, now: VirtualRound) -> None:
        """Record which rank computes which virtual rank now."""
        self._now = now

    def expect(self, flat: FlatBuffer) -> bool:
        """Return whether this rank computes nothing in this round. Then begin to receive the others' terms: collective.

        Nothing waits for them before the next round in which this rank computes something.
        """
        if self._now.leaves[flat.comm.everyone.rank] is not None:
            return False
        flat.averages.tree_sum().expect(self._exchange(flat, None), self._now)
        return True

    def start(self, flat: FlatBuffer, full: Tensor) -> Reduction:
        """Start sending this rank's term to the owners of its shards. Collective."""
        return RoundInFlight(flat.averages.tree_sum(), self._exchange(flat, full), self._now)

    def _exchange(self, flat: FlatBuffer, leaf: Tensor | None) -> PendingReduce:
        return exchange_leaves(flat.comm, leaf, self._now, like=flat.full, of=flat.name, sizes=flat.layout.sizes)
