"""The nodes of a run: which ranks share a memory, and which node keeps the copies of another one (its buddy)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ls_strategy.errors import CheckpointError
from ls_strategy.extras.snapshots.memory import Memory, node_id
from ls_strategy.extras.snapshots.server import Peer, Server, addresses, one_address

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """One node, as all ranks know it."""

    id: str
    ranks: list[int]  # the first one is the lead: it holds the lock, serves the memory and removes old snapshots
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
        self._secret, self._ids = secret[0], ids
        self.is_lead = ids.index(own) == rank
        self._server: Server | None = None
        on_all_ranks(lambda: memory.claim() if self.is_lead else None)
        if len(set(ids)) == 1:
            self._know([([], 0), *[None] * (len(ids) - 1)], own)  # nobody else asks: nothing listens
            return
        there = exchange(addresses(main_address) if self.is_lead else None)
        self._serve(one_address(there[rank], [a for a in there if a is not None]), there[rank], exchange, on_all_ranks)
        if not all(exchange(self._reaches_buddy())):
            _LOG.warning("A node is not reached at the address that is likeliest: snapshots are served at all of them.")
            self._serve("", there[rank], exchange, on_all_ranks)
        on_all_ranks(lambda: self.buddy.hello() if self.is_lead and self.buddy is not None else None)

    def _serve(
        self,
        host: str,
        known: list[str] | None,
        exchange: Callable[[Any], list[Any]],
        on_all_ranks: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """Let the lead listen at ``host``, everywhere if it is empty, and learn where the others do. Collective."""
        self._stop()

        def listen() -> None:
            if self.is_lead:
                self._server = Server(self.memory, self._secret, host)

        on_all_ranks(listen)
        here = [host] if host else known
        self._know(exchange(None if self._server is None else (here, self._server.port)), self._ids[self.rank])

    def _know(self, where: list[tuple[list[str], int] | None], own: str) -> None:
        self.all = [
            Node(
                id=each,
                ranks=[r for r, other in enumerate(self._ids) if other == each],
                addresses=place[0],
                port=place[1],
            )
            for each, place in zip(self._ids, where, strict=True)
            if place is not None
        ]
        self.own = next(node for node in self.all if node.id == own)
        self._peers = {n.id: Peer(n.addresses, n.port, self._secret) for n in self.all if n.id != own}

    def _reaches_buddy(self) -> bool:
        if self.is_lead and self.buddy is not None:
            try:
                self.buddy.hello()
            except (CheckpointError, OSError):
                return False
        return True

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
        self._stop()
        self.memory.release()

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
