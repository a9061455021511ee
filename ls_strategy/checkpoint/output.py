"""Atomic output of the command-line tools: a file or folder appears complete under its name, or not at all."""

from __future__ import annotations

import glob
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.claim import require_claim
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.errors import CheckpointError, ConfigError

WRITER = "ls_strategy"
"""Metadata key of exported weights. It lists the names of all files of the export, as JSON."""

_REPLACED = ".old"
"""Suffix of what is being replaced, where names cannot be swapped."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the total."""


@contextmanager
def atomic_output(target: Path, *, nbytes: int, force: bool) -> Iterator[Path]:
    """Yield a path on the same file system, and rename it atomically to ``target`` at the end.

    After an exception, a full disk or Ctrl-C, the partial output is removed and ``target`` is unchanged. After
    ``kill -9`` the next call for the same name removes it. A folder that is replaced is there at every moment where the
    file system can swap two names; elsewhere it is absent between two renames, and the next call restores it.

    Args:
        target: The final name.
        nbytes: Bytes that will be written. Compared with the free space first.
        force: Replace an existing file, or a folder that an export wrote. Nothing else is replaced.

    Raises:
        ConfigError: ``target`` exists, or its parent folder does not.
        CheckpointError: The file system is full or not writable, or another process writes to ``target``.
    """
    check_target(target, force=force)
    place = CheckpointPath(target)
    scratch = target.with_name(f".{target.name}.{commit.new_save_id()}.partial")
    try:
        with require_claim(place) as held:
            _restore(target)
            check_target(target, force=force)
            commit.clean(place, held)
            free = shutil.disk_usage(target.parent).free
            if nbytes > free:
                raise CheckpointError(
                    f"{target} needs {nbytes / 1e9:.2f} GB, but {target.parent} has {free / 1e9:.2f} GB free. "
                    "Write to another disk."
                )
            try:
                scratch.mkdir()
                yield scratch / target.name
                check_target(target, force=force)
                _take_name(scratch, target)
            finally:
                CheckpointPath(scratch).remove()
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}. Nothing was left behind.") from error


def check_target(target: Path, *, force: bool) -> None:
    """Check that an output may get this name: see `atomic_output`.

    Raises:
        ConfigError: It may not.
    """
    if ":/" in str(target):
        raise ConfigError(f"{target} is not a local path. Write to a local disk and copy the result.")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder. Create it first: mkdir -p {target.parent}")
    if target.name in ("", ".."):
        raise ConfigError(f"Got {str(target)!r}, which is a parent folder. Give the output its own name.")
    if not os.path.lexists(target):
        return
    mode = target.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise ConfigError(f"{target} is a link to {target.readlink()}. Give the path it points to, or another name.")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(f"{target} is a device, a pipe or a socket. Give the name of a file.")
    if not force:
        raise ConfigError(f"{target} exists. Give another name, or --force (force=True) to replace it.")
    if stat.S_ISDIR(mode) and not _is_export(target):
        raise ConfigError(
            f"{target} is a folder that no export wrote, or that has other files too. Give another name, or remove "
            "the folder."
        )


def _is_export(folder: Path) -> bool:
    """Return whether the folder holds an export and nothing else: other files must not be lost."""
    found = list(folder.rglob("*"))
    entries = [p for p in found if p.is_symlink() or not p.is_dir()]
    weights = [p for p in entries if p.suffix == ".safetensors"]
    if not weights or not all(p.is_file() and not p.is_symlink() for p in entries):
        return not found and Path.cwd() != folder.resolve()
    return {p.relative_to(folder).as_posix() for p in entries} <= _written_with(weights[0])


def _written_with(weights: Path) -> set[str]:
    """Return the file names of the export that a weights file belongs to. Empty if another program wrote it."""
    try:
        with weights.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if 8 + size <= weights.stat().st_size else {}
        return set(json.loads(header["__metadata__"][WRITER]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()


def _take_name(scratch: Path, target: Path) -> None:
    """Rename the output, and leave in ``scratch`` what it replaces."""
    new, old = scratch / target.name, scratch / f"{target.name}{_REPLACED}"
    if new.is_dir():
        CheckpointPath(new).sync()
    if not (target.is_dir() or (new.is_dir() and os.path.lexists(target))):
        new.replace(target)
    elif not commit.exchange_names(str(new), str(target)):
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise
    CheckpointPath(target.parent).sync()


def _restore(target: Path) -> None:
    """Give its name back to what a process has moved away before it was killed. The caller has claimed the name."""
    name = glob.escape(target.name)
    moved = () if os.path.lexists(target) else target.parent.glob(f".{name}.*.partial/{name}{_REPLACED}")
    for old in [*moved][:1]:
        old.rename(target)
