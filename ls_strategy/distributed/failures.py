"""Who failed, and the same error on every rank: word is left in the rendezvous store of the process group."""

from __future__ import annotations

import time

from ls_strategy._compat import default_store
from ls_strategy.distributed.wait_report import Whereabouts
from ls_strategy.errors import OutOfStepError, RankFailedError


class Failures:
    """Who failed, left in the rendezvous store of the process group, so that no rank waits for one that is gone."""

    def __init__(self, rank: int, world_size: int) -> None:
        """One per process; ``round`` tells apart failures that all ranks survived."""
        self.rank = rank
        self.world_size = world_size
        self.where = Whereabouts(rank, world_size)
        self.round = 0
        self.told = False
        """Whether this rank has stopped because another one failed."""

    def _key(self, rank: int) -> str:
        return f"ls_strategy/failure/{self.round}/{rank}"

    def announce(self, error: BaseException, *, patience_s: float, place: str = "") -> bool:
        """Leave word that this rank failed, and see whether all others fail too.

        Args:
            error: why.
            patience_s: how long to wait for the others.
            place: what this rank has in flight.

        Returns:
            True if every rank failed within ``patience_s`` seconds at the same place: nobody waits, and the group may
            live on. What only some ranks have in flight would meet operations of the next run.
        """
        try:
            store = default_store()
            store.set(f"{self._key(self.rank)}/place", place)
            store.set(self._key(self.rank), f"rank {self.rank}: {type(error).__name__}: {error}")
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if store.check([self._key(r) for r in range(self.world_size)]):
                    places = store.multi_get([f"{self._key(r)}/place" for r in range(self.world_size)])
                    self.round += 1
                    return len(set(places)) == 1
                time.sleep(0.05)
        except Exception:  # the store is gone with the rank that held it; the first error matters more
            return False
        return False

    def raise_if_any(self, error: BaseException) -> None:
        """If another rank left word, raise that instead of the bare connection error.

        Raises:
            RankFailedError: with the other rank's number and message.
            OutOfStepError: the connection was ended because no rank could have gone on.
        """
        try:
            verdict = self.where.told()
            store = default_store()
            failed = [r for r in range(self.world_size) if r != self.rank and store.check([self._key(r)])]
            message = store.get(self._key(failed[0])).decode(errors="replace") if failed else None
            if not verdict and not failed:
                verdict = self.where.deserted()
        except Exception:  # no store, no word
            verdict, message = self.where.deserted(), None
        self.told = self.told or bool(verdict) or message is not None
        if verdict:
            raise OutOfStepError(verdict) from error
        if message is not None:
            raise RankFailedError(f"this rank stops because another one failed: {message}") from error
