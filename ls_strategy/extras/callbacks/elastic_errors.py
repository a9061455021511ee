"""Errors of this package that come again at every start: after the second one the launcher ends, with restarts left.

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

NOTE = "ended"
"""The file in the memory of a run with the error that ended a start before its first step."""


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


def launcher(environ: Mapping[str, str]) -> int | None:
    """Return the process id of the ``torchrun`` that would start this process again, or None."""
    restarts, most = (environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if not (restarts.isdecimal() and most.isdecimal() and 0 < int(restarts) < int(most)):
        return None
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    names = {argument.rsplit(b"/", 1)[-1] for argument in command}
    return parent if names & {b"torchrun", b"torch.distributed.run"} else None


def end(process: int, error: BaseException) -> None:
    """End the launcher, which ends its ranks: print the error first."""
    traceback.print_exception(error)
    print(
        "ElasticTraining: the start before this one ended with the same error, before a step, and so would the next. "
        "torchrun ends without using up its restarts.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(process, signal.SIGTERM)
