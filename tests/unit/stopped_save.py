"""A save in another process, which stops in the middle of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.processes import fork_of_server


class Saver:
    """Saves 7 in another process."""

    def __init__(self, path: Path, stop: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self.process = fork_of_server(_save, path, stop, theirs)
        theirs.close()
        assert self._connection.recv() == "here"

    def go_on(self) -> None:
        """To its end."""
        self._connection.send("go on")
        self.process.join(60)
        assert self.process.exitcode == 0

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self._connection.close()


def _save(path: Path, stop: str, connection: Connection) -> None:
    """Stop while a file is written, before the name is taken, or while nothing has the name."""
    from ls_strategy.checkpoint import commit
    from ls_strategy.checkpoint.manifest import Manifest, record_of
    from ls_strategy.checkpoint.place import CheckpointPath

    def wait() -> None:
        connection.send("here")
        assert connection.recv() == "go on"

    held = commit.begin(path, "0000000a")
    place = commit.staging(path, "0000000a")
    with place.open("__0_0.distcp", "wb") as file:
        file.write(b"7" if stop == "begun" else b"__0_0.distcp 7")
        if stop == "begun":
            wait()
            file.seek(0)
            file.write(b"__0_0.distcp 7")
    records = {"__0_0.distcp": record_of(place, "__0_0.distcp")}
    if stop == "manifest":
        take_name = commit.take_name

        def late(*args: Any) -> Any:
            wait()
            return take_name(*args)

        commit.take_name = late  # type: ignore[assignment]
    elif stop == "nameless":
        rename = CheckpointPath.rename

        def stopping(self: CheckpointPath, target: CheckpointPath) -> None:
            rename(self, target)
            if target.path.endswith(".old"):
                wait()

        commit.exchange_names = lambda a, b: False  # type: ignore[assignment]
        CheckpointPath.rename = stopping  # type: ignore[method-assign]
    commit.commit(path, "0000000a", Manifest(7, 0, {}, records))
    held.release()


def save_and_fork(path: Path, connection: Connection) -> None:
    """Begin a save, send the number of a child that a fork has made, and be killed."""
    from ls_strategy.checkpoint import commit

    commit.begin(path, "0000000a")
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    connection.send(child)
    os.kill(os.getpid(), signal.SIGKILL)
