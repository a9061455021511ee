"""The checkpoint that a run continues from where nobody has named one. Code in a file that only lies there never runs.

A file counts only if it can be read as ``torch.load(weights_only=True)`` reads it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ls_strategy.checkpoint.commit import newest_first
from ls_strategy.checkpoint.place import Place
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.checkpoint.target import META
from ls_strategy.errors import CheckpointError


@dataclass
class Continued:
    """What was found."""

    path: str | None = None
    """The newest checkpoint that can be read."""

    skipped: dict[str, str] = field(default_factory=dict)
    """Newer ones that cannot, and why."""

    def __str__(self) -> str:
        return "; ".join(f"{path}: {why}" for path, why in self.skipped.items())


def newest_readable(
    folders: Iterable[str | os.PathLike[str]], damage: Callable[[str], str] = lambda _: ""
) -> Continued:
    """Find the newest checkpoint in these folders that a run can be resumed from. Call it on one rank.

    What holds only weights does not count. The values of tensors are not read, so they may still be damaged.

    Args:
        folders: where to look.
        damage: gets the path of one that can be read; returns why it does not count, or nothing.
    """
    found = Continued()
    for path in newest_first(folders):
        try:
            checkpoint = read_checkpoint(path, weights_only=True)
        except (CheckpointError, OSError) as error:
            found.skipped[path] = _why(path, error)
            continue
        if "optimizer_states" not in checkpoint and "lr_schedulers" not in checkpoint:
            continue
        why = damage(path)
        if not why:
            found.path = path
            break
        found.skipped[path] = why
    return found


def _why(path: str, error: Exception) -> str:
    if not isinstance(error.__cause__, pickle.UnpicklingError):
        return str(error)
    return f"it has objects that torch.load(weights_only=True) does not build{_names_in(path)}"


def _names_in(path: str) -> str:
    """Name the classes and functions that a checkpoint would import, if they can be listed."""
    place = Place(path)
    try:
        with place.open(META, "rb") if place.fs.isdir(place.path) else place.open_itself() as file:
            names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # of any kind: it is no archive, or damaged
        return ""
    return f" ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" if names else ""
