"""A snapshot as a checkpoint folder: a read-only file system whose files lie in the memories of several nodes.

``ls-snapshot://<run>/<name>`` is known in a process that has called `open_snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from typing_extensions import override

from ls_strategy.errors import CheckpointError
from ls_strategy.extras.snapshots.find import Found
from ls_strategy.extras.snapshots.nodes import Nodes

PROTOCOL = "ls-snapshot"


class _Folder:
    """One snapshot that is open."""

    def __init__(self, found: Found, nodes: Nodes) -> None:
        self.sizes = {file: size for file, (size, _) in found.files.items()}
        self._found, self._nodes = found, nodes

    def local(self, file: str) -> Path | None:
        """Return the path of a file on this node, or None."""
        _, having = self._found.files[file]
        return self._nodes.memory.path(self._found.name, file) if self._nodes.own.id in having else None

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Return bytes of a file from a node that has it.

        Raises:
            CheckpointError: no node that has it answers.
        """
        error: CheckpointError | None = None
        for node in self._found.files[file][1]:
            try:
                return self._nodes.peer(node).read(self._found.name, file, offset, length)
            except CheckpointError as raised:
                error = raised
        raise error or CheckpointError(f"no node has {file} of the snapshot {self._found.name}.")


_OPEN: dict[str, _Folder] = {}


def open_snapshot(run: str, found: Found, nodes: Nodes) -> str:
    """Return the path of a snapshot for this process, until `close_snapshots`. Not collective."""
    if PROTOCOL not in fsspec.available_protocols():
        fsspec.register_implementation(PROTOCOL, SnapshotFileSystem)
    _OPEN[f"{run}/{found.name}"] = _Folder(found, nodes)
    return f"{PROTOCOL}://{run}/{found.name}"


def close_snapshots() -> None:
    """Forget every snapshot that is open."""
    _OPEN.clear()


class SnapshotFileSystem(AbstractFileSystem):
    """The snapshots that this process has opened. Read only."""

    protocol = PROTOCOL
    cachable = False

    def _split(self, path: str) -> tuple[_Folder, str]:
        """Return the snapshot and the name of the file, which is empty for the folder.

        Raises:
            FileNotFoundError: neither is known.
        """
        path = str(self._strip_protocol(path)).strip("/")
        for name, folder in _OPEN.items():
            if path == name:
                return folder, ""
            if path.startswith(f"{name}/") and path[len(name) + 1 :] in folder.sizes:
                return folder, path[len(name) + 1 :]
        raise FileNotFoundError(path)

    @override
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        folder, file = self._split(path)
        name = str(self._strip_protocol(path)).strip("/")
        if not file:
            return {"name": name, "type": "directory", "size": 0}
        return {"name": name, "type": "file", "size": folder.sizes[file]}

    @override
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        folder, file = self._split(path)
        name = str(self._strip_protocol(path)).strip("/")
        names = [name] if file else [f"{name}/{each}" for each in folder.sizes]
        return [self.info(each) for each in names] if detail else names

    @override
    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        if mode != "rb":
            raise PermissionError(f"{path} is a part of a snapshot, which is read only")
        folder, file = self._split(path)
        local = folder.local(file)
        if local is not None:
            return local.open("rb")
        return _RemoteFile(self, path, folder.sizes[file], lambda start, end: folder.read(file, start, end - start))


class _RemoteFile(AbstractBufferedFile):
    """A file in the memory of another node; reads are as large as the reader asks for."""

    def __init__(self, fs: AbstractFileSystem, path: str, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._fetch = fetch
        super().__init__(fs, path, mode="rb", size=size, cache_type="none")

    @override
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._fetch(start, end)
