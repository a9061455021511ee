"""Open the files of one DeepSpeed save without DeepSpeed.

::

    DIR/latest                                          the name of the newest save
    DIR/TAG/mp_rank_00_model_states.pt                  stages 0 to 2: names, shapes, buffers, the caller's own data
    DIR/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: the same, from every rank
    DIR/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   rank R's partition of fp32 weights and moments

Files are memory-mapped. Objects of DeepSpeed's classes become plain holders of their attributes. Only the loss scaler
is used.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from ls_strategy.checkpoint.place import open_file
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError


def is_deepspeed(path: str | os.PathLike[str]) -> bool:
    """Return whether DeepSpeed wrote this folder. A folder with a manifest is ours. Not collective."""
    return ":/" not in str(path) and not Path(path, MANIFEST).exists() and _folder(Path(path)) is not None


def _folder(path: Path) -> Path | None:
    """Return the folder of one save: ``path`` itself, or the newest save in it."""
    latest = path / "latest"
    tags = [latest.read_text(errors="replace").strip()] if latest.is_file() else []
    inside = [tag for tag in (*tags, "checkpoint") if tag == Path(tag).name]
    for folder in (path, *(path / tag for tag in inside)):
        if folder.is_dir() and any(folder.glob("*mp_rank_*_model_states.pt")):
            return folder
    return None


@dataclass
class Files:
    """The files of one save."""

    folder: Path
    models: list[dict[str, Any]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    """Optimizer states by rank. Empty without ZeRO."""

    @property
    def stage(self) -> int:
        """ZeRO stage: 0, 2 (stage 1 looks the same) or 3."""
        if not self.parts:
            return 0
        return 3 if "fp32_flat_groups" in self.parts[0] else 2


def open_save(path: str | os.PathLike[str], *, weights_only: bool = True) -> Files:
    """Open all files of a save.

    With ``weights_only``, build only objects that torch considers safe, and holders of DeepSpeed's.

    Raises:
        CheckpointError: There is no save, files are missing, or they were written with model parallelism.
    """
    folder = _folder(Path(path))
    if folder is None:
        raise CheckpointError(f"{path} is not a DeepSpeed checkpoint: it has no *_model_states.pt.")
    models, parts = (_by_rank(folder, f"*_{kind}_states.pt") for kind in ("model", "optim"))
    _check_parallel(folder, [*models, *parts])
    files = Files(folder, [_load(file, weights_only=weights_only) for file in models])
    files.parts = [_load(file, weights_only=weights_only)["optimizer_state_dict"] for file in parts]
    _check_whole(files)
    return files


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda p: [int(number) for number in re.findall(r"\d+", p.name)])


def _check_parallel(folder: Path, files: Sequence[Path]) -> None:
    experts = [p.name for p in files if "expert" in p.name or "expp_rank" in p.name]
    partitioned = [p.name for p in files if "mp_rank_00" not in p.name]
    if experts or partitioned or any(folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} was written with pipeline, tensor or expert parallelism. The layout of such files depends on "
            "the model. Load it into DeepSpeed without that, and save it again."
        )


def _check_whole(files: Files) -> None:
    if not files.parts:
        return
    count = files.parts[0].get("partition_count", len(files.parts))
    ranks = max(count) if isinstance(count, (list, tuple)) else count
    if ranks != len(files.parts) or (files.stage == 3 and ranks != len(files.models)):
        raise CheckpointError(
            f"{files.folder} was written by {ranks} ranks, but has the files of {len(files.parts)}. Copy the missing "
            "*_optim_states.pt and *_model_states.pt into it."
        )
    if any("param_shapes" not in model for model in files.models):
        raise CheckpointError(
            f"{files.folder}: the model states have no param_shapes. An older DeepSpeed wrote them: load the "
            "checkpoint into a newer one, and save it again."
        )


class _Holder:
    """Replaces an object of DeepSpeed and has its attributes."""

    def __init__(self, *_: Any) -> None:
        """Accept any arguments."""


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        """Replace DeepSpeed's classes by holders."""
        return _Holder if module.split(".")[0] == "deepspeed" else super().find_class(module, name)


class _Pickle:
    """The parts of a pickle module that ``torch.load`` needs."""

    Unpickler = _Unpickler
    load = staticmethod(lambda file, **kwargs: _Unpickler(file, **kwargs).load())


def _load(file: Path, *, weights_only: bool) -> dict[str, Any]:
    try:
        with open_file(file) as opened:
            mappable = zipfile.is_zipfile(opened)
        if not weights_only:
            return torch.load(file, map_location="cpu", mmap=mappable, weights_only=False, pickle_module=_Pickle)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file) if mappable else []
        holders: list[Any] = [(_Holder, name) for name in names if name.split(".")[0] == "deepspeed"]
        with torch.serialization.safe_globals(holders):
            return torch.load(file, map_location="cpu", mmap=mappable, weights_only=True)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{file} has an object whose class cannot be imported here: {error}. Run where the training's modules "
            "can be imported (PYTHONPATH)."
        ) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} cannot be read, or has objects that torch does not consider safe: {error}. If you trust the "
            "checkpoint, read it with weights_only=False."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
