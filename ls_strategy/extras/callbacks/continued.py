"""The checkpoint that a run continues from where nobody has named one. Code in a file that only lies there never runs.

A file counts only if it can be read as ``torch.load(weights_only=True)`` reads it, and a small one only if its bytes
match their checksums: what is damaged would end this start and every later one.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs

from ls_strategy.checkpoint.commit import newest_first
from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.checkpoint.target import META
from ls_strategy.errors import CheckpointError, StateError
from ls_strategy.host.pytorch import rank_zero_warn

_CHECKED_BYTES = 2 << 30
"""Largest checkpoint of which all bytes are compared with their checksums, by one rank while the others wait."""


@dataclass
class Continued:
    """Result of a search for the newest readable checkpoint."""

    path: str | None = None  # the newest checkpoint that can be read
    skipped: dict[str, str] = field(default_factory=dict)  # newer ones that cannot, and why

    def __str__(self) -> str:
        return "; ".join(f"{path}: {why}" for path, why in self.skipped.items())


def newest_readable(folders: Iterable[str | os.PathLike[str]], damage: Callable[[str], str] | None = None) -> Continued:
    """Find the newest checkpoint in these folders that a run can be resumed from. Call it on one rank.

    What holds only weights does not count.

    Args:
        folders: where to look.
        damage: gets the path of one that can be read; returns why it does not count, or nothing. None: `_damage`.
    """
    found = Continued()
    for path in newest_first(folders):
        try:
            checkpoint = read_checkpoint(path, weights_only=True)
            if "optimizer_states" not in checkpoint and "lr_schedulers" not in checkpoint:
                continue
            why = (damage or _damage)(path)
        except (CheckpointError, OSError) as error:
            why = _why(path, error)
        if not why:
            found.path = path
            break
        found.skipped[path] = why
    return found


def _damage(path: str) -> str:
    """Return what is damaged in a local checkpoint that is read in a moment, or nothing."""
    if not CheckpointPath(path).local:
        return ""
    itself = Path(CheckpointPath(path).path)
    files = [file for file in itself.iterdir() if file.is_file()] if itself.is_dir() else [itself]
    return " ".join(verify_all(path)) if sum(file.stat().st_size for file in files) <= _CHECKED_BYTES else ""


def _why(path: str, error: Exception) -> str:
    if not isinstance(error.__cause__, pickle.UnpicklingError):
        return str(error)
    return f"it has objects that torch.load(weights_only=True) does not build{_names_in(path)}"


def _names_in(path: str) -> str:
    """Name the classes and functions that a checkpoint would import, if they can be listed."""
    place = CheckpointPath(path)
    try:
        with place.open(META, "rb") if place.fs.isdir(place.path) else place.open_itself() as file:
            names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # of any kind: it is no archive, or damaged
        return ""
    return f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" if names else ""


# --- the newest checkpoint of a run on disk, for an `ElasticTraining` whose snapshots are lost or damaged -------------


def newest_of_run(folders: Iterable[str], is_of_run: Callable[[str], bool]) -> Continued:
    """Return the newest checkpoint in these folders that is whole, if it belongs to the run. Call it on one rank.

    Its files are read in full: a damaged one would end every start of the run with the same error.
    """

    def damage(path: str) -> str:
        try:
            return " ".join(verify_all(path)) if is_of_run(path) else ""
        except (CheckpointError, StateError) as error:
            return str(error)

    found = newest_readable(folders, damage)
    if found.path is not None and not is_of_run(found.path):
        found.path = None
    return found


class _Unbuilt:
    """Takes the place of an object in a file that nobody has named: building the object could run code."""

    def __init__(self, *_: Any) -> None:
        """Accept any arguments."""


def run_of(path: str, key: str) -> str | None:
    """Return the run that a checkpoint on disk belongs to, or None. Builds none of its objects."""
    fs, bare = url_to_fs(path)
    with fs.open(f"{bare}/{META}" if fs.isdir(bare) else bare, "rb") as file:
        try:
            names = []
            if zipfile.is_zipfile(file):
                file.seek(0)
                names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            file.seek(0)
            with torch.serialization.safe_globals([(_Unbuilt, name) for name in names]):
                saved = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            rank_zero_warn(
                f"ElasticTraining: {path} is not continued from, since it cannot be read without running code in it. "
                "If you trust it, give it as ckpt_path."
            )
            return None
        except Exception as error:
            raise StateError(f"{path} cannot be read: {error}. Remove it, or give another ckpt_path.") from error
    run = saved.get("callbacks", {}).get(key, {}).get("run") if isinstance(saved, dict) else None
    return run if isinstance(run, str) else None
