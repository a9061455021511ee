"""A round that the hub has decided, and what each rank hears of it. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ls_strategy.extras.islands.fingerprint import disagreement
from ls_strategy.extras.islands.messages import Exchange, State

AnyRequest = TypeVar("AnyRequest", Exchange, State)


@dataclass
class Reply:
    """Reply of the hub to one rank: a line of JSON, and bytes."""

    line: dict[str, Any]
    parts: Sequence[bytes | memoryview] = ()


@dataclass
class Message(Generic[AnyRequest]):
    """Message of one rank to the hub: a checked request, and bytes."""

    request: AnyRequest
    data: bytes | memoryview


@dataclass
class Round:
    """A round that is decided."""

    number: int
    run: str | None
    ends: bool  # whether it is the last one of its run
    messages: dict[int, dict[int, Message[Exchange]]]  # by island and rank: of the islands that are in it
    joiners: list[int]
    problem: str | None
    # By island and rank: the islands whose contribution to the rank's shards cannot be right.
    verdicts: dict[int, dict[int, frozenset[int]]] = field(default_factory=dict)
    # By rank: what the last round has led to, for islands that were not in it.
    states: dict[int, Message[State]] = field(default_factory=dict)

    def reply(self, request: Exchange) -> Reply:
        """Return the bytes of the other islands, and the steps of all of them: nothing else that they have sent."""
        island, rank, islands = request.island, request.rank, sorted(self.messages)
        problem = self.problem if island in self.messages else self._of_others(request)
        if problem is not None:
            return Reply({"error": problem})
        others = [self.messages[i][rank].data for i in islands if i != island]
        line = {
            "what": "done",
            "islands": [[i, self.messages[i][rank].request.steps] for i in islands],
            "joiners": self.joiners if island == islands[0] else [],
            "lengths": [len(data) for data in others],
        }
        return Reply(line, others)

    def _of_others(self, request: Exchange) -> str | None:
        """Return why this round is nothing for an island that was not in it."""
        first = min(self.messages)
        sent = self.messages[first].get(request.rank)
        if sent is None:
            return f"Got rank {request.rank}, but the other islands have {len(self.messages[first])} ranks."
        return disagreement({first: {0: sent.request.fingerprint}, request.island: {0: request.fingerprint}})
