"""Makes Lightning's reader and writer of checkpoint files handle checkpoint folders.

The one invariant: everything but a folder of this package goes through Lightning's own functions, with their results
and their errors. Imports neither torch nor Lightning, so that it costs nothing until there is a folder.

::

    Model.load_from_checkpoint(path)  ──┐
    Trainer(strategy="ddp").fit(...)  ──┼── cloud_io._load ── fails, and it is a folder of ours ── `source.read_full`
    Fabric.load(path)                 ──┘       or it is one on a web server      ── an error with the cure
    TorchCheckpointIO.save_checkpoint ───── cloud_io._atomic_save, except over a folder of ours ── `save.run_file`

These two private names are not in `_private.py`, which imports torch.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["MODULES", "take_folders"]

MODULES = ("lightning.fabric.utilities.cloud_io", "lightning_fabric.utilities.cloud_io")
"""The modules with the reader and the writer in Lightning's two packages."""

_IMPORTED_AS = ("_load", "pl_load", "_atomic_save")
"""Names under which other modules import them."""


def take_folders(module: ModuleType) -> None:
    """Make the reader and the writer in ``module``, one of `MODULES`, accept our folders. Idempotent."""
    for name, change in (("_load", _reading), ("_atomic_save", _replacing)):
        theirs = getattr(module, name)
        if hasattr(theirs, "__ls_strategy__"):
            continue
        ours = change(theirs)
        ours.__ls_strategy__ = True  # type: ignore[attr-defined]
        setattr(module, name, ours)
        for other in list(sys.modules.values()):
            for alias in _IMPORTED_AS:
                if getattr(other, "__dict__", {}).get(alias) is theirs:
                    setattr(other, alias, ours)


def _reading(load: Callable[..., Any]) -> Callable[..., Any]:
    from inspect import signature

    parameters = signature(load)

    @functools.wraps(load)
    def load_any(*args: Any, **kwargs: Any) -> Any:
        try:
            return load(*args, **kwargs)
        except Exception as error:
            path = args[0] if args else kwargs.get("path_or_url")
            if not _is_ours(path):
                _refuse_web_folder(path, error)
                raise
        options = parameters.bind(*args, **kwargs).arguments
        return _read(path, options.get("map_location"), options.get("weights_only"))

    return load_any


def _replacing(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_any(checkpoint: Any, filepath: Any) -> Any:
        # Lightning would move its file into the folder, and the next load would read the folder's old contents.
        path = str(filepath).removeprefix("file://")
        if not Path(path).is_dir() or not _is_ours(path):
            return save(checkpoint, filepath)
        from ls_strategy.checkpoint.save import run_file

        return run_file(path, checkpoint)

    return save_any


def _is_ours(path: Any) -> bool:
    """Return whether a path is a checkpoint folder of this package. Any error counts as False."""
    if not isinstance(path, (str, os.PathLike)) or str(path).startswith("http"):
        return False
    try:
        from ls_strategy.checkpoint.target import is_ours

        return is_ours(os.fspath(path))
    except Exception:
        return False


def _refuse_web_folder(path: Any, error: Exception) -> None:
    from ls_strategy.checkpoint.web import is_web, refuse_web_folder
    from ls_strategy.errors import CheckpointError

    if is_web(path):
        try:
            refuse_web_folder(path)
        except CheckpointError as refused:
            raise refused from error


def _read(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    from ls_strategy.checkpoint.source import OURS, as_fabric, read_full

    checkpoint = read_full(path, map_location=map_location, weights_only=weights_only)
    left_out = checkpoint.get(OURS, {}).get("left_out", ())
    if left_out:
        warnings.warn(
            f"{path} was saved without {len(left_out)} frozen parameters (checkpoint.frozen=False), such as "
            f"{left_out[0]}. A strict load reports them as missing: pass strict=False, or set strict_loading = False "
            "on the module, or use ls_strategy.load_from_checkpoint, which accepts this.",
            stacklevel=4,
        )
    return as_fabric(checkpoint)
