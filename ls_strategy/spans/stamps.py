"""End times of collectives that have no completion query."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ls_strategy import device as dev

OWN_THREADS = "ls_strategy"
"""Prefix of the names of this package's background threads."""


class Followed:
    """Works that are waited for by the stamper's thread, or by the thread that needs them, whichever is first."""

    def __init__(self, works: Sequence[Any], on_end: Callable[[float], None]) -> None:
        self._works: Sequence[Any] = works
        self._on_end = on_end
        self._claimed = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self) -> None:
        """Wait for the works and report their end, unless another thread does already."""
        if not self._claimed.acquire(blocking=False):
            return
        try:
            for work in self._works:
                work.wait()
        except BaseException as error:  # raised again in `wait`
            self._error = error
        self._on_end(time.perf_counter())
        self._works = ()
        self._done.set()

    def wait(self) -> None:
        """Wait until the works are done, and raise their error."""
        self.finish()
        self._done.wait()
        if self._error is not None:
            raise self._error


class Stamper:
    """Reports when gloo's sends and receives end, which only a waiting thread can observe.

    One thread waits for them in the order in which they were started. A thread that needs one earlier waits for it
    itself, so that it is not delayed by those before it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Followed | None] = queue.SimpleQueue()
        self._select_device = dev.selecting()
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}-stamps", daemon=True)
        self._thread.start()

    def follow(self, works: Sequence[Any], on_end: Callable[[float], None]) -> Followed:
        """Call ``on_end``, on any thread, with the ``time.perf_counter`` at which ``works`` end."""
        followed = Followed(works, on_end)
        self._queue.put(followed)
        return followed

    def close(self) -> None:
        """End the thread after its last wait."""
        self._queue.put(None)
        self._thread.join(timeout=0.2)  # after a failure its wait may end only when connections break

    def _run(self) -> None:
        self._select_device()
        while (followed := self._queue.get()) is not None:
            followed.finish()
