"""Files and folders that tools write: there in full under their name, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ls_strategy.checkpoint.commit import Place, new_save_id
from ls_strategy.errors import CheckpointError, ConfigError

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and in all."""


@contextmanager
def whole_or_nothing(target: Path, *, nbytes: int, force: bool) -> Iterator[Path]:
    """Gives a path on the same file system to write a file or a folder to; it takes its name at the end, atomically.

    After an exception, a full disk or Ctrl-C, what was written is removed, and ``target`` is as it was. After a
    ``kill -9`` the next call for the same name removes it.

    Args:
        target: the name.
        nbytes: what will be written, bytes; checked against the free space first.
        force: replace a file of this name, or a folder that an export wrote.

    Raises:
        ConfigError: ``target`` exists, or its folder does not.
        CheckpointError: the file system is, or becomes, too full, or refuses to be written.
    """
    _check_target(target, force)
    _remove_abandoned(target)
    free = shutil.disk_usage(target.parent).free
    if nbytes > free:
        raise CheckpointError(
            f"{target} needs {nbytes / 1e9:.2f} GB, {target.parent} has {free / 1e9:.2f} GB free. Write elsewhere."
        )
    scratch = target.with_name(f".{target.name}.{new_save_id()}.partial")
    try:
        scratch.mkdir()
        with _locked(scratch):
            yield scratch / target.name
            _check_target(target, force)
            _take_name(scratch, target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}. Nothing was left behind.") from error
    finally:
        Place(scratch).remove()


def _check_target(target: Path, force: bool) -> None:
    if ":/" in str(target):
        raise ConfigError(f"{target} is not a local path. Write to a local disk, and copy the result.")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder. Make it first: mkdir -p {target.parent}")
    if not os.path.lexists(target):
        return
    if not force:
        raise ConfigError(f"{target} exists. Give another name, or --force (force=True) to replace it.")
    if target.is_dir() and not _is_export(target):
        raise ConfigError(f"{target} is a folder that no export wrote. Give another name, or remove it yourself.")


def _is_export(folder: Path) -> bool:
    """A slip in a path must not cost a folder of something else."""
    entries = list(folder.iterdir())
    weights = [p for p in entries if p.name.startswith("model") and p.suffix == ".safetensors"]
    return not folder.is_symlink() and all(p.is_file() for p in entries) and (bool(weights) or not entries)


def _take_name(scratch: Path, target: Path) -> None:
    """Only this moment is visible. A folder cannot replace anything in one step, so what is there steps aside."""
    new = scratch / target.name
    if new.is_dir():
        Place(new).sync()
    if target.is_dir() or (new.is_dir() and os.path.lexists(target)):
        old = scratch / f"{target.name}.old"
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise
    else:
        new.replace(target)
    Place(target.parent).sync()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether nobody else holds it. False also where the file system has no locks: then nothing is ever abandoned."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_abandoned(target: Path) -> None:
    """Remove what calls for the same name left behind when they were killed."""
    for found in target.parent.glob(f".{_literal(target.name)}.????????.partial"):
        if found.is_symlink() or not found.is_dir() or [p for p in found.iterdir() if p.name != target.name]:
            continue  # a save's folder
        descriptor = os.open(found, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if _lock(descriptor):
                shutil.rmtree(found, ignore_errors=True)
        finally:
            os.close(descriptor)


def _literal(name: str) -> str:
    """For a glob pattern."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
