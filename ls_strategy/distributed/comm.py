"""Asynchronous collectives on flat buffers, with a traffic meter.

There are two transports. NCCL uses its own collectives. Other backends (gloo) exchange shards point to point: every
rank sends each shard straight to its owner, and the owner sums in rank order. This is deterministic. gloo's own
reduce-scatter is an all-reduce and a slice: it sends twice the bytes, and its order of summation is not fixed.

Every call here is collective: all ranks of the group make the same calls in the same order.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy._torch import (
    abort_process_groups,
    all_gather_single,
    connections,
    open_sockets,
    reduce_scatter_single,
    set_timeout,
    shut_sockets,
    store_port,
)
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.distributed.watchdog.failures import Failures
from ls_strategy.distributed.watchdog.wait_report import CollectiveEntry, Journal
from ls_strategy.errors import CheckpointError, LSError

T = TypeVar("T")

SUM_CHUNK = 1 << 16
"""Elements summed at a time on the CPU: 256 KiB in fp32, so that the second operand meets a warm L2 cache."""


class Started:
    """Sends and receives in flight. Each is waited for once, because gloo never returns from a second wait.

    After an error every later wait raises it again; after an interrupt the next wait continues with what is left.
    """

    def __init__(self, works: Sequence[Any], entry: CollectiveEntry | None = None, group: Any = None) -> None:
        """Keep what `wait` needs.

        Args:
            works: sends and receives.
            entry: the collective in the journal, for reports of where this rank waits.
            group: the process group of ``works``. With it, they may be dropped before they are done.
        """
        self._left = list(works)
        self._error: Exception | None = None
        self._group = group
        self.entry = entry

    def __del__(self) -> None:
        """Keep what nobody waits for any more: freed in flight, it blocks gloo's connection to that rank for ever.

        An engine that is dropped between a backward pass and its step has reductions in flight, for example.
        """
        if self._left and self._error is None and self._group is not None:
            _dropped.setdefault(self._group, []).append(self)

    def wait(self) -> None:
        """Block until all are done."""
        if self._error is not None:
            raise self._error
        while self._left:
            work = self._left.pop(0)
            try:
                work.wait()
            except Exception as error:
                self._error = error
                raise


_dropped: weakref.WeakKeyDictionary[Any, list[Started]] = weakref.WeakKeyDictionary()
"""By process group: operations in flight that nobody waits for any more. The next exchange over the group does."""


class PendingReduce:
    """A reduce-scatter in flight; `finish` writes its result. It is a `ls_strategy.distributed.reduction.Reduction`."""

    hops = False
    is_last = True

    @property
    def single(self) -> bool:
        """Return whether the average is of one term, and so its value."""
        return self._comm.averaged_ranks == 1

    def advance(self) -> bool:
        """Do nothing: there is one hop."""
        return False

    def collect(self, dtype: torch.dtype) -> None:
        """Raise a RuntimeError: there is one round, which `finish` ends."""
        raise RuntimeError("a reduction of one round has nothing to collect")

    def __init__(
        self,
        works: Sequence[Any],
        parts: Sequence[Tensor],
        borrowed: Sequence[Tensor],
        comm: Comm,
        sent: Tensor | None = None,
    ) -> None:
        """Keep what `finish` needs.

        Args:
            works: the operations in flight.
            parts: the terms of the sum, in rank order; NCCL delivers one part, already summed.
            borrowed: buffers to return to the pool.
            comm: the group.
            sent: what the operations read, which stays allocated until they are done.
        """
        self.works: Sequence[Any] = works
        """The operations that nobody has waited for."""
        self.parts: Sequence[Tensor] = parts
        self._borrowed = borrowed
        self._comm = comm
        self._sent = sent

    def terms(self) -> Sequence[Tensor]:
        """Wait for the terms of the sum and return them; `release` must follow."""
        self._comm.wait(self.works)
        self.works = ()
        return self.parts

    def release(self) -> None:
        """Return the buffers of the terms to the pool."""
        self._comm.pool.give(self._borrowed)
        self.parts = self._borrowed = ()

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Write the average over ranks to ``out``, ``(shard,)``, or add it if ``accumulate``."""
        self._comm.wait(self.works)
        scale = 1.0 / self._comm.world_size
        step = SUM_CHUNK if out.device.type == "cpu" else out.numel()
        if out.numel() <= step:
            sum_(out, self.parts, scale, accumulate=accumulate)
        else:
            for lo in range(0, out.numel(), step):
                terms = [part[lo : lo + step] for part in self.parts]
                sum_(out[lo : lo + step], terms, scale, accumulate=accumulate)
        self._comm.pool.give(self._borrowed)


def sum_(out: Tensor, terms: Sequence[Tensor], scale: float, *, accumulate: bool) -> None:
    """Write the sum of ``terms`` times ``scale`` to ``out``, in the order of the terms, or add it if ``accumulate``."""
    for i, term in enumerate(terms):
        if i or accumulate:
            out.add_(term, alpha=scale)
        elif term.dtype == out.dtype:
            torch.mul(term, scale, out=out)
        else:
            out.copy_(term).mul_(scale)  # cast first: scaling in 16 bit would round twice


class PendingGather:
    """An in-place all-gather in flight."""

    def __init__(self, works: Sequence[Any], comm: Comm) -> None:
        self._works = works
        self._comm = comm

    def wait(self) -> None:
        """Block until every shard has arrived."""
        self._comm.wait(self._works)
        self._works = ()


_NOTHING = nullcontext()

_TRANSPORT = ("onnection", "Broken pipe", "gloo", "NCCL")
"""Words in the errors of a broken connection. Gloo says which call failed, and begins with its own file."""


class Traffic:
    """Counts what this rank sends, per kind of collective: at the send calls, not from a formula."""

    def __init__(self) -> None:
        self.elements: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.bytes_between_nodes: Counter[str] = Counter()
        """Those of `bytes` that went to ranks on other nodes. With NCCL, which chooses the way of the bytes itself: as
        if every shard went straight to its owner."""

    def count(self, kind: str, tensor: Tensor, times: int = 1, *, far: int = 0) -> None:
        """Add ``times`` sends of ``tensor``, ``far`` of them to other nodes."""
        numel = tensor.numel()
        self.count_elements(kind, numel * times, tensor.element_size(), numel * far)

    def count_elements(self, kind: str, numel: int, itemsize: int, far_numel: int = 0) -> None:
        """Add sends of ``numel`` elements of ``itemsize`` bytes each, ``far_numel`` of them to other nodes."""
        self.elements[kind] += numel
        self.bytes[kind] += numel * itemsize
        if spans.SpanRecorder.active is not None:
            spans.sent(kind, numel * itemsize)
        if far_numel:
            self.bytes_between_nodes[kind] += far_numel * itemsize

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.elements.clear()
        self.bytes.clear()
        self.bytes_between_nodes.clear()


class Comm:
    """A process group, and a gloo control group for small decisions that must not wait for the GPU."""

    replica, replicas = 0, 1
    """Which replica of the states this rank holds shards of, and how many there are, see `shard_groups`."""

    node_size: int | None = None
    """Ranks per node. None: all ranks are on one."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
        sockets: set[tuple[int, int]] | None = None,
        failures: Failures | None = None,
    ) -> None:
        """``group=None`` and ``control=None`` stand for a single process without a process group.

        Args:
            group: for tensors.
            control: gloo, for small decisions.
            sockets: sockets of the process groups, which `break_connections` shuts.
            failures: of all ranks, if this group has only some of them.
        """
        self._sockets = set() if sockets is None else sockets
        self._before = open_sockets() - self._sockets
        self.group = group
        self.control = control
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.native = group is not None and dev.moves_device_tensors(group)
        self.failures = failures or Failures(self.rank, self.world_size)
        self.where = self.failures.where
        self.journal, self._control_journal = self._journal_of(group), self._journal_of(control)
        self.traffic = Traffic()
        self.pool = BufferPool()
        self.locate(None)

    def locate(self, node_size: int | None) -> None:
        """Set the number of consecutive global ranks that share a node."""
        self.node_size = node_size
        me, size = self.where.rank, node_size or sys.maxsize
        self.far = tuple(r // size != me // size for r in self.journal.ranks)
        """For every rank of the group, whether it is on another node than this one."""
        self._far_ranks = sum(self.far)
        self.nodes = ranks_by_node(self.journal.ranks, node_size)
        """The ranks of the group, as `ranks_by_node` groups them."""

    @property
    def everyone(self) -> Comm:
        """The ranks over which averages are, also where only some of them shard one replica of the states."""
        return self

    @property
    def averaged_ranks(self) -> int:
        """Return the number of ranks over which `reduce_scatter` averages."""
        return self.world_size * self.replicas

    def _journal_of(self, group: Any) -> Journal:
        if not isinstance(group, dist.ProcessGroup):  # None, or a group without this rank
            return Journal(self.where, [self.where.rank])
        name = group.group_name
        return self.where.journals.get(name) or self.where.journal(name, dist.get_process_group_ranks(group))

    def is_alive(self) -> bool:
        """Return whether the process group still exists."""
        return self.world_size == 1 or (dist.is_initialized() and self.group is dist.group.WORLD)

    def own_open_sockets(self) -> None:
        """Add the sockets opened since construction to those of this run's process groups."""
        self._sockets |= open_sockets() - self._before

    def break_connections(self) -> None:
        """Make every rank that waits for this one, now or later, fail at once. The groups are unusable afterwards."""
        if self.native:  # also those of the mesh: a peer may wait for this rank in any of them
            abort_process_groups(dev.moves_device_tensors)
        shut_sockets(self._sockets, except_port=int(os.environ.get("MASTER_PORT", "0")))

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Replace the RuntimeError of a broken connection by the reported error of the rank that broke it.

        Raises:
            RankFailedError: another rank failed.
            OutOfStepError: no rank could have continued.
        """
        try:
            yield
        except RuntimeError as error:
            self._name_failure(error)
            raise

    def _name_failure(self, error: RuntimeError) -> None:
        of_transport = isinstance(error, dist.DistError) or any(word in str(error) for word in _TRANSPORT)
        if of_transport and not isinstance(error, LSError):
            self.failures.raise_if_any(error)

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for operations in flight.

        Raises:
            RankFailedError: the connection broke, and another rank has reported why.
        """
        if not works:
            return
        entry = works[0].entry if isinstance(works[0], Started) else None
        recorded = spans.SpanRecorder.active is not None
        try:  # `naming_failures` itself would double the time of this call, which a stage-3 unit makes three times
            if entry is None and not recorded:  # nor is a context entered that does nothing
                for work in works:
                    work.wait()
                return
            with entry or _NOTHING, spans.waiting(spans.COMMUNICATION) if recorded else _NOTHING:
                for work in works:
                    work.wait()
        except RuntimeError as error:
            self._name_failure(error)
            raise

    @contextmanager
    def blocking(
        self, kind: str, of: str = "", *, group: Any = None, source: int | None = None
    ) -> Generator[None, None, None]:
        """Surround a blocking collective of torch.

        Args:
            kind: of the collective.
            of: what it moves.
            group: None: `self.group`.
            source: rank within the group that alone sends.

        Raises:
            RankFailedError: the connection broke, and another rank has reported why.
        """
        journal = self.journal
        if group is not None:
            journal = self._control_journal if group is self.control else self._journal_of(group)
        entry = journal.enter(kind, of, None if source is None else (journal.ranks[source],))
        active = spans.SpanRecorder.active
        with entry, _NOTHING if active is None else spans.waiting(spans.COMMUNICATION, of or kind):
            try:
                yield
            except RuntimeError as error:
                self._name_failure(error)
                raise

    def exchange(
        self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], kind: str, of: str
    ) -> Sequence[Any]:
        """Start sending ``sends[r]`` to every other rank ``r`` and receiving ``receives[r]`` from it; None: nothing.

        All of ``sends`` are of one dtype.
        Different operations are never matched with each other: their tags differ, so both wait.
        """
        if _dropped and self.group is not None:
            self.wait(_dropped.pop(self.group, ()))
        entry = self.journal.enter(kind, of)
        tag, numel, far, itemsize = entry.tag, 0, 0, 0
        operations: list[dist.P2POp] = []
        for distance in range(1, self.world_size):
            to = (self.rank + distance) % self.world_size
            frm = (self.rank - distance) % self.world_size
            outgoing, incoming = sends[to], receives[frm]
            if outgoing is not None:
                numel += outgoing.numel()
                far += outgoing.numel() * self.far[to]
                itemsize = outgoing.element_size()
                operations.append(dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=to, tag=tag))
            if incoming is not None:
                operations.append(dist.P2POp(dist.irecv, incoming, group=self.group, group_peer=frm, tag=tag))
        if itemsize:
            self.traffic.count_elements(kind, numel, itemsize, far)
        with entry:
            try:  # fails here or in the wait if a peer has left
                works = dist.batch_isend_irecv(operations) if operations else []
            except RuntimeError as error:
                self._name_failure(error)
                raise
        if spans.SpanRecorder.active is not None:
            works = spans.followed(works, f"{kind} {of}", numel * itemsize)
        return [Started(works, entry, self.group)]

    def all_gather(
        self, full: Tensor, of: str = "", sizes: Sequence[int] | None = None, mine: Tensor | None = None
    ) -> PendingGather:
        """Complete ``full``, ``(world_size * shard,)``, in which this rank has filled its own shard.

        Args:
            full: any dtype.
            of: its name, for traces.
            sizes: elements of every rank's shard, at least 1 each. None: equal shards. With sizes, NCCL broadcasts from
                every rank in one group of calls.
            mine: this rank's shard, a view of ``full``, if there is one.

        Traffic:
            ``(world_size - 1) * shard`` elements sent per rank.
        """
        if self.world_size == 1 or full.numel() == 0:
            return PendingGather((), self)
        if self.native:
            mine = self._own(full, sizes) if mine is None else mine
            self.journal.enter("all_gather", of)
            numel = mine.numel()
            sent, far = numel * (self.world_size - 1), numel * self._far_ranks
            self.traffic.count_elements("all_gather", sent, mine.element_size(), far)
            if sizes is None:
                work = all_gather_single(full, mine, group=self.group, async_op=True)
            else:
                work = dist.all_gather(list(full.split(list(sizes))), mine, group=self.group, async_op=True)
            works: Sequence[Any] = (work,)
            if spans.SpanRecorder.active is not None:
                works = spans.followed(works, f"all_gather {of}", mine.nbytes * (self.world_size - 1))
            return PendingGather(works, self)
        shards = cut(full, self.world_size, sizes)
        return PendingGather(self.exchange([shards[self.rank]] * self.world_size, shards, "all_gather", of), self)

    def reduce_scatter(
        self,
        full: Tensor,
        dtype: torch.dtype | None = None,
        of: str = "",
        sizes: Sequence[int] | None = None,
    ) -> PendingReduce:
        """Average ``full``, ``(world_size * shard,)``, over ranks; this rank keeps its shard.

        Args:
            full: any floating dtype; do not change it before `PendingReduce.finish`.
            dtype: of the sum if the transport sums (NCCL). The exchange sends ``full`` as it is and sums in the
                result's dtype, which costs no bytes.
            of: its name, for traces.
            sizes: elements of every rank's shard, at least 1 each. None: equal shards. With sizes, NCCL reduces to
                every rank in one group of calls.

        Traffic:
            The other ranks' shards: ``(world_size - 1) * shard`` elements sent per rank with equal shards.
        """
        if self.world_size == 1 or full.numel() == 0:
            return PendingReduce((), [self._own(full, sizes)], (), self)
        if self.native:
            numel = full.numel()
            shard = numel // self.world_size if sizes is None else sizes[self.rank]
            self.journal.enter("reduce_scatter", of)
            # `to` takes 8 us of the host also where it has nothing to do, in a place that every unit passes.
            wire = full if dtype in (None, full.dtype) else full.to(dtype)
            out = self.pool.take(shard, wire.dtype, wire.device)
            far = self._far_ranks * numel // self.world_size  # of equal shards
            self.traffic.count_elements("reduce_scatter", numel - shard, wire.element_size(), far)
            if sizes is None:
                work = reduce_scatter_single(out, wire, group=self.group, async_op=True)
            else:
                work = dist.reduce_scatter(out, list(wire.split(list(sizes))), group=self.group, async_op=True)
            works: Sequence[Any] = (work,)
            if spans.SpanRecorder.active is not None:
                works = spans.followed(works, f"reduce_scatter {of}", wire.nbytes - out.nbytes)
            return PendingReduce(works, [out], [out], self, sent=wire)
        shards = cut(full, self.world_size, sizes)
        mine = shards[self.rank]
        parts = [
            mine if r == self.rank else self.pool.take(mine.numel(), mine.dtype, mine.device)
            for r in range(self.world_size)
        ]
        works = self.exchange(shards, parts, "reduce_scatter", of)
        return PendingReduce(works, parts, [p for r, p in enumerate(parts) if r != self.rank], self)

    def _own(self, full: Tensor, sizes: Sequence[int] | None) -> Tensor:
        """Return this rank's shard, a view of ``full``, without making a view of every other rank's."""
        if sizes is not None or full.numel() == 0:
            return cut(full, self.world_size, sizes)[self.rank]
        shard = full.numel() // self.world_size
        return full.narrow(0, self.rank * shard, shard)

    def sendable(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or a copy on the device if it is in host memory, which NCCL refuses."""
        return tensor.to(dev.current()) if self.native and dev.is_host(tensor.device) else tensor

    def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` with that of rank ``source`` of the group. Blocking."""
        if self.world_size > 1 and tensor.numel():
            assert self.group is not None
            if self.rank == source:
                self.traffic.count("broadcast", tensor, self.world_size - 1, far=sum(self.far))
            with self.blocking("broadcast", source=source):
                dist.broadcast(tensor, dist.get_global_rank(self.group, source), group=self.group)

    def agree(self, values: Tensor, op: Any = dist.ReduceOp.MAX) -> Tensor:
        """All-reduce a small CPU tensor over the control group, in place. Blocking; never waits for the GPU."""
        if self.world_size > 1 and values.numel():
            self.traffic.count_elements("control", values.numel(), values.element_size())
            with self.blocking("all_reduce", "control", group=self.control):
                dist.all_reduce(values, op=op, group=self.control)
        return values

    def reduce_numbers(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """All-reduce a few numbers and return them, on the device if the back end reduces there. Collective."""
        if not self.native:
            return self.agree(value, op)
        value = self.sendable(value)
        if self.world_size > 1:  # on the device: the host does not wait
            self.traffic.count("control", value)
            with self.blocking("all_reduce", "control"):
                dist.all_reduce(value, op=op, group=self.group)
        return value

    def exchange_objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order. Pickled: for set-up and checkpoints, not for training steps."""
        if self.world_size == 1:
            return [value]
        result: list[Any] = [None] * self.world_size
        with self.blocking("all_gather", "objects", group=self.control):
            dist.all_gather_object(result, value, group=self.control)
        return result

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run ``work``, which must not be collective, on every rank. If it fails on any rank, raise on all. Collective.

        Raises:
            CheckpointError: on the ranks where ``work`` succeeded; the others raise their own error.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        messages = self.exchange_objects(None if error is None else f"rank {self.rank}: {error}")
        if error is not None:
            raise error
        for message in messages:
            if message is not None:
                raise CheckpointError(message)
        return cast("T", result)


def ranks_by_node(ranks: Sequence[int], node_size: int | None) -> Sequence[Sequence[int]]:
    """Return the places in ``ranks``, global ones, of those on each node; all together if that is no hierarchy.

    It is one if there are several nodes, each with the same number of the ranks, and more than one.

    >>> ranks_by_node([4, 6, 8, 10], 4), ranks_by_node([4, 6, 8], 4), ranks_by_node([4, 8], 4)
    ([[0, 1], [2, 3]], [[0, 1, 2]], [[0, 1]])
    """
    nodes: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        nodes.setdefault(rank // (node_size or sys.maxsize), []).append(place)
    counts = {len(node) for node in nodes.values()}
    is_hierarchy = len(nodes) > 1 and len(counts) == 1 and counts != {1}
    return list(nodes.values()) if is_hierarchy else [list(range(len(ranks)))]


def cut(full: Tensor, ranks: int, sizes: Sequence[int] | None) -> Sequence[Tensor]:
    """Return the shards, views of ``full``."""
    if full.numel() == 0:
        return [full] * ranks
    return full.chunk(ranks) if sizes is None else full.split(list(sizes))


def make_comm(before: set[tuple[int, int]] | None = None, timeout: timedelta | None = None) -> Comm:
    """Return the communicator over the default process group, or of one process without a group. Collective.

    Args:
        before: sockets that were open before the default process group was created. None: it is not known which.
        timeout: of the collectives of all groups made here, now and later. None: torch's default.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Comm(None, None)
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    is_known, opened = is_shared(world), open_sockets() if before is None else before
    shared = _shared_by(world)
    shared.limit(timeout)
    control = process_group("control", backend=dev.host_backend())
    assert isinstance(control, dist.ProcessGroup)
    shared.sockets |= open_sockets() - opened
    comm = Comm(world, control, shared.sockets, shared.failures)
    if before is None and not is_known:
        # Add those that connect two ranks: of groups that others have made. Both ends of such a connection are among
        # the ranks' own addresses. Those of the rendezvous store, which reports failures, and those to anybody else,
        # such as a logger's server, are left out.
        known, store = connections(opened), store_port()
        ends = {own for each in comm.exchange_objects([own for own, _ in known.values()]) for own in each}
        between = (at for at, (own, other) in known.items() if other in ends and store not in (own[1], other[1]))
        shared.sockets.update(between)
    return comm


@dataclass
class _GroupState:
    """State shared by the strategies that use one default process group, one after the other."""

    failures: Failures
    sockets: set[tuple[int, int]] = field(default_factory=set)
    groups: dict[tuple[str, tuple[int, ...] | None, str | None], Any] = field(default_factory=dict)
    timeout: timedelta | None = None

    def limit(self, timeout: timedelta | None) -> None:
        """Set the timeout of the groups of earlier strategies, too."""
        self.timeout = timeout
        for group in self.groups.values():
            if timeout is not None and isinstance(group, dist.ProcessGroup):
                set_timeout(group, timeout)


_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = weakref.WeakKeyDictionary()
"""By default process group. The package's only process-wide state: torch keeps every group, with its threads and
connections, until the default group ends, so new groups for every fit would accumulate."""


def _shared_by(world: dist.ProcessGroup) -> _GroupState:
    if world not in _shared:
        _shared[world] = _GroupState(Failures(dist.get_rank(), dist.get_world_size()))
    return _shared[world]


def is_shared(world: Any) -> bool:
    """Return whether a strategy of this package has made its communicator over default process group ``world``."""
    return world in _shared


def process_group(purpose: str, ranks: Sequence[int] | None = None, *, backend: str | None = None) -> Any:
    """Return a process group for one purpose, created on the first call. Collective over all ranks then.

    Args:
        purpose: groups of different purposes never share a connection, so their operations need no common order.
        ranks: global ranks. None: all.
        backend: None: that of the default group.

    Returns:
        The group; torch's `GroupMember.NON_GROUP_MEMBER` on ranks that are not in it.
    """
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    shared = _shared_by(world)
    groups = shared.groups
    key = (purpose, None if ranks is None else tuple(ranks), backend)
    if key not in groups:
        groups[key] = dist.new_group(None if ranks is None else list(ranks), timeout=shared.timeout, backend=backend)
    return groups[key]
