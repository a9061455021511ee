"""Reduce-scatters whose messages are encoded, in 4 or 8 bits for example (ZeRO++'s qgZ), see `WireFormat`.

Two nodes of two ranks, and shard 3 of the gradients, which rank 3 owns::

    inside the nodes                          between the nodes
    rank 0 ── ~t0 ─┐
    rank 1 ── t1 ──┴─> rank 1: ~t0 + t1 ────── ~(~t0 + t1) ─┐
    rank 2 ── ~t2 ─┐                                        v
    rank 3 ── t3 ──┴─> rank 3: ~t2 + t3 ──────────────────> ~(~t0 + t1) + (~t2 + t3)

``~`` is what few bits leave of a term. In the first hop a rank sends every neighbor all that belongs to the ranks at
its place on any node; in the second one it sends sums to the ranks at its own place. So a shard leaves a node once, and
not once per rank. Without nodes there is one hop. Groups that hold replicas of a shard then reduce their sums in the
same way, and send each other the rounded totals.

The one invariant: terms are added in fp32, in the order of the ranks, and a total that several ranks keep has the same
bits on all of them. A block with a number that is not finite arrives as NaN. Wang et al. 2023, "ZeRO++",
arXiv:2306.10209, section 3.3.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.distributed.comm import Comm, PendingReduce, cut
from ls_strategy.distributed.shard_groups import ShardGroup
from ls_strategy.distributed.wire_format import WireFormat, chunk_of, finite_sum_of_squares, ranges_of

Works = Sequence[Any]

Term = tuple[Tensor, bool]
"""A term of a sum, and whether it is encoded: a rank's own terms are not."""

Sum = tuple[int, Sequence[Term]]
"""Number of elements of a part of the buffer, and the terms of its sum in order."""


class Rounding:
    """Rounding error of encoded messages: sums of squares, of finite numbers only."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        """Of the changes and of the totals, ``(2,)`` fp64."""

    def encode(self, parts: Sequence[Tensor], message: Tensor, form: WireFormat) -> None:
        """Write one message: parts, each ``(n,)``, one after the other; and add what that changes."""
        lengths = [form.numel(part.numel()) for part in parts]
        for exact, out in zip(parts, message.split(lengths), strict=True):
            self._add(0, form.encode_measured(exact, out))

    def received(self, total: Tensor) -> None:
        """Add a part of a sum over all ranks."""
        self._add(1, finite_sum_of_squares(total))

    def _add(self, which: int, squares: Tensor) -> None:
        if self._sums is None:
            self._sums = torch.zeros(2, dtype=torch.float64, device=squares.device)
        self._sums[which].add_(squares)

    def take(self, device: torch.device) -> Tensor:
        """Return the sums of squares of changes and of totals since the last call, ``(2,)`` fp64."""
        sums, self._sums = self._sums, None
        return torch.zeros(2, dtype=torch.float64, device=device) if sums is None else sums


class QuantizedReduce(PendingReduce):
    """A reduce-scatter of encoded messages in flight; `finish` writes its result."""

    hops = True

    def __init__(self, hops: _Hops, comm: Comm) -> None:
        """Start the first hop. Collective."""
        super().__init__((), (), (), comm)
        self._hops = hops
        self._running = hops.run()
        self._next()

    def _next(self) -> bool:
        """Start the next hop, and return whether there was one."""
        works = next(self._running, None)
        self._works = works or ()
        return works is not None

    def advance(self) -> bool:
        """Wait for the hop in flight and start the next one. Collective.

        Returns:
            Whether there is another one after it. Without a next one, nothing is waited for.
        """
        if not self._hops.is_last:
            self._comm.wait(self._works)
            self._next()
        return not self._hops.is_last

    @override
    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Write the average over all ranks to ``out``, ``(shard,)``, or add it if ``accumulate``. Collective."""
        while True:
            self._comm.wait(self._works)
            if not self._next():
                break
        scale = 1.0 / self._comm.averaged_ranks
        for lo, hi, total in self._hops.total():
            if accumulate:
                out[lo:hi].add_(total, alpha=scale)
            else:
                torch.mul(total, scale, out=out[lo:hi])
        self._hops.release()


class _Hops:
    """The hops of one buffer, one after the other."""

    def __init__(
        self, comm: Comm, full: Tensor, form: WireFormat, *, sizes: Sequence[int] | None, of: str, meter: Rounding
    ) -> None:
        self._comm, self._of, self._meter = comm, of, meter
        self._form = form
        self._shards = cut(full, comm.world_size, sizes)
        self._device = full.device
        self._arriving: list[Sum] = []
        """Of every part of the buffer that this rank sums."""
        self._borrowed: list[Tensor] = []
        """Messages sent and received, and sums that are sent on."""
        self.is_last = False
        """Whether the last hop is in flight."""

    def run(self) -> Generator[Works, None, None]:
        """Start one hop after the other; the caller waits for what is yielded before it goes on."""
        comm = self._comm
        nodes, replicas = comm.nodes, comm.replicas
        here = next(node for node in nodes if comm.rank in node)
        self.is_last = len(nodes) == replicas == 1
        yield self._exchange(comm, here, [[self._shards[node[i]] for node in nodes] for i in range(len(here))])
        if len(nodes) > 1:
            self.is_last = replicas == 1
            at_my_place = [node[here.index(comm.rank)] for node in nodes]
            yield self._exchange(comm, at_my_place, [[part] for part in self._sums()])
        if isinstance(comm, ShardGroup):
            (mine,) = self._sums()
            parts = [[part] for part in mine.chunk(replicas)]
            yield self._exchange(comm.across, range(replicas), parts, "all_reduce")
            self.is_last = True
            yield self._share(comm.across)

    def total(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the sum over all ranks of this rank's shard part by part: where it begins and ends, and its values."""
        for lo, hi, part in self._added(*self._arriving):
            if self._comm.replica == 0:
                self._meter.received(part)
            yield lo, hi, part

    def release(self) -> None:
        """Return all buffers."""
        self._comm.pool.give(self._borrowed)
        self._borrowed, self._arriving, self._shards = [], [], ()

    def _exchange(
        self, comm: Comm, peers: Sequence[int], parts: Sequence[Sequence[Tensor]], kind: str = "reduce_scatter"
    ) -> Works:
        """Start sending ``parts[i]``, encoded, to ``peers[i]``, and receiving this rank's parts from each of them."""
        sends: list[Tensor | None] = [None] * comm.world_size
        receives: list[Tensor | None] = [None] * comm.world_size
        mine = parts[peers.index(comm.rank)]
        numels = [part.numel() for part in mine]
        lengths = [self._form.numel(numel) for numel in numels]
        terms: dict[int, Sequence[Term]] = {}
        for peer, theirs in zip(peers, parts, strict=True):
            if peer == comm.rank:
                terms[peer] = [(part, False) for part in mine]
                continue
            sends[peer] = self._encoded(theirs)
            receives[peer] = into = self._borrow(sum(lengths), self._form.dtype)
            terms[peer] = [(part, True) for part in into.split(lengths)]
        self._arriving = [(numel, [terms[peer][i] for peer in peers]) for i, numel in enumerate(numels)]
        return comm.exchange(sends, receives, kind, self._of)

    def _share(self, across: Comm) -> Works:
        """Start sending the encoded total of this rank's part to all replicas. They keep what decoding gives."""
        (mine,) = self._sums()
        message = self._encoded([mine])
        everything = self._borrow(message.numel() * across.world_size, self._form.dtype)
        parts = everything.chunk(across.world_size)
        parts[across.rank].copy_(message)
        self._arriving = [(mine.numel() * across.world_size, [(everything, True)])]
        sends = [message] * across.world_size
        return across.exchange(sends, parts, "all_reduce", self._of)

    def _encoded(self, parts: Sequence[Tensor]) -> Tensor:
        message = self._borrow(sum(self._form.numel(part.numel()) for part in parts), self._form.dtype)
        self._meter.encode(parts, message, self._form)
        return message

    def _sums(self) -> Sequence[Tensor]:
        """Return the sums of what has arrived, fp32."""
        before, self._borrowed = self._borrowed, []
        lengths = [numel for numel, _ in self._arriving]
        sums = self._borrow(sum(lengths), torch.float32).split(lengths)
        for out, arriving in zip(sums, self._arriving, strict=True):
            self._add_into(out, arriving)
        self._comm.pool.give(before)
        return sums

    def _add_into(self, out: Tensor, arriving: Sum) -> None:
        """Write a sum to ``out``. A function, so that the memory of one sum's parts is free before the next sum's."""
        for lo, hi, part in self._added(arriving):
            out[lo:hi].copy_(part)

    def _added(self, arriving: Sum) -> Iterator[tuple[int, int, Tensor]]:
        """Yield a sum part by part: where it begins and ends, and its values, which the next one overwrites."""
        numel, (first, *others) = arriving
        step = min(numel, chunk_of(self._device))
        total, decoded = (torch.empty(step, dtype=torch.float32, device=self._device) for _ in range(2))
        for lo, hi in ranges_of(numel, self._device):
            self._decode(first, lo, hi, total[: hi - lo])
            for term in others:
                self._decode(term, lo, hi, decoded[: hi - lo])
                total[: hi - lo].add_(decoded[: hi - lo])
            yield lo, hi, total[: hi - lo]

    def _decode(self, term: Term, lo: int, hi: int, out: Tensor) -> None:
        values, encoded = term
        if encoded:
            self._form.decode(values[self._form.numel(lo) : self._form.numel(hi)], out)
        else:
            out.copy_(values[lo:hi])

    def _borrow(self, numel: int, dtype: torch.dtype) -> Tensor:
        self._borrowed.append(self._comm.pool.take(numel, dtype, self._device))
        return self._borrowed[-1]


def reduce_quantized(
    comm: Comm, full: Tensor, form: WireFormat, *, of: str, sizes: Sequence[int] | None, meter: Rounding
) -> PendingReduce:
    """Start averaging ``full``, ``(world_size * shard,)``, over the ranks of all groups. Collective.

    Args:
        comm: the ranks that shard it.
        full: fp32, bf16 or fp16, in shards of full tiles, also divided by the replicas; do not change it before
            `PendingReduce.finish`.
        form: the format of the messages.
        of: its name, for traces.
        sizes: elements of every rank's shard. None: equal shards.
        meter: measures what is lost.

    Traffic:
        Of a buffer of P elements over N ranks on m nodes of n: the bytes of P (n - 1) / n elements inside the node, and
        of P (m - 1) / N between nodes. With replicas, twice the other replicas' parts of the shard besides.
    """
    if full.numel() == 0:
        return comm.reduce_scatter(full, None, of, sizes)
    return QuantizedReduce(_Hops(comm, full, form, sizes=sizes, of=of, meter=meter), comm)
