r"""Sums over the virtual ranks in one fixed binary tree, on any number of ranks.

::

    leaf        0   1   2   3   4         of five virtual ranks
                 \ /     \ /    |
                  +       +     |        a subtree is summed as soon as its leaves are there
                   \     /      |
                      +         |
                       \       /
                           +             what is left at the end is joined from the right

Leaf ``v`` is the gradient of virtual rank ``v``. A `VirtualRound` says which rank computes which leaf. Leaves arrive in
any order, and the owner of a shard keeps only the sums of complete subtrees. The one invariant: the additions depend on
the number of leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ls_strategy.distributed.comm import SUM_CHUNK, Comm, PendingReduce, cut
from ls_strategy.distributed.rounds import VirtualRound

Number = TypeVar("Number", float, Tensor)
Node = tuple[int, int]
"""A complete subtree: its height, and its number among those of this height, from the left."""


def tree_sum(terms: Sequence[Number]) -> Number:
    """Return the sum of all terms in the order of the tree."""
    sums: dict[Node, Number] = {}
    for leaf, term in enumerate(terms):
        _add(sums, leaf, term)
    return _join(sums)


def _add(sums: dict[Node, Number], leaf: int, term: Number) -> None:
    """Add a leaf to the sums of complete subtrees."""
    height, number = 0, leaf
    while (sibling := (height, number ^ 1)) in sums:
        other = sums.pop(sibling)
        term = term + other if number % 2 == 0 else other + term
        height, number = height + 1, number // 2
    sums[height, number] = term


def _join(sums: dict[Node, Number]) -> Number:
    """Return the sum of all leaves from those of complete subtrees."""
    *others, last = sorted(sums, key=lambda node: node[1] << node[0])
    total = sums[last]
    for node in reversed(others):
        total = sums[node] + total
    return total


def exchange_leaves(
    comm: Comm, full: Tensor | None, now: VirtualRound, *, like: Tensor, of: str, sizes: Sequence[int] | None
) -> PendingReduce:
    """Start sending this rank's leaf to the owners of its shards, and receiving those of this rank's shard. Collective.

    Args:
        comm: the ranks that shard the leaf. With shard groups, the owners in all groups get it.
        full: the leaf, ``(world_size * shard,)``; do not change it until it is summed. None: this rank has none in this
            round, and sends nothing.
        now: the round.
        like: of the shape, dtype and device of a leaf.
        of: its name, for traces.
        sizes: elements of every rank's shard. None: equal shards.

    Traffic:
        The other ranks' shards, by ranks with a leaf.
    """
    every = comm.everyone
    length = like.numel() // comm.world_size if sizes is None else sizes[comm.rank]
    shards = [None] * comm.world_size if full is None else cut(full, comm.world_size, sizes)
    sends = [shards[rank % comm.world_size] for rank in range(every.world_size)]
    parts = [
        None
        if leaf is None
        else sends[rank]
        if rank == every.rank
        else comm.pool.take(length, (like if full is None else full).dtype, like.device)
        for rank, leaf in enumerate(now.leaves)
    ]
    borrowed = [part for rank, part in enumerate(parts) if part is not None and rank != every.rank]
    skip = every.world_size == 1 or like.numel() == 0
    works = () if skip else every.exchange(sends, parts, "reduce_scatter", of)
    return PendingReduce(works, parts, borrowed, comm)  # type: ignore[arg-type]


class TreeSum:
    """This rank's shard of a sum over the virtual ranks, round by round."""

    def __init__(self) -> None:
        self._sums: dict[Node, Tensor] = {}
        """Of complete subtrees, ``(shard,)`` each."""
        self._later: list[tuple[PendingReduce, VirtualRound]] = []
        """Rounds without a leaf of this rank: in flight while it computes the next one."""

    @property
    def sums(self) -> list[Tensor]:
        """The sums between two rounds."""
        return list(self._sums.values())

    def forget(self) -> list[PendingReduce]:
        """Drop the leaves so far, and return those in flight, whose buffers must not be freed while they receive."""
        left = [reducing for reducing, _ in self._later]
        self._sums.clear()
        self._later.clear()
        return left

    def expect(self, reducing: PendingReduce, now: VirtualRound) -> None:
        """Add the leaves of a round before those of the next `add` or `finish`, without waiting for them now."""
        self._later.append((reducing, now))

    def add(self, reducing: PendingReduce, now: VirtualRound, dtype: torch.dtype) -> None:
        """Wait for the leaves of a round that is not the last one, and add them. Sums are of ``dtype``."""
        later, self._later = [*self._later, (reducing, now)], []
        for arriving, of in later:
            leaves = _leaves(arriving, of)
            numel = next(iter(leaves.values())).numel()
            sums: dict[Node, Tensor] = {}
            for lo, hi in _chunks(leaves):
                parts = self._with(leaves, lo, hi, dtype)
                sums = sums or {node: part.new_empty(numel) for node, part in parts.items()}
                for node, part in parts.items():
                    sums[node][lo:hi] = part
            self._sums = sums
            arriving.release()

    def finish(self, reducing: PendingReduce, now: VirtualRound, out: Tensor, *, accumulate: bool) -> None:
        """Add the last round's leaves, and write the average to ``out``, ``(shard,)``, or add it if ``accumulate``."""
        if self._later:
            *before, (last, of) = self._later
            self._later = before
            self.add(last, of, out.dtype)
        leaves = _leaves(reducing, now)
        for lo, hi in _chunks(leaves):
            total = _join(self._with(leaves, lo, hi, out.dtype))
            if accumulate:
                out[lo:hi].add_(total, alpha=1.0 / now.total)
            else:
                torch.mul(total, 1.0 / now.total, out=out[lo:hi])
        self.forget()
        reducing.release()

    def _with(self, leaves: dict[int, Tensor], lo: int, hi: int, dtype: torch.dtype) -> dict[Node, Tensor]:
        """Return the sums of subtrees of elements ``lo`` to ``hi`` with ``leaves`` added."""
        sums = {node: part[lo:hi] for node, part in self._sums.items()}
        for leaf, term in leaves.items():
            _add(sums, leaf, term[lo:hi].to(dtype))
        return sums


class RoundInFlight:
    """The leaves of one round on their way into a sum. It is a `ls_strategy.distributed.reduction.Reduction`."""

    hops = single = False

    def __init__(self, tree: TreeSum, reducing: PendingReduce, now: VirtualRound) -> None:
        self._tree, self._reducing, self._now = tree, reducing, now
        self.is_last = now.is_last

    def advance(self) -> bool:
        """Do nothing: there is one hop."""
        return False

    def collect(self, dtype: torch.dtype) -> None:
        """Add the leaves of a round that is not the last one, see `TreeSum.add`."""
        self._tree.add(self._reducing, self._now, dtype)

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Add the leaves of the last round, see `TreeSum.finish`."""
        self._tree.finish(self._reducing, self._now, out, accumulate=accumulate)


def _leaves(reducing: PendingReduce, now: VirtualRound) -> dict[int, Tensor]:
    """Wait for the leaves of a round, and return them by number."""
    return {leaf: part for leaf, part in zip(now.leaves, reducing.terms(), strict=True) if leaf is not None}


def _chunks(leaves: dict[int, Tensor]) -> list[tuple[int, int]]:
    """Return the ranges that are summed at a time: small ones on the CPU, which stay in its cache."""
    term = next(iter(leaves.values()))
    numel = term.numel()
    step = SUM_CHUNK if term.device.type == "cpu" else max(numel, 1)
    return [(lo, min(lo + step, numel)) for lo in range(0, numel, step)]
