"""The launcher of a rank, and when to end it: after errors of this package that come again at every start.

``torchrun`` starts ranks again after any error. One about options or a file that the user has named is the same every
time, and with many restarts the nodes would be held for hours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

NOTE = "ended"  # the file in the memory of a run with the error that ended a start before its first step
AGAIN = (
    "the start before this one ended with the same error, before a step, and so would the next. torchrun ends without "
    "using up its restarts."
)
_USUAL_PORT = 29400  # where launchers meet if no port is given
_LISTENS = "0A"  # a state of sockets in ``/proc/net/tcp``


def came_again(folder: Path, error: BaseException, ranks: int) -> bool:
    """Note the error that ends this start. Return whether the start before ended with the same one."""
    text, note = f"{ranks} ranks: {type(error).__name__}: {error}", folder / NOTE
    again = False
    with contextlib.suppress(OSError, ValueError):
        again = note.read_text() == text
    with contextlib.suppress(OSError):
        note.write_text(text)
    return again


def forget(folder: Path) -> None:
    """Forget the error: a step has been trained since."""
    with contextlib.suppress(OSError):
        (folder / NOTE).unlink(missing_ok=True)


def has_restarts(environ: Mapping[str, str]) -> bool:
    """Return whether ``torchrun`` has started this process again, and would do so once more."""
    restarts, most = (environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return restarts.isdecimal() and most.isdecimal() and 0 < int(restarts) < int(most)


def launcher() -> int | None:
    """Return the process id of the ``torchrun`` that has started this process, or None."""
    parent = os.getppid()
    names = {argument.rsplit("/", 1)[-1] for argument in _arguments(parent)}
    return parent if names & {"torchrun", "torch.distributed.run"} else None


def is_meeting_place(process: int, environ: Mapping[str, str]) -> bool:
    """Return whether a ``torchrun`` listens where all of them meet: without it, none of them can go on."""
    endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    given = _arguments(process)
    for argument, following in zip(given, [*given[1:], ""], strict=True):
        name, _, value = argument.replace("_", "-").partition("=")
        if name == "--rdzv-endpoint":
            endpoint = value or following
    port = endpoint.rpartition(":")[2]
    return (int(port) if port.isdecimal() else _USUAL_PORT) in _ports(process)


def _arguments(process: int) -> list[str]:
    try:
        return [each.decode() for each in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")]
    except (OSError, UnicodeDecodeError):
        return []


def _ports(process: int) -> set[int]:
    """Return the TCP ports at which a process of this user listens."""
    own: set[str] = set()
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(str(link.readlink()))
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTENS and f"socket:[{columns[9]}]" in own:
                    found.add(int(columns[1].rpartition(":")[2], 16))
    return found


def end(process: int, error: BaseException, why: str) -> None:
    """End the launcher, which ends its ranks: print the error and the reason first."""
    traceback.print_exception(error)
    print(f"ElasticTraining: {why}", file=sys.stderr, flush=True)
    os.kill(process, signal.SIGTERM)
