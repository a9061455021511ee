"""The pipeline of offloaded updates: read k+1 | update k | write k-1.

::

    read     | 1 | 2 | 3 |
    update       | 1 | 2 | 3 |          on this thread
    write            | 1 | 2 | 3 |

Jobs run in the order of their submission on one background thread. Meanwhile the training thread continues backward, or
the next forward, which waits only for the unit that it needs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ls_strategy import spans
from ls_strategy.errors import StateError

_STALLED_S = 600.0
"""A waiter raises an error if no job finishes for this long. A chunk takes seconds on the slowest device."""


class Job(Protocol):
    """One chunk of an update."""

    def read(self) -> None:
        """Start loading what the update needs, if it is not in memory."""

    def update(self) -> None:
        """Wait for the loads, and compute."""

    def write(self) -> None:
        """Start storing the result, if it was not computed in place."""


class Ticket:
    """The completion of the jobs of one submission."""

    def __init__(self, stream: Stream) -> None:
        """Start unfinished."""
        self._stream = stream
        self._done = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Return whether all jobs are done. Does not wait."""
        return self._done.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the jobs as done, or as failed with ``error``."""
        self.error = error
        self._done.set()

    def wait(self) -> None:
        """Wait until the jobs are done.

        Raises:
            BaseException: the exception of a job, at every call.
            StateError: no job has finished for ten minutes.
        """
        with spans.waiting(spans.COPY, "update"):
            while not self._done.wait(timeout=5.0):
                self._stream.raise_if_stalled()
        if self.error is not None:
            raise self.error


class Stream:
    """Runs jobs in order, on a background thread or on the caller's."""

    def __init__(self, *, threaded: bool, on_start: Callable[[], None] | None = None) -> None:
        """Run ``on_start`` first on the background thread. Without ``threaded``, `submit` runs the jobs."""
        self.threaded = threaded
        self._on_start = on_start
        self._queue: deque[tuple[Job | None, Ticket]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._error: BaseException | None = None
        self._moved_at = time.monotonic()
        self.busy_s = 0.0
        """Seconds spent in jobs so far."""

    @property
    def error(self) -> BaseException | None:
        """Return the exception that ended the stream, or None. Later jobs do not run. Does not wait."""
        return self._error

    def submit(self, jobs: Sequence[Job]) -> Ticket:
        """Append jobs, and return a ticket for their completion. Returns at once if threaded."""
        ticket = Ticket(self)
        with self._wake:
            if self._error is not None:
                ticket.finish(self._error)
                return ticket
            self._moved_at = time.monotonic()
            self._queue.extend((job, ticket) for job in jobs)
            self._queue.append((None, ticket))
            self._closing = False
            self._wake.notify()
            if self.threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ls_strategy-update", daemon=True)
                self._thread.start()
        if not self.threaded:
            self._work_off()
        return ticket

    def raise_if_stalled(self) -> None:
        """Raise if no job has finished for ten minutes.

        Raises:
            StateError: with how long it has been.
        """
        idle = time.monotonic() - self._moved_at
        if idle > _STALLED_S:
            raise StateError(
                f"an update of offloaded states has made no progress for {idle:.0f} s. The NVMe device or the host "
                "hangs: look for I/O errors in the kernel log (dmesg), or offload to the CPU instead."
            )

    def close(self, patience_s: float = _STALLED_S) -> None:
        """Finish all jobs and end the thread; the next `submit` starts another. Idempotent.

        Args:
            patience_s: seconds to wait for jobs. The thread ends after the last one, also if that takes longer.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=patience_s)

    def _run(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    self._thread = None
                    return
            self._work_off()

    def _next(self) -> tuple[Job | None, Ticket] | None:
        with self._wake:
            return self._queue.popleft() if self._queue else None

    def _work_off(self) -> None:
        """Run jobs until the queue is empty, always with the next job's read in flight."""
        current = self._begin(self._next())
        while current is not None:
            started = time.perf_counter()
            following = self._begin(self._next())
            self._complete(*current)
            self._moved_at = time.monotonic()
            self.busy_s += time.perf_counter() - started
            current = following

    def _begin(self, entry: tuple[Job | None, Ticket] | None) -> tuple[Job | None, Ticket] | None:
        if entry is not None and entry[0] is not None and self._error is None:
            try:
                entry[0].read()
            except BaseException as error:
                self._error = error
        return entry

    def _complete(self, job: Job | None, ticket: Ticket) -> None:
        if job is None or self._error is not None:
            if job is None:
                ticket.finish(self._error)
            return
        try:
            job.update()
            job.write()
        except BaseException as error:  # `Ticket.wait` raises it; later jobs do not run on a broken state
            self._error = error
