"""The memory of one node: a folder on a memory file system, which outlives the processes that write to it.

::

    $LS_STRATEGY_MEMORY, or /dev/shm/ls_strategy-<uid>
        <run>/
            lock                    held by one process of the node while the run has ranks here
            progress                the last finished step, and when it ended: see `progress`
            step-000000012.3f2a/    a snapshot: files of ranks of this node, and copies of another node's
                manifest.json       written last; without it, the snapshot does not count here
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import ConfigError, StateError

VARIABLE = "LS_STRATEGY_MEMORY"

_SNAPSHOT = re.compile(r"step-(\d{9,})\.[0-9a-f]{8}")
_FILE = re.compile(r"__\d+_\d+\.distcp|[.\w-]{1,64}")

_UNUSED_S = 7 * 24 * 3600.0
"""Seconds after which the memory of a run that has not written to it is freed: it ended without removing it."""

_LOCK_S = 20.0
"""Seconds to wait for the lock: processes that were killed a moment ago may still be ending."""


def root(environ: Mapping[str, str]) -> Path:
    """Return the folder in this node's memory.

    Raises:
        ConfigError: there is no memory file system, and no variable names another folder.
    """
    named = environ.get(VARIABLE)
    if named:
        return Path(named)
    shared = Path("/dev/shm")
    if not shared.is_dir():
        raise ConfigError(
            f"Got snapshots in memory, but this system has no {shared}. Set {VARIABLE} to a folder on a memory file "
            "system of the node."
        )
    return shared / f"ls_strategy-{os.getuid()}"


def node_id(folder: Path) -> str:
    """Return what processes that share ``folder`` have in common, and others do not."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text().strip() if boot.exists() else ""
    return hashlib.sha256("\n".join((socket.gethostname(), started, str(folder.resolve()))).encode()).hexdigest()[:16]


def name_of(step: int, save_id: str) -> str:
    """Return the name of a snapshot."""
    return f"step-{step:09d}.{save_id}"


def step_of(name: str) -> int:
    """Return the optimizer steps of a snapshot.

    Raises:
        ValueError: it is not the name of one.
    """
    found = _SNAPSHOT.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a snapshot")
    return int(found[1])


class Memory:
    """The memory that one run has on this node. Not collective."""

    def __init__(self, folder: Path, run: str) -> None:
        """Create the run's folder, which only this user can read.

        Raises:
            StateError: it cannot be created.
        """
        self.folder = folder / run
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to another user")
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StateError(
                f"the memory for snapshots cannot be used: {error}. Set {VARIABLE} to a folder on a memory file system "
                "of the node that this user can write to."
            ) from error
        self._lock: IO[bytes] | None = None

    def path(self, name: str, file: str = "") -> Path:
        """Return the path of a snapshot or of one of its files.

        Raises:
            ValueError: a name that could lead elsewhere.
        """
        step_of(name)
        if file and (not _FILE.fullmatch(file) or file in (".", "..")):
            raise ValueError(f"{file!r} is not the name of a file of a snapshot")
        return self.folder / name / file if file else self.folder / name

    def claim(self) -> None:
        """Take the lock, which the kernel releases when this process ends. One process per node.

        Raises:
            StateError: another process that is alive has it.
        """
        if self._lock is not None:
            return
        lock = (self.folder / "lock").open("ab")
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() < until:
                    time.sleep(0.1)
                    continue
                lock.close()
                raise StateError(
                    f"another run uses the snapshots in {self.folder}. End it, or give each run a name of its own: "
                    "ElasticTraining(run=...)."
                ) from None
            self._lock = lock
            return

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def names(self) -> list[str]:
        """Return the names of snapshots, complete or not, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(p.name for p in self.folder.iterdir() if _SNAPSHOT.fullmatch(p.name))
        return []

    def files(self, name: str) -> dict[str, int]:
        """Return the bytes of a snapshot's files that are here, by name."""
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self.path(name).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found[path.name] = path.stat().st_size
        return found

    def begin(self, name: str) -> None:
        """Create the folder of a snapshot."""
        self.path(name).mkdir(mode=0o700, exist_ok=True)

    def remove(self, name: str) -> None:
        """Remove a snapshot; its manifest first, so that a part of it never counts."""
        self.path(name, MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.path(name), ignore_errors=True)

    def keep(self, name: str) -> None:
        """Remove every snapshot but ``name``, which is complete on all nodes; all of them, if it is empty."""
        for other in self.names():
            if other != name:
                self.remove(other)

    def clear(self) -> None:
        """Remove everything that the run has here."""
        self.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def free_unused(self) -> None:
        """Remove what other runs left here a week ago or earlier. A run that is alive writes all the time."""
        for other in self.folder.parent.iterdir():
            if other != self.folder and other.is_dir() and time.time() - _written(other) > _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)


def _written(folder: Path) -> float:
    return max(_times(folder), default=0.0)


def _times(folder: Path) -> Iterator[float]:
    for path in (folder, *folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat().st_mtime
