"""The memory of one node: a folder on a memory file system, which outlives the processes that write to it.

::

    $LS_STRATEGY_MEMORY, or /dev/shm/ls_strategy-<uid>
        <run>/
            ls_strategy-snapshots   the mark: only folders that have it are ever removed, and only files named here
            lock                    held by one process of the node while the run has ranks here
            progress                the last finished step, and when it ended: see `progress`
            members, started        the ranks of the run, and the checkpoint that the user gave
            ended                   the error that ended a start before its first step
            failures                how often each rank of each node has computed wrongly
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
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import ConfigError, StateError

VARIABLE = "LS_STRATEGY_MEMORY"

MARK = "ls_strategy-snapshots"  # a file in the folder of every run: without it, nothing there is removed
_OWN = ("lock", "progress", "members", "members.tmp", "started", "ended", "failures", "failures.tmp")
"""Files that a run keeps beside its snapshots."""

_SNAPSHOT = re.compile(r"step-(\d{9,})\.[0-9a-f]{8}", re.ASCII)
_FILE = re.compile(r"__\d+_\d+\.distcp|[.\w-]{1,64}")

_UNUSED_S = 7 * 24 * 3600.0
"""Seconds after which the memory of a run that has not written to it is freed: it ended without removing it."""

_LOCK_S = 20.0  # seconds to wait for the lock: processes that were killed a moment ago may still be ending


def root(environ: Mapping[str, str]) -> Path:
    """Return the folder in this node's memory.

    Raises:
        ConfigError: there is no memory file system, and no variable names another folder.
    """
    named = environ.get(VARIABLE)
    if named:
        return Path(named).resolve()
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


def age_of(name: str) -> tuple[int, str]:
    """Return a key that sorts snapshots, the oldest first: in the alphabet, step 10^10 would come before 2 * 10^9."""
    return step_of(name), name


class Memory:
    """The memory that one run has on this node. Not collective."""

    def __init__(self, folder: Path, run: str) -> None:
        """Create the run's folder, which only this user can read.

        Args:
            folder: what `root` returns, or a folder that the user has named, without links in it.
            run: the name of the run.

        Raises:
            StateError: it cannot be created, is a link, or holds something else.
        """
        self.folder = folder / run
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own(folder)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _require_own(self.folder)
            if not _is_marked(self.folder):
                _mark(self.folder)
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
        if (self.folder / name).is_symlink():
            raise ValueError(f"{name!r} is a link, which could lead elsewhere")
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
            found = [p.name for p in self.folder.iterdir() if _SNAPSHOT.fullmatch(p.name) and not p.is_symlink()]
            return sorted(found, key=age_of)
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
        """Remove what the run has here. What others have put there stays, and the folder with it."""
        self.release()
        _remove(self.folder)

    def free_unused(self) -> None:
        """Remove what other runs left here a week ago or earlier. A run that is alive writes all the time."""
        for other in self.folder.parent.iterdir():
            if other == self.folder or not _is_marked(other):
                continue
            with contextlib.suppress(OSError):
                if time.time() - _written(other) > _UNUSED_S and not _in_use(other):
                    _remove(other)


def _require_own(folder: Path) -> None:
    """Refuse a link, which could lead to what is not ours, and a folder that another user could change."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is a link or a file, but it has to be a folder")
    if found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")


def _is_marked(folder: Path) -> bool:
    """Return whether this user made ``folder`` as the folder of a run: neither it nor its mark is a link."""
    try:
        _require_own(folder)
        mark = (folder / MARK).lstat()
    except OSError:
        return False
    return stat.S_ISREG(mark.st_mode) and mark.st_uid == os.getuid()


def _mark(folder: Path) -> None:
    """Mark a new folder of a run.

    Raises:
        FileExistsError: it is not new.
    """
    if any(path.name != MARK for path in folder.iterdir()):  # another rank may mark it now
        raise FileExistsError(f"{folder} has files, but no {MARK} that says that they belong to a run")
    (folder / MARK).touch(mode=0o600)


def _in_use(folder: Path) -> bool:
    """Return whether a process holds the lock of a run. One that is stopped, or waits, has written nothing lately."""
    try:
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _remove(folder: Path) -> None:
    """Remove a marked folder: snapshots, the files of `_OWN`, then the mark and the folder, unless more is in it.

    `shutil.rmtree` follows no links.
    """
    if not _is_marked(folder):
        return
    for path in folder.iterdir():
        if path.name in _OWN and not path.is_dir():
            path.unlink(missing_ok=True)
        elif _SNAPSHOT.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    if [path.name for path in folder.iterdir()] == [MARK]:
        (folder / MARK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _written(folder: Path) -> float:
    return max(_times(folder), default=0.0)


def _times(folder: Path) -> Iterator[float]:
    for path in (folder, *folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            yield path.lstat().st_mtime
