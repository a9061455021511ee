"""Finds out whether all ranks have come to the same place, without a wait that could last for ever.

User code decides whether a rank comes at all: it may call something on one rank only, and another rank may wait for
that rank in a barrier. So ranks do not meet in a collective. They write to the rendezvous store, and the first decision
counts for all of them:

=============================================  ======================================================================
what a rank sees                               its decision
=============================================  ======================================================================
it is the last to come, and all want the same  together
it is the last to come, and one wants another  alone
another rank has left                          alone
some rank does not come for `PATIENCE_S`       alone
=============================================  ======================================================================

The one invariant: if one rank gets the answer "together", all ranks get it.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress

from ls_strategy._torch import default_store
from ls_strategy.distributed.comm import Comm

PATIENCE_S = 30.0
"""Seconds that ranks which came wait for the others. Only imports and what the user's code does make a difference."""

_LOOK_EVERY_S = (0.001, 0.1)
"""Seconds between two reads of the store: at first, and at most."""

_ROOT = "ls_strategy/meeting"


class Meeting:
    """A piece of the user's code in which ranks may meet. Every rank makes its own, and leaves it at the end."""

    def __init__(self, comm: Comm) -> None:
        """``comm``: over all ranks, more than one."""
        self._world_size = comm.world_size
        self._rank = comm.rank
        self._store = default_store()
        root = f"{_ROOT}/{comm.failures.round}"  # after a failure on some ranks, all count from one again
        number = self._store.add(f"{root}/rank {comm.rank}", 1)  # in the store, which outlives a strategy
        self._key = f"{root}/{number}"
        self._calls = 0

    def is_complete(self, what: str) -> bool:
        """Return whether all ranks are in the same call of this function with the same ``what``.

        The answer is the same on all ranks that call. A rank may wait for others up to the limit, but not for ever.
        """
        self._calls += 1
        key = f"{self._key}/{self._calls}"
        self._store.set(f"{key}/{self._rank}", hashlib.sha256(what.encode()).hexdigest())
        if self._store.add(f"{key}/count", 1) == self._world_size:
            wanted = set(self._store.multi_get([f"{key}/{rank}" for rank in range(self._world_size)]))
            return self._decide(key, together=len(wanted) == 1)
        deadline = time.monotonic() + PATIENCE_S
        pause, longest = _LOOK_EVERY_S
        while not self._store.check([f"{key}/decision"]):
            if self._store.check([f"{self._key}/left"]) or time.monotonic() > deadline:
                return self._decide(key, together=False)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self._store.get(f"{key}/decision") == b"together"

    def _decide(self, key: str, *, together: bool) -> bool:
        """Propose a decision, and return the one that was first."""
        first = self._store.compare_set(f"{key}/decision", "", "together" if together else "alone")
        return first == b"together"

    def leave(self) -> None:
        """Let the others wait for this rank no longer."""
        with suppress(RuntimeError):  # without a store nobody waits, and another error matters more
            self._store.set(f"{self._key}/left", "")
