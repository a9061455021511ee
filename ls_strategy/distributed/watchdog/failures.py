"""Reports of failed ranks, through the rendezvous store of the process group, so that every rank raises the error."""

from __future__ import annotations

import time

from ls_strategy._torch import default_store
from ls_strategy.distributed.watchdog.wait_report import Whereabouts
from ls_strategy.errors import OutOfStepError, RankFailedError


class Failures:
    """Writes and reads reports of failed ranks in the rendezvous store. One per default process group."""

    def __init__(self, rank: int, world_size: int) -> None:
        """``round`` distinguishes failures that all ranks survived."""
        self.rank = rank
        self.world_size = world_size
        self.where = Whereabouts(rank, world_size)
        self.round = 0
        self.stopped = False
        """Whether this rank has stopped because of another rank's report."""

    def _key(self, rank: int) -> str:
        return f"ls_strategy/failure/{self.round}/{rank}"

    def announce(self, error: BaseException, *, patience_s: float, place: str = "") -> bool:
        """Report that this rank failed, and wait for the other ranks to fail too.

        Args:
            error: why this rank failed.
            patience_s: seconds to wait for the others.
            place: what this rank has in flight.

        Returns:
            True if every rank failed within ``patience_s`` at the same place: none waits, and the group stays usable.
            Operations that only some ranks have in flight would be matched with operations of the next run.
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
        except Exception:  # the rank with the store has ended; the first error matters more
            return False
        return False

    def raise_if_any(self, error: BaseException) -> None:
        """Raise another rank's report, if there is one, instead of the bare connection error.

        Raises:
            RankFailedError: with the other rank's number and message.
            OutOfStepError: the connection was closed because no rank could have continued.
        """
        try:
            verdict = self.where.read_verdict()
            store = default_store()
            failed = [r for r in range(self.world_size) if r != self.rank and store.check([self._key(r)])]
            message = store.get(self._key(failed[0])).decode(errors="replace") if failed else None
            if not verdict and not failed:
                verdict = self.where.explain_ended()
        except Exception:  # without a store there are no reports
            verdict, message = self.where.explain_ended(), None
        self.stopped = self.stopped or bool(verdict) or message is not None
        if verdict:
            raise OutOfStepError(verdict) from error
        if message is not None:
            raise RankFailedError(f"this rank stops because another one failed: {message}") from error
