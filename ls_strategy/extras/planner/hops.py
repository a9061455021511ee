"""Simulate the buffers of gradients that are sent in few bits.

The rules repeat those of `quantized_reduce`. A test compares the result with the storages of real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from ls_strategy.distributed.comm import SUM_CHUNK, ranks_by_node
from ls_strategy.distributed.wire_format import FORMATS
from ls_strategy.ops.quantized import TILE
from ls_strategy.plan import FlatPlan, Plan

_DEVICE_CHUNK = 16 * SUM_CHUNK
"""Elements that are worked on at a time on a device, see `quantized_reduce.CHUNK`."""

_REFERENCE_BYTES = 13
"""Temporary bytes per element of `quantize_reference`: three numbers in fp32 and a level."""


class Pool(Protocol):
    """See `buffers.SimulatedPool`."""

    def take(self, numel: int, itemsize: int) -> tuple[int, int]:
        """Take a buffer."""
        ...

    def give(self, keys: Sequence[tuple[int, int]]) -> None:
        """Return buffers."""
        ...


class SimulatedHops:
    """Simulates `quantized_reduce.QuantizedReduce`: the first hop is in flight."""

    def __init__(
        self, flat: FlatPlan, plan: Plan, *, node_size: int | None, cuda: bool, pool: Pool, add: Callable[[int], None]
    ) -> None:
        """Start.

        Args:
            flat: the buffer, with a format for its gradients.
            plan: of the run.
            node_size: ranks per node. None: all are on one.
            cuda: temporary tensors are those of operations of torch, not of a kernel.
            pool: of the ranks that shard the buffer.
            add: allocates bytes, or frees them if negative.
        """
        assert flat.reduced_as is not None
        self._form = FORMATS[flat.reduced_as]
        self._layout = flat.layout
        self._replicas = plan.group[1]
        first = plan.group[0] * flat.layout.world_size
        self._nodes = ranks_by_node(range(first, first + flat.layout.world_size), node_size)
        self._cuda, self._pool, self._add = cuda, pool, add
        self._borrowed: list[tuple[int, int]] = []
        self._hops = self._run()
        self.advance()

    def advance(self) -> bool:
        """Start the next hop, if there is one, and return whether there was."""
        return next(self._hops, None) is not None

    def finish(self) -> None:
        """Make the other hops, add the last terms, and return all buffers."""
        while self.advance():
            pass
        self._sum_parts([self._layout.shard])
        self._pool.give(self._borrowed)

    def _run(self) -> Iterator[str]:
        layout, nodes = self._layout, self._nodes
        here = next(node for node in nodes if layout.rank in node)
        cuts = [layout.cuts[r + 1] - layout.cuts[r] for r in range(layout.world_size)]
        self._exchange([[cuts[node[i]] for node in nodes] for i in range(len(here))], here.index(layout.rank))
        yield "inside the nodes"
        place = here.index(layout.rank)
        if len(nodes) > 1:
            self._sums([cuts[node[place]] for node in nodes])
            self._exchange([[cuts[node[place]]] for node in nodes], nodes.index(here))
            yield "between the nodes"
        if self._replicas > 1:
            part = layout.shard // self._replicas
            self._sums([layout.shard])
            self._exchange([[part]] * self._replicas, 0)
            yield "between replicas"
            self._sums([part])
            self._pack([part])
            self._borrow(self._form.nbytes(part) * self._replicas, 1)
            yield "totals"

    def _exchange(self, parts: Sequence[Sequence[int]], mine: int) -> None:
        for peer, theirs in enumerate(parts):
            if peer != mine:
                self._pack(theirs)
                self._borrow(sum(self._form.nbytes(n) for n in parts[mine]), 1)

    def _pack(self, parts: Sequence[int]) -> None:
        self._borrow(sum(self._form.nbytes(n) for n in parts), 1)
        for numel in parts:
            at_once = min(numel, _DEVICE_CHUNK)
            self._for_a_while(at_once * _REFERENCE_BYTES if self._cuda else numel // TILE * 8)

    def _sums(self, parts: Sequence[int]) -> None:
        before, self._borrowed = self._borrowed, []
        self._borrow(sum(parts), 4)
        self._sum_parts(parts)
        self._pool.give(before)

    def _sum_parts(self, parts: Sequence[int]) -> None:
        chunk = _DEVICE_CHUNK if self._cuda else SUM_CHUNK
        for numel in parts:
            self._for_a_while(2 * 4 * min(numel, chunk))

    def _for_a_while(self, nbytes: int) -> None:
        self._add(nbytes)
        self._add(-nbytes)

    def _borrow(self, numel: int, itemsize: int) -> None:
        self._borrowed.append(self._pool.take(numel, itemsize))
