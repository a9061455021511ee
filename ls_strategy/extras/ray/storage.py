"""Find where Ray keeps the checkpoints of a run, as paths and addresses that this package reads and writes itself.

A checkpoint of Ray is a folder in the run's storage. Ours is the folder `NAME` inside it, where Ray's own callback for
Lightning has its file, so programs find either under the same name.
"""

from __future__ import annotations

import posixpath
from typing import Any

from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.extras.ray.train import Checkpoint, train

NAME = "checkpoint.ckpt"

_PROTOCOLS = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "abfs://", "hdfs": "hdfs://"}
"""Type names of pyarrow's file systems, with what fsspec calls them."""


def latest_checkpoint() -> str | None:
    """Return the path of the latest checkpoint that this run has reported to Ray, for ``ckpt_path``; None without one.

    Nothing is copied: every rank reads its part of the checkpoint from Ray's storage. It may have been saved by another
    number of workers.

    Raises:
        StateError: this is no train function of Ray Train.
        ConfigError: the storage is of a kind that fsspec cannot read.
    """
    try:
        found = train.get_checkpoint()
    except RuntimeError as error:
        raise StateError(f"latest_checkpoint() is for train functions of Ray Train: {error}") from error
    return None if found is None else posixpath.join(address(found.filesystem, found.path), NAME)


def address(filesystem: Any, path: str) -> str:
    """Return a path of Ray's storage as a local path, or with the protocol that fsspec knows it by.

    Args:
        filesystem: of pyarrow.
        path: without protocol, as pyarrow has it.

    Raises:
        ConfigError: there is none, or the package for it is missing.
    """
    import fsspec

    kind = str(filesystem.type_name)
    wrapped = getattr(getattr(filesystem, "handler", None), "fs", None)
    if kind in _PROTOCOLS:
        found = f"{_PROTOCOLS[kind]}{path}"
    elif wrapped is not None:  # a file system of fsspec, which pyarrow has wrapped
        found = str(wrapped.unstrip_protocol(path)).removeprefix("file://").removeprefix("local://")
    else:
        raise ConfigError(
            f"Got a storage of Ray of the kind {kind!r}, which this package cannot write to by itself. Set "
            "RunConfig(storage_path=...) to a shared folder, or to an address such as s3://bucket/folder."
        )
    try:
        fsspec.core.url_to_fs(found)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"Got the storage {found} of Ray, but fsspec cannot open it here: {error}. Install the package that it "
            "names on every node."
        ) from error
    return found


class RunStorage:
    """The folder of a run in Ray's storage. Made on every worker."""

    def __init__(self) -> None:
        """Ask Ray.

        Raises:
            ConfigError: the storage is of a kind that fsspec cannot write.
        """
        try:
            self._storage: Any = train.get_context().get_storage()
        except NotImplementedError:  # num_workers=0 runs in the driver, for debugging
            self._storage = None
        self.exists = self._storage is not None  # whether there is any: Ray's local mode has none
        if self.exists:
            address(self._storage.storage_filesystem, self._storage.experiment_fs_path)

    def free_name(self, wanted: str) -> str:
        """Return ``wanted``, with a number if a checkpoint has that name: Ray may count on it."""
        names = (wanted, *(f"{wanted}-{i}" for i in range(1, 1_000_000)))
        return next(name for name in names if not CheckpointPath(self.path(name)).taken)

    def path(self, name: str) -> str:
        """Return where our checkpoint of Ray's checkpoint ``name`` is saved."""
        folder = self._storage.build_checkpoint_path_from_name(name)
        return posixpath.join(address(self._storage.storage_filesystem, folder), NAME)

    def checkpoint(self, name: str) -> Any:
        """Return Ray's checkpoint ``name``, which is complete."""
        folder = self._storage.build_checkpoint_path_from_name(name)
        return Checkpoint(folder, filesystem=self._storage.storage_filesystem)
