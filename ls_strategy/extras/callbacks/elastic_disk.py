"""The newest checkpoint of a run on disk, for an `ElasticTraining` whose snapshots are lost or damaged."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from fsspec.core import url_to_fs

from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.target import META
from ls_strategy.errors import CheckpointError, StateError
from ls_strategy.extras.callbacks.continued import Continued, newest_readable
from ls_strategy.host.pytorch import rank_zero_warn


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
