"""Ends ranks when the process that started them ends: Lightning's launcher, or an agent of torchrun. Standard library.

::

    launcher = rank 0 ── its pid in the environment ──> Popen ──> rank 1: a thread watches its parent
        │ raises or is killed                                       the parent has changed
        └─ ends                                                     a grace period for messages, then SIGKILL

Otherwise a rank that sleeps, or waits for a rank 0 that has ended, continues until its timeout. An agent of torchrun
does not write down its pid, so it is the process that was the parent when `torch` was imported. The ranks of SLURM and
MPI are ended by these.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

VARIABLE = "LS_STRATEGY_LAUNCHER"
"""Environment variable with the pid of the process that starts the ranks of a run."""

_GRACE_S = 10.0
"""Seconds that a rank has for its own error message after the launcher has ended."""

_GRACE_WHILE_STARTING_S = 1.0
"""The same before it has met the others: there is no error yet that it could tell."""

_LOOK_EVERY_S = 0.5

_FIRST_PARENT = os.getpid(), os.getppid()
"""This process, and its parent when this module was imported, which the entry point of ``import torch`` does."""


class LauncherWatch:
    """Kills this process some seconds after the launcher has ended, between `start` and `stop`."""

    def __init__(self) -> None:
        """Watch nothing yet; the object can be pickled for a spawned rank."""
        self.starting = True
        """Whether this rank has yet to meet the others."""
        self.select_device: Callable[[], None] | None = None
        """See `ls_strategy.device.selecting`; the thread begins before this rank has a device."""
        self._thread: threading.Thread | None = None
        self._done: threading.Event | None = None

    def start(self, *, by_lightning: bool) -> None:
        """Watch the process that started this one, if it is known.

        Args:
            by_lightning: whether Lightning's launcher has started this process as a script of its own.
        """
        launcher = _launcher(by_lightning)
        if self._thread is not None or launcher is None:
            return
        self.starting = True
        self._done = threading.Event()
        arguments = (*launcher, self._done)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="ls_launcher_watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        if self._thread is not None and self._done is not None:
            self._done.set()
            self._thread.join()
        self._thread = self._done = None

    def _watch(self, launcher: int, is_there: Callable[[], bool], done: threading.Event) -> None:
        while is_there():
            if done.wait(_LOOK_EVERY_S):
                return
            if self.select_device is not None:
                self.select_device()
        if not done.wait(_GRACE_WHILE_STARTING_S if self.starting else _GRACE_S):
            sys.stderr.write(
                f"ls_strategy: the process {launcher} that started this rank has ended, so it ends, too.\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)  # ends every wait


def _launcher(by_lightning: bool) -> tuple[int, Callable[[], bool]] | None:
    """Return the pid of the process that has started this rank, and whether it is there. None if it is not known."""
    named = os.environ.get(VARIABLE, "")
    module = sys.modules.get("multiprocessing.process")  # imported by every process that was forked or spawned
    starter = None if module is None else module.parent_process()
    if starter is not None and named == str(starter.pid):
        parent = os.getppid() if _is_running(starter.pid) else starter.pid  # of a fork server's children: the server
        return starter.pid, lambda: os.getppid() == parent and starter.is_alive()
    if by_lightning and named.isdecimal() and int(named) != os.getpid():
        if os.getppid() != int(named) and _is_running(int(named)):
            return None  # this process has inherited the variable from a run that has started it
        return int(named), lambda: os.getppid() == int(named)
    if "TORCHELASTIC_RUN_ID" in os.environ and _FIRST_PARENT[0] == os.getpid():
        return _FIRST_PARENT[1], lambda: os.getppid() == _FIRST_PARENT[1]
    return None


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
