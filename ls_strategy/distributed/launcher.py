"""Ends the ranks that Lightning's launcher started when the launcher ends. Standard library only.

::

    launcher = rank 0 ── its pid in the environment ──> Popen ──> rank 1: a thread watches its parent
        │ raises or is killed                                       the parent has changed
        └─ ends                                                     a grace period for messages, then SIGKILL

Otherwise a rank that sleeps, or waits for a rank 0 that has ended, continues until its timeout.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess

VARIABLE = "LS_STRATEGY_LAUNCHER"
"""Environment variable with the pid of the process that starts the ranks of a run."""

_GRACE_S = 10.0
"""Seconds that a rank has for its own error message after the launcher has ended."""

_LOOK_EVERY_S = 0.5


class LauncherWatch:
    """Kills this process some seconds after the launcher has ended, between `start` and `stop`."""

    def __init__(self) -> None:
        """Watch nothing yet; the object can be pickled for a spawned rank."""
        self._thread: threading.Thread | None = None
        self._done: threading.Event | None = None

    def start(self) -> None:
        """Watch the launcher that the environment names, if there is one and it is the parent of this process."""
        launcher = os.environ.get(VARIABLE, "")
        if self._thread is not None or not launcher.isdecimal():
            return
        pid = int(launcher)
        if pid == os.getpid() or (os.getppid() != pid and _is_running(pid)):
            return
        self._done = threading.Event()
        arguments = (pid, self._done)
        self._thread = threading.Thread(target=_watch, args=arguments, name="ls_launcher_watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        if self._thread is not None and self._done is not None:
            self._done.set()
            self._thread.join()
        self._thread = self._done = None


def _watch(launcher: int, done: threading.Event) -> None:
    while os.getppid() == launcher:
        if done.wait(_LOOK_EVERY_S):
            return
    if not done.wait(_GRACE_S):
        sys.stderr.write(f"ls_strategy: the process {launcher} that started this rank has ended, so it ends, too.\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)  # ends every wait


def end_processes(processes: Iterable[BaseProcess]) -> None:
    """End forked or spawned ranks: wait a little for them to end, then send SIGINT, then SIGKILL."""
    alive = [p for p in processes if p.is_alive()]
    for number, patience_s in ((0, 2.0), (signal.SIGINT, 5.0), (signal.SIGKILL, 5.0)):
        for process in alive if number else ():
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        deadline = time.monotonic() + patience_s
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [p for p in alive if p.is_alive()]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
