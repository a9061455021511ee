"""Runs a command in a session of its own, whose processes end with the process that asked for it, however that ends.

::

    a rank ── Popen, a new session ──> this file as a program ──> ninja ──> compilers
      │ kill -9                            the parent has changed
      └─ ends                              kills every process of the session, then ends

The kernel can send a signal to the children of a process that ends, but not to their children. Standard library only,
so that the program starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

__all__ = ["kill_session", "start"]

_LOOK_EVERY_S = 0.2


def start(command: Sequence[str], folder: Path, output: IO[str]) -> subprocess.Popen[bytes]:
    """Start a command in ``folder``. The returned process leads the session, and ends with the command's status."""
    guard = [sys.executable, "-I", "-S", __file__, str(os.getpid())] if sys.executable else []
    return subprocess.Popen([*guard, *command], cwd=folder, stdout=output, stderr=output, start_new_session=True)


def kill_session(leader: int) -> None:
    """Kill all processes of a session but this one: ninja starts each compiler in a separate process group."""
    for _ in range(100):
        left = [pid for pid in _session(leader) if pid != os.getpid()]
        if not left:
            return
        for pid in left:  # the leader and ninja, which would start more, have the lowest numbers
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _session(leader: int) -> list[int]:
    """Return the running processes of a session, in order; only the leader on other systems than Linux."""
    if not Path("/proc/self/stat").exists():
        return [leader]
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        if session == str(leader) and state not in "ZX":
            found.append(int(path.parent.name))
    return sorted(found)


def _main(asked_by: int, command: Sequence[str]) -> int:
    """Run the command while the process that asked for it is the parent of this one; return its status."""
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 127
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_EVERY_S)
        if os.getppid() != asked_by:
            kill_session(os.getpid())
            return 1


if __name__ == "__main__":
    status = _main(int(sys.argv[1]), sys.argv[2:])
    sys.exit(status if status >= 0 else 128 - status)
