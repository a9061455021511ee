r"""Sums over the virtual ranks in one fixed binary tree, on any number of ranks.

::

    leaf        0   1   2   3   4         of five virtual ranks
                 \ /     \ /    |
                  +       +     |        a subtree is summed as soon as its leaves are there
                   \     /      |
                      +         |
                       \       /
                           +             what is left at the end is joined from the right

Leaf ``v`` is the gradient of virtual rank ``v``. With ``R`` ranks, leaf ``v`` is computed by rank ``v % R`` in round
``v // R``, so every round brings the next leaves in order, and the owner of a shard keeps only the sums of complete
subtrees: at most log2 of the number of leaves. The one invariant: the additions depend on the number of leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ls_strategy.distributed.pending import SUM_CHUNK, PendingReduce

Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True)
class Round:
    """One round of backward passes: every rank computes one leaf, or none."""

    first: int
    """The leaf of rank 0."""

    leaves: int
    """Leaves in all rounds: the number of virtual ranks."""

    ranks: int
    """The number of ranks."""

    @property
    def count(self) -> int:
        """The number of leaves in this round; they are of ranks 0, 1, ..."""
        return min(self.ranks, self.leaves - self.first)

    @property
    def is_last(self) -> bool:
        """Whether all leaves are there after this round."""
        return self.first + self.count == self.leaves

    @staticmethod
    def all(leaves: int, ranks: int) -> list[Round]:
        """Return every round.

        >>> [(r.first, r.count, r.is_last) for r in Round.all(5, 2)]
        [(0, 2, False), (2, 2, False), (4, 1, True)]
        """
        return [Round(first, leaves, ranks) for first in range(0, leaves, ranks)]


def tree_sum(terms: Sequence[Number]) -> Number:
    """Return the sum of all terms in the order of the tree."""
    levels: list[tuple[int, Number]] = []
    for term in terms:
        _push(levels, term)
    return _join(levels)


def _push(levels: list[tuple[int, Number]], term: Number) -> None:
    """Add the next leaf to the sums of complete subtrees, each with its height, highest first."""
    level = 0
    while levels and levels[-1][0] == level:
        term = levels.pop()[1] + term
        level += 1
    levels.append((level, term))


def _join(levels: Sequence[tuple[int, Number]]) -> Number:
    *rest, (_, total) = levels
    for _, part in reversed(rest):
        total = part + total
    return total


class TreeSum:
    """This rank's shard of a sum over the virtual ranks, round by round."""

    def __init__(self) -> None:
        """Begin without a leaf."""
        self._levels: list[tuple[int, Tensor]] = []
        """Height and sum of the complete subtrees, ``(shard,)`` each, highest first."""

    @property
    def sums(self) -> list[Tensor]:
        """The sums between two rounds."""
        return [part for _, part in self._levels]

    def forget(self) -> None:
        """Drop the leaves so far."""
        self._levels.clear()

    def add(self, reducing: PendingReduce, now: Round, dtype: torch.dtype) -> None:
        """Wait for the leaves of a round that is not the last one, and add them. Sums are of ``dtype``."""
        terms = reducing.terms()[: now.count]
        sums: list[tuple[int, Tensor]] = []
        numel = terms[0].numel()
        for lo, hi in _chunks(terms[0]):
            parts = self._with(terms, lo, hi, dtype)
            if not sums:
                sums = [(level, part.new_empty(numel)) for level, part in parts]
            for (_, full), (_, part) in zip(sums, parts, strict=True):
                full[lo:hi] = part
        self._levels = sums
        reducing.release()

    def close(self, reducing: PendingReduce, now: Round) -> LastRound:
        """Return what adds the last round's leaves and gives the average."""
        return LastRound(self, reducing, now)

    def _finish(self, reducing: PendingReduce, now: Round, out: Tensor, *, accumulate: bool) -> None:
        terms = reducing.terms()[: now.count]
        for lo, hi in _chunks(terms[0]):
            total = _join(self._with(terms, lo, hi, out.dtype))
            if accumulate:
                out[lo:hi].add_(total, alpha=1.0 / now.leaves)
            else:
                torch.mul(total, 1.0 / now.leaves, out=out[lo:hi])
        self.forget()
        reducing.release()

    def _with(self, terms: Sequence[Tensor], lo: int, hi: int, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        """Return the sums of subtrees of elements ``lo`` to ``hi`` with the leaves ``terms`` added."""
        levels = [(level, part[lo:hi]) for level, part in self._levels]
        for term in terms:
            _push(levels, term[lo:hi].to(dtype))
        return levels


class LastRound:
    """The last round of a sum: takes the place of a `PendingReduce`."""

    def __init__(self, tree: TreeSum, reducing: PendingReduce, now: Round) -> None:
        self._tree, self._reducing, self._now = tree, reducing, now

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Write the average over virtual ranks to ``out``, ``(shard,)``, or add it if ``accumulate``."""
        self._tree._finish(self._reducing, self._now, out, accumulate=accumulate)


def _chunks(term: Tensor) -> list[tuple[int, int]]:
    """Return the ranges that are summed at a time: small ones on the CPU, which stay in its cache."""
    numel = term.numel()
    step = SUM_CHUNK if term.device.type == "cpu" else max(numel, 1)
    return [(lo, min(lo + step, numel)) for lo in range(0, numel, step)]
