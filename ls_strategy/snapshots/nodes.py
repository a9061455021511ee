"""The nodes of a run: which ranks share a memory, and which node keeps the copies of another one (its buddy)."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ls_strategy.snapshots.memory import Memory, node_id
from ls_strategy.snapshots.server import Peer, Server, addresses

T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """One node, as all ranks know it."""

    id: str
    ranks: list[int]
    """The first one is the lead: it holds the lock, serves the memory and removes old snapshots."""

    addresses: list[str]
    port: int


class Nodes:
    """All nodes of the run, seen from this rank."""

    def __init__(
        self,
        memory: Memory,
        rank: int,
        main_address: str | None,
        exchange: Callable[[Any], list[Any]],
        on_all_ranks: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """Start this node's server and learn the other nodes' addresses. Collective.

        Args:
            memory: of the run, on this node.
            rank: global rank of this process.
            main_address: ``MASTER_ADDR``.
            exchange: gives every rank's value to all ranks, in rank order.
            on_all_ranks: runs its argument on every rank, and raises on all if any rank raised.

        Raises:
            StateError: another run holds the memory of a node.
            CheckpointError: a node cannot reach the one that keeps its copies.
        """
        self.memory, self.rank = memory, rank
        own = node_id(memory.folder.parent)
        secret, ids = zip(*exchange((secrets.token_hex(16), own)), strict=True)
        self._secret = secret[0]
        self.is_lead = ids.index(own) == rank
        self._server: Server | None = None

        def serve() -> None:
            if self.is_lead:
                memory.claim()
                self._server = Server(memory, self._secret)

        on_all_ranks(serve)
        where = exchange((addresses(main_address), self._server.port) if self._server is not None else None)
        self.all = [
            Node(id=each, ranks=[r for r, other in enumerate(ids) if other == each], addresses=place[0], port=place[1])
            for each, place in zip(ids, where, strict=True)
            if place is not None
        ]
        self.own = next(node for node in self.all if node.id == own)
        self._peers = {n.id: Peer(n.addresses, n.port, self._secret) for n in self.all if n.id != own}
        on_all_ranks(lambda: self.buddy.hello() if self.is_lead and self.buddy is not None else None)

    def peer(self, node: str) -> Peer:
        """Return another node."""
        return self._peers[node]

    @property
    def others(self) -> list[Peer]:
        """All nodes but this one."""
        return list(self._peers.values())

    @property
    def buddy(self) -> Peer | None:
        """The node that keeps copies of what this one writes: the next one, in the order of ranks. None if alone."""
        if len(self.all) == 1:
            return None
        return self._peers[self.all[(self.all.index(self.own) + 1) % len(self.all)].id]

    def close(self) -> None:
        """Stop serving, and release the memory."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.memory.release()
