"""Which nodes to leave out: those of ranks that `CorruptionCheck` has found wrong twice.

A count belongs to a place, a node and one of its ranks, because ranks have other numbers on other nodes. Every node
keeps all counts in its memory, so they outlive a restart and the loss of nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ls_strategy.errors import StateError
from ls_strategy.extras.callbacks import elastic_errors
from ls_strategy.extras.callbacks.corruption_check import MOST_FAILURES
from ls_strategy.extras.snapshots.nodes import Node, Nodes

NOTE = "failures"  # the file in the memory of a run with how often each place was wrong


class LeftOutError(StateError):
    """Ends all ranks, so that the run goes on without some nodes."""

    def __init__(self, text: str, ranks: list[int]) -> None:
        """``ranks``: of the nodes that are left out."""
        super().__init__(text)
        self.ranks = ranks


class Failures:
    """How often each place of the run was wrong. The same on all ranks."""

    def __init__(self, nodes: Nodes, exchange: Callable[[Any], list[Any]]) -> None:
        """Read what was noted before. Collective.

        Args:
            nodes: of the run.
            exchange: gives every rank's value to all ranks.
        """
        self._nodes, self._folder = nodes, nodes.memory.folder
        launcher = elastic_errors.launcher()
        ends = launcher is not None and not elastic_errors.is_meeting_place(launcher, os.environ)
        everyones = exchange((ends, _noted(self._folder)))
        self._can_end = [each[0] for each in everyones]
        self._counts: dict[str, int] = {}
        for _, counts in everyones:
            self._counts |= {place: max(count, self._counts.get(place, 0)) for place, count in counts.items()}

    def by_rank(self) -> dict[int, int]:
        """Return the counts of today's ranks that were wrong before."""
        found = {rank: self._counts.get(self._place(rank), 0) for node in self._nodes.all for rank in node.ranks}
        return {rank: count for rank, count in found.items() if count}

    def note(self, failures: Mapping[int, int]) -> list[int]:
        """Note counts that have grown. Return the ranks of nodes to leave out now; none if the run needs them."""
        new = {self._place(rank): count for rank, count in failures.items()}
        grown = {place for place, count in new.items() if count > self._counts.get(place, 0)}
        self._counts |= {place: new[place] for place in grown}
        if self._nodes.is_lead:
            file = self._folder / f"{NOTE}.tmp"
            file.write_text(json.dumps(self._counts))
            file.replace(self._folder / NOTE)
        wrong = [rank for rank, count in failures.items() if count >= MOST_FAILURES and self._place(rank) in grown]
        leaving = [node for node in self._nodes.all if any(rank in node.ranks for rank in wrong)]
        if len(leaving) == len(self._nodes.all):
            return []
        ranks = [rank for node in leaving for rank in node.ranks]
        return ranks if all(self._can_end[rank] for rank in ranks) else []

    def _place(self, rank: int) -> str:
        node = self._node(rank)
        return f"{node.id}/{node.ranks.index(rank)}"

    def _node(self, rank: int) -> Node:
        return next(node for node in self._nodes.all if rank in node.ranks)


def _noted(folder: Path) -> dict[str, int]:
    """Return the counts in a node's memory; nothing if the file is not there, or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(place): int(count) for place, count in json.loads((folder / NOTE).read_text()).items()}
    return {}
