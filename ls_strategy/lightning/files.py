"""Lightning's reader and writer of checkpoint files, which then know checkpoint folders too.

The one invariant: whatever is no folder of this package goes through Lightning's own functions, with their results and
their errors. Imports neither torch nor Lightning, so that it costs nothing until a folder is there.

::

    Model.load_from_checkpoint(path)  ──┐
    Trainer(strategy="ddp").fit(...)  ──┼── cloud_io._load ── fails, and it is a folder of ours ── `source.read_full`
    Fabric.load(path)                 ──┘
    TorchCheckpointIO.save_checkpoint ───── cloud_io._atomic_save, but where a folder of ours is ── `save.run_file`

These two names are private to Lightning, as those in `_compat.py` are, which would import torch.
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
"""Where Lightning's two packages have the reader and the writer."""

_IMPORTED_AS = ("_load", "pl_load", "_atomic_save")
"""Names under which other modules import them."""


def take_folders(module: ModuleType) -> None:
    """Let the reader and the writer in ``module``, one of `MODULES`, take folders of ours. Once; again does nothing."""
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
        except Exception:
            path = args[0] if args else kwargs.get("path_or_url")
            if not _is_ours(path):
                raise
        options = parameters.bind(*args, **kwargs).arguments
        return _read(path, options.get("map_location"), options.get("weights_only"))

    return load_any


def _replacing(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_any(checkpoint: Any, filepath: Any) -> Any:
        # Lightning would move its file into the folder, whose old contents would be what is loaded next.
        path = str(filepath).removeprefix("file://")
        if not Path(path).is_dir() or not _is_ours(path):
            return save(checkpoint, filepath)
        from ls_strategy.checkpoint.save import run_file

        return run_file(path, checkpoint)

    return save_any


def _is_ours(path: Any) -> bool:
    """Whether a path is a folder of ours; whatever goes wrong here, it is not."""
    if not isinstance(path, (str, os.PathLike)) or str(path).startswith("http"):
        return False
    try:
        from ls_strategy.checkpoint.target import is_ours

        return is_ours(os.fspath(path))
    except Exception:
        return False


def _read(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    from ls_strategy.checkpoint.source import OURS, read_full

    checkpoint = read_full(path, map_location=map_location, weights_only=weights_only)
    left_out = checkpoint.get(OURS, {}).get("left_out", ())
    if left_out:
        warnings.warn(
            f"{path} was saved without {len(left_out)} frozen parameters (save_frozen=False), {left_out[0]} among "
            "them. Where names are compared they are missing: pass strict=False, or set strict_loading = False on the "
            "module; ls_strategy.load_from_checkpoint knows them.",
            stacklevel=4,
        )
    return checkpoint
