"""When collectives end that cannot be asked."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

OWN_THREADS = "ls_strategy"
"""How names of threads begin that work beside the one that trains."""


class Followed:
    """Works that another thread waits for, or who needs them, whoever comes first."""

    def __init__(self, works: Sequence[Any], on_end: Callable[[float], None]) -> None:
        """See `Stamper.follow`."""
        self._works: Sequence[Any] = works
        self._on_end = on_end
        self._claimed = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self) -> None:
        """Wait for them and tell when they end, unless that is somebody's already."""
        if not self._claimed.acquire(blocking=False):
            return
        try:
            for work in self._works:
                work.wait()
        except BaseException as error:  # for who waits for the result
            self._error = error
        self._on_end(time.perf_counter())
        self._works = ()
        self._done.set()

    def wait(self) -> None:
        """Block until the works are done; raises what they raise."""
        self.finish()
        self._done.wait()
        if self._error is not None:
            raise self._error


class Stamper:
    """Tells when works end that cannot be asked: gloo's sends and receives say so only to who waits for them.

    One thread waits for them in the order in which they were started. What is needed before it is its turn is waited
    for by who needs it, so that nothing is held up by what came before.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._queue: queue.SimpleQueue[Followed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}-stamps", daemon=True)
        self._thread.start()

    def follow(self, works: Sequence[Any], on_end: Callable[[float], None]) -> Followed:
        """Call ``on_end`` with the moment at which ``works`` end, ``time.perf_counter``, on any thread."""
        followed = Followed(works, on_end)
        self._queue.put(followed)
        return followed

    def close(self) -> None:
        """End the thread when it has nothing left to wait for."""
        self._queue.put(None)
        self._thread.join(timeout=0.2)  # after a failure it may wait for what never comes, until connections break

    def _run(self) -> None:
        while (followed := self._queue.get()) is not None:
            followed.finish()
