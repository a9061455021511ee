"""Shard groups: states are sharded over the ranks of a group, and every group holds a replica of them.

Known as hybrid sharding (Zhao et al. 2023, arXiv:2304.11277, section 3.2.2) and as MiCS (Zhang et al. 2022,
arXiv:2205.00119). Two groups of two ranks, and the gradient of shard 0::

    rank 0  t0 ─┐                              every rank of a group sends its term to the shard's owner (rank 0, 2)
    rank 1  t1 ─┴─> owner 0:  t0 + t1 ──────┐  owners of one shard add their group's terms, group after group
    rank 2  t2 ─┐                           v
    rank 3  t3 ─┴─> owner 2:  ((t0 + t1) + t2) + t3 ──> owner 0

The one invariant: the additions are those of a run without groups, in the same order, so the bits are the same. The
chain from group to group costs no bytes for that: each owner sends its shard at most twice, as a ring would. It is cut
into messages, so that all groups work at the same time. Transports that sum by themselves (NCCL) reduce-scatter inside
the group and all-reduce between groups, in their own order; on a GPU the one follows the other in streams of their own,
and the model's stream waits for neither before the average is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy.distributed.comm import SUM_CHUNK, Comm, PendingReduce, Started, sum_

MESSAGE = 4 * SUM_CHUNK
"""Elements per message between groups: 1 MiB in fp32."""


class ShardGroup(Comm):
    """The ranks that shard one replica of the states. Gathers stay inside; reductions average over all groups."""

    def __init__(self, inside: Comm, across: Comm, everyone: Comm) -> None:
        """Use `ls_strategy.distributed.mesh.make_mesh`.

        Args:
            inside: the ranks of this group.
            across: the ranks that hold the same shard as this one, one of every group, in the order of the groups.
            everyone: the ranks of all groups. Its traffic meter also counts what this group sends.
        """
        super().__init__(inside.group, inside.control, failures=everyone.failures)
        self.across = Comm(across.group, across.control, failures=everyone.failures)
        self.across.locate(everyone.node_size)
        self.across.traffic = everyone.traffic
        self._everyone = everyone
        self.native = everyone.native
        self.traffic = everyone.traffic
        self.replica, self.replicas = across.rank, across.world_size
        self.locate(everyone.node_size)
        self._between: dict[torch.device, torch.Stream] = {}
        """By device: the stream in which sums of this group wait to be added to those of others."""

    @property
    @override
    def everyone(self) -> Comm:
        return self._everyone

    @override
    def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` with that of rank ``source`` of all groups together. Blocking."""
        self.everyone.broadcast_(tensor, source)

    @override
    def reduce_scatter(
        self,
        full: Tensor,
        dtype: torch.dtype | None = None,
        of: str = "",
        sizes: Sequence[int] | None = None,
    ) -> PendingReduce:
        """Average ``full``, ``(world_size * shard,)``, over the ranks of all groups; this rank keeps its shard.

        See `Comm.reduce_scatter`.

        Traffic:
            Inside the group as without groups; between groups this rank's shard, in the dtype of the result, at most
            twice.
        """
        assert sizes is None
        if full.numel() == 0:
            return super().reduce_scatter(full, dtype, of)
        pending = _BetweenGroups(super().reduce_scatter(full, dtype, of), dtype, of, self)
        if self.native and dev.is_accelerator(full.device):
            if full.device not in self._between:
                self._between[full.device] = dev.new_stream(full.device)
            pending.start(self._between[full.device])
        return pending


class _BetweenGroups(PendingReduce):
    """A reduce-scatter inside the group in flight; `finish` adds what the other groups have."""

    def __init__(self, inner: PendingReduce, dtype: torch.dtype | None, of: str, comm: ShardGroup) -> None:
        super().__init__((), (), (), comm)
        self._inner, self._dtype, self._of = inner, dtype, of
        self._group = comm
        self._total: Tensor | None = None
        self._used: Sequence[Any] = ()

    def start(self, stream: torch.Stream) -> None:
        """Let the sum over the groups follow that inside this one in ``stream``, so that the model's does not wait."""
        self._used = self._inner.works  # what it reads was allocated for the model's stream, which has not waited yet
        term = self._total_of(self._inner.parts[0])
        stream.wait_stream(dev.stream(term.device))
        with dev.on(stream):
            with self._group.naming_failures():  # `Comm.wait` would record that computation waits
                for work in self._used:
                    work.wait()
            self._inner.works = ()
            self.works, self._total = [self._all_reduce(term)], term

    @override
    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Write the average over all ranks to ``out``, ``(shard,)``, or add it if ``accumulate``. Collective."""
        if self._group.native:
            total = self._total
            if total is None:
                total = self._total_of(self._inner.terms()[0])
                self.works = [self._all_reduce(total)]
            self._group.across.wait(self.works)
            sum_(out, [total], 1.0 / self._group.averaged_ranks, accumulate=accumulate)
            self.works = self._used = ()
        else:
            self._chain(self._inner.terms(), out, accumulate=accumulate)
        self._inner.release()

    def _total_of(self, term: Tensor) -> Tensor:
        """Return where the groups' sum goes. The gradients themselves stay as they are."""
        return term.to(self._dtype or term.dtype, copy=True) if self._group.world_size == 1 else term

    def _all_reduce(self, total: Tensor) -> Started:
        """Start adding the groups' terms, in place."""
        group, across = self._group, self._group.across
        sent = 2 * (across.world_size - 1) * total.numel() // across.world_size
        group.traffic.count_elements("all_reduce", sent, total.element_size(), sent if any(across.far) else 0)
        entry = across.journal.enter("all_reduce", self._of)
        with entry, across.naming_failures():
            work = dist.all_reduce(total, group=across.group, async_op=True)
        return Started(spans.followed((work,), f"all_reduce {self._of}", sent * total.element_size()), entry)

    def _chain(self, terms: Sequence[Tensor], out: Tensor, *, accumulate: bool) -> None:
        """Add the groups' terms to ``out`` in the order of the ranks: sums pass up the groups, totals back down."""
        group, across = self._group, self._group.across
        here, last = across.rank, across.world_size - 1
        scale = 1.0 / group.averaged_ranks
        sums = group.pool.take(out.numel(), out.dtype, out.device)
        ranges = list(_messages(out.numel() // group.replicas, group.replicas))
        entry = across.journal.enter("all_reduce", self._of)
        with entry, across.naming_failures(), spans.waiting(spans.COMMUNICATION, self._of):
            link = _Link(across, entry.tag, group)
            lower = [link.receive(sums[lo:hi], here - 1) for lo, hi in ranges] if here > 0 else []
            totals = [link.receive(out[lo:hi], here + 1) for lo, hi in ranges] if here < last else []
            lag = 2 * (last - here)  # messages between sending a sum up and its total coming down

            def up(i: int) -> None:
                lo, hi = ranges[i]
                if here > 0:
                    lower[i].wait()
                elif accumulate:
                    sums[lo:hi].copy_(out[lo:hi])
                _add(sums, terms, ranges[i], scale, accumulate=accumulate or here > 0)
                if here < last:
                    link.send(sums[lo:hi], here + 1)
                else:
                    link.send(sums[lo:hi], here - 1)
                    out[lo:hi].copy_(sums[lo:hi])

            def down(i: int) -> None:
                totals[i].wait()
                if here > 0:
                    link.send(out[slice(*ranges[i])], here - 1)

            for step in range(len(ranges) + lag):
                if step < len(ranges):
                    up(step)
                if totals and step >= lag:
                    down(step - lag)
            link.finish()
        group.pool.give([sums])


class _Link:
    """Messages to and from the owners of this rank's shard in other groups, in a fixed order."""

    def __init__(self, across: Comm, tag: int, group: ShardGroup) -> None:
        self._across, self._tag, self._group = across, tag, group
        self._sent: list[Any] = []

    def receive(self, into: Tensor, source: int) -> Any:
        return self._start(dist.irecv, into, source)

    def send(self, tensor: Tensor, to: int) -> None:
        self._group.traffic.count("all_reduce", tensor, far=int(self._across.far[to]))
        self._sent.append(self._start(dist.isend, tensor, to))

    def _start(self, operation: Any, tensor: Tensor, peer: int) -> Any:
        one = dist.P2POp(operation, tensor, group=self._across.group, group_peer=peer, tag=self._tag)
        return dist.batch_isend_irecv([one])[0]

    def finish(self) -> None:
        for work in self._sent:
            work.wait()


def _messages(part: int, parts: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of ``parts`` parts of ``part`` elements that are sent at a time."""
    for i in range(parts):
        for lo in range(0, part, MESSAGE):
            yield i * part + lo, i * part + min(lo + MESSAGE, part)


def _add(sums: Tensor, terms: Sequence[Tensor], span: tuple[int, int], scale: float, *, accumulate: bool) -> None:
    step = SUM_CHUNK if sums.device.type == "cpu" else span[1] - span[0]
    for lo in range(*span, step):
        hi = min(lo + step, span[1])
        sum_(sums[lo:hi], [term[lo:hi] for term in terms], scale, accumulate=accumulate)
