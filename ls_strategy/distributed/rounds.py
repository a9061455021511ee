"""Schedule of virtual ranks: which rank computes which virtual rank (leaf) in which round of one batch.

::

    shares 2 and 6              round   0  1  2  3  4  5
    rank 0 (slow)                       .  .  0  .  .  6       a rank with fewer leaves has the time of several rounds
    rank 1                              2  1  3  4  5  7       for each, and meanwhile receives those of the others

The two invariants: every rank has a leaf in the last round, and leaf 0 is the first one of rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class VirtualRound:
    """One round of forward and backward passes: every rank computes one leaf, or none."""

    leaves: tuple[int | None, ...]
    """The leaf of every rank; None: it computes nothing in this round."""

    total: int
    """Leaves in all rounds: the number of virtual ranks."""

    is_last: bool
    """Whether all leaves are there after this round."""


@dataclass(frozen=True)
class Split:
    """Number of virtual ranks that each rank computes."""

    shares: tuple[int, ...]
    """By rank; each at least 1."""

    @staticmethod
    def even(count: int, ranks: int) -> Split:
        """Return the split of ``count`` virtual ranks over ``ranks`` ranks of the same speed, the first ones with more.

        >>> Split.even(5, 2).shares
        (3, 2)
        """
        return Split(tuple(count // ranks + (rank < count % ranks) for rank in range(ranks)))

    @property
    def count(self) -> int:
        """The number of virtual ranks."""
        return sum(self.shares)

    @cached_property
    def rounds(self) -> list[VirtualRound]:
        """Every round of a batch.

        >>> [now.leaves for now in Split((2, 3)).rounds]
        [(None, 1), (0, 2), (3, 4)]
        """
        number = max(self.shares)
        table: list[list[int | None]] = [[None] * len(self.shares) for _ in range(number)]
        leaf = 0
        for now, row in enumerate(table):
            for rank, share in enumerate(self.shares):
                if (now + 1) * share // number > now * share // number:
                    row[rank] = leaf
                    leaf += 1
        first = next(row[0] for row in table if row[0] is not None)
        exchanged = {0: first, first: 0}  # leaf 0 and the first one of rank 0
        table = [[None if each is None else exchanged.get(each, each) for each in row] for row in table]
        return [VirtualRound(tuple(row), leaf, now == number - 1) for now, row in enumerate(table)]

    def ranks_of(self, rank: int) -> list[int]:
        """Return the virtual ranks of a rank, in the order of their rounds."""
        return [leaf for now in self.rounds if (leaf := now.leaves[rank]) is not None]
