"""A checkpoint's folder on some file system, and files that are on the disk when the call returns."""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import time
from pathlib import Path
from typing import IO, Any, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem


class Place:
    """A checkpoint's folder on some file system: local, or any that fsspec knows by the path's protocol."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """``path`` may have a protocol, ``s3://bucket/name.ckpt``."""
        self.fs, bare = url_to_fs(os.fspath(path))
        self.local = isinstance(self.fs, LocalFileSystem)
        self.path = os.path.abspath(bare) if self.local else bare.rstrip("/")  # noqa: PTH100 - "." and ".." go

    def __str__(self) -> str:
        return self.path if self.local else str(self.fs.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        """Last part of the path."""
        return posixpath.basename(self.path)

    def at(self, path: str) -> Place:
        """Another path of the same file system, without protocol."""
        place = object.__new__(Place)
        place.fs, place.local = self.fs, self.local
        place.path = path.rstrip("/") or ("/" if self.local else "")
        return place

    @property
    def parent(self) -> Place:
        """The folder that this one is in."""
        return self.at(posixpath.dirname(self.path) or ".")

    def sibling(self, name: str) -> Place:
        """A folder beside this one."""
        return self.at(posixpath.join(posixpath.dirname(self.path), name))

    def open(self, name: str, mode: str) -> IO[Any]:
        """A file in the folder."""
        path = f"{self.path}/{name}"
        if self.local:
            return Path(path).open(mode)
        return cast("IO[Any]", self.fs.open(path, mode))

    @property
    def taken(self) -> bool:
        """Whether anything has this name, be it a link that leads nowhere."""
        return os.path.lexists(self.path) if self.local else self.exists()

    def exists(self, name: str = "") -> bool:
        """Whether the folder, or a file in it, is there."""
        return bool(self.fs.exists(f"{self.path}/{name}" if name else self.path))

    def size(self, name: str) -> int | None:
        """Bytes of a file in the folder; None if there is none."""
        try:
            if self.local:
                return Path(self.path, name).stat().st_size
            return int(self.fs.info(f"{self.path}/{name}")["size"])
        except FileNotFoundError:
            return None

    def entries(self) -> list[str]:
        """Paths of what is in the folder, without protocol; none if it is gone."""
        try:
            return [str(e).rstrip("/") for e in self.fs.ls(self.path, detail=False, refresh=True)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def idle_for(self) -> float | None:
        """Seconds since something was last written here or in a file of the folder; None where that is not known."""
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
        """Make the folder and those above it."""
        self.fs.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Remove whatever has this name: a folder, a file, or a link (not what it points to)."""
        if self.local:
            path = Path(self.path)
            if path.is_symlink() or path.is_file():
                path.unlink(missing_ok=True)
            elif path.is_dir():
                shutil.rmtree(path)
        elif self.fs.exists(self.path):
            self.fs.rm(self.path, recursive=True)

    def rename(self, target: Place) -> None:
        """Take another name, which is free. Atomic on local file systems only."""
        if self.local:
            Path(self.path).rename(target.path)
        else:
            self.fs.mv(self.path, target.path, recursive=True)

    def sync(self) -> None:
        """Make sure that the folder's entries outlive a loss of power."""
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


def sync_file(file: IO[Any]) -> None:
    """Flush, and wait until a local file's bytes are on the disk."""
    file.flush()
    with contextlib.suppress(AttributeError, NotImplementedError, ValueError):
        descriptor = file.fileno()
        os.fsync(descriptor)
