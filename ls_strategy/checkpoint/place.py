"""The folder of a checkpoint on a local or remote file system, and durable writes."""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import stat
import time
from pathlib import Path
from typing import IO, Any, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ls_strategy.errors import CheckpointError

_WRITE_BUFFER_BYTES = 1 << 20
"""Bytes of small writes that go to the system in one call. Every call hands over the GIL, for which a step waits."""


class CheckpointPath:
    """A path on some file system: local, or any that fsspec knows by its protocol."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Parse ``path``, which may have a protocol: ``s3://bucket/name.ckpt``."""
        self.fs, bare = url_to_fs(os.fspath(path))
        self.local = isinstance(self.fs, LocalFileSystem)
        self.path = os.path.abspath(bare) if self.local else bare.rstrip("/")  # noqa: PTH100 - resolves "." and ".."

    def __str__(self) -> str:
        return self.path if self.local else str(self.fs.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return posixpath.basename(self.path)

    def at(self, path: str) -> CheckpointPath:
        """Return another path of the same file system, given without protocol."""
        place = object.__new__(CheckpointPath)
        place.fs, place.local = self.fs, self.local
        place.path = path.rstrip("/") or ("/" if self.local else "")
        return place

    @property
    def parent(self) -> CheckpointPath:
        """The parent folder."""
        return self.at(posixpath.dirname(self.path) or ".")

    def sibling(self, name: str) -> CheckpointPath:
        """Return a path in the same folder."""
        return self.at(posixpath.join(posixpath.dirname(self.path), name))

    def open(self, name: str, mode: str) -> IO[Any]:
        """Open a file in the folder.

        Raises:
            CheckpointError: What is to be read is not a file, but a pipe or a device.
        """
        path = f"{self.path}/{name}"
        if self.local:
            return open_file(path, mode) if mode.startswith("r") else Path(path).open(mode, _WRITE_BUFFER_BYTES)
        return cast("IO[Any]", self.fs.open(path, mode))

    def refuse_devices(self) -> None:
        """Raise an error if reading the path might wait for ever.

        Raises:
            CheckpointError: It is a pipe, a device or a socket.
        """
        if self.local and self.exists():
            _refuse_devices(self.path, Path(self.path).stat().st_mode)

    def open_itself(self) -> IO[Any]:
        """Open the path, a file, to read it.

        Raises:
            CheckpointError: It is a pipe or a device.
        """
        return open_file(self.path) if self.local else cast("IO[Any]", self.fs.open(self.path, "rb"))

    @property
    def taken(self) -> bool:
        """Return whether anything has this name, including a broken link."""
        return os.path.lexists(self.path) if self.local else self.exists()

    def exists(self, name: str = "") -> bool:
        """Return whether the folder, or a file in it, exists."""
        return bool(self.fs.exists(f"{self.path}/{name}" if name else self.path))

    def size(self, name: str) -> int | None:
        """Return the bytes of a file in the folder, or None if it does not exist."""
        try:
            if self.local:
                return Path(self.path, name).stat().st_size
            return int(self.fs.info(f"{self.path}/{name}")["size"])
        except FileNotFoundError:
            return None

    def entries(self) -> list[str]:
        """Return the paths in the folder, without protocol. Empty if the folder does not exist."""
        try:
            return [str(e).rstrip("/") for e in self.fs.ls(self.path, detail=False, refresh=True)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def idle_for(self) -> float | None:
        """Return the seconds since the last write to this path or a file in it. None if unknown."""
        try:
            if self.local:
                folder = Path(self.path)
                times = [f.lstat().st_mtime for f in (folder, *folder.glob("*"))]
            else:
                times = [self.fs.modified(e).timestamp() for e in (self.entries() or [self.path])]
        except (OSError, NotImplementedError, KeyError, AttributeError, TypeError):
            return None
        return time.time() - max(times)

    def make(self) -> None:
        """Create the folder and its parents."""
        self.fs.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Remove a folder, a file, or a link (not its target)."""
        if self.local:
            path = Path(self.path)
            if path.is_symlink() or path.is_file():
                path.unlink(missing_ok=True)
            elif path.is_dir():
                shutil.rmtree(path)
        elif self.fs.exists(self.path):
            self.fs.rm(self.path, recursive=True)

    def rename(self, target: CheckpointPath) -> None:
        """Rename to ``target``, which must be free. Atomic on local file systems only."""
        if self.local:
            Path(self.path).rename(target.path)
        else:
            self.fs.mv(self.path, target.path, recursive=True)

    def sync(self) -> None:
        """Make the folder's entries durable (fsync). Local only."""
        if not self.local:
            return
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        finally:
            os.close(descriptor)


_CANNOT_SYNC = (22, 95)
"""EINVAL and ENOTSUP: some network file systems cannot sync a folder."""


def open_file(path: str | os.PathLike[str], mode: str = "rb", *, buffering: int = -1) -> IO[Any]:
    """Open a local file to read it. A pipe without a writer is not waited for.

    Raises:
        CheckpointError: It is a pipe, a device or a socket.
        OSError: As ``open`` does.
    """

    def not_waiting(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        try:
            _refuse_devices(name, os.fstat(descriptor).st_mode)  # a folder is refused by `open` itself
        except CheckpointError:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, buffering=buffering, opener=not_waiting)


def _refuse_devices(name: str, mode: int) -> None:
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{name} is a pipe or a device, but only files are read. Copy its content to a file.")


def sync_file(file: IO[Any]) -> None:
    """Flush, and wait until a local file is on disk."""
    file.flush()
    with contextlib.suppress(AttributeError, NotImplementedError, ValueError):
        descriptor = file.fileno()
        os.fsync(descriptor)


def begin_to_sync(descriptor: int, first: int, nbytes: int) -> None:
    """Let the system begin to write a range of a local file to the disk, so that `sync_file` finds less to do."""
    with contextlib.suppress(OSError, AttributeError):  # macOS does not have it
        os.posix_fadvise(descriptor, first, nbytes, os.POSIX_FADV_DONTNEED)
