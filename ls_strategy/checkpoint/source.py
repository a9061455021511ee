"""A checkpoint as Lightning's dictionary, whichever way it was saved; tensors are read when they are used.

A folder gives `SavedTensor`, a file is mapped into memory by ``torch.load``.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._compat import tree_map
from ls_strategy.checkpoint.files import Reader
from ls_strategy.checkpoint.manifest import Manifest, read_manifest, verify
from ls_strategy.checkpoint.place import Place
from ls_strategy.checkpoint.reshard import SavedTensor, assemble
from ls_strategy.checkpoint.target import MANIFEST, META, METADATA
from ls_strategy.errors import CheckpointError
from ls_strategy.zero.lazy import LazyTensor

OURS = "ls_strategy"
"""Key for what only the strategy reads: where in the data it was, which frozen parameters were left out."""

RANDOM = "random_states"
"""Key of the states of the ranks' random number generators; in a single file, below `OURS`."""


@dataclass
class Weights:
    """Weights and buffers of a model."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name in the state dict, without the further names of tied ones."""

    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied tensors, to their name in ``tensors``."""

    objects: dict[str, Any] = field(default_factory=dict)
    """Entries that are no tensors: ``get_extra_state`` of modules."""

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> Weights:
        """Sort a state dict's entries; of tied ones the first gives the name."""
        weights = cls()
        first: dict[Any, str] = {}
        places: dict[Reader, dict[str, Any]] = {}
        for name, value in state_dict.items():
            if not isinstance(value, Tensor):
                weights.objects[name] = value
                continue
            place = _place(value, places) or name
            if place in first:
                weights.aliases[name] = first[place]
            else:
                first[place] = name
                weights.tensors[name] = value
        weights.tensors = {name: weights.tensors[name] for name in sorted(weights.tensors, key=natural_order)}
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Under every name; tied names share one tensor."""
        tied = {other: self.tensors[name] for other, name in self.aliases.items()}
        merged = {**self.tensors, **tied, **self.objects}
        return {name: merged[name] for name in sorted(merged, key=natural_order)}


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sorts ``blocks.9`` before ``blocks.10``."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def _place(tensor: Tensor, places: dict[Reader, dict[str, Any]]) -> Any:
    """Where a tensor's elements are: the same for tied ones. None if it has none."""
    if not tensor.numel():
        return None
    if not isinstance(tensor, SavedTensor):
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    if tensor.reader not in places:
        places[tensor.reader] = _first_chunks(tensor.reader)
    return places[tensor.reader][tensor.reader.paths[tensor.path]]


def _first_chunks(reader: Reader) -> dict[str, Any]:
    """File and byte of every tensor's first chunk, by DCP's key."""
    result: dict[str, Any] = {}
    for index, info in reader.metadata.storage_data.items():
        found = (tuple(index.offset or ()), info.relative_path, info.offset)
        result[index.fqn] = min(result.get(index.fqn, found), found)
    return result


class Rows(LazyTensor):
    """Rows of a tensor that is read when it is used."""

    base: LazyTensor
    first: int

    @staticmethod
    def __new__(cls: Any, base: LazyTensor, start: int, stop: int) -> Rows:  # noqa: D102 - see the class
        shape = (stop - start, *base.shape[1:])
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=base.dtype)  # type: ignore[attr-defined]
        self.base, self.first = base, start * math.prod(base.shape[1:])
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Rows({self.base!r}, shape={tuple(self.shape)})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        return self.base.range(self.first + start, self.first + stop)


def rows_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """``tensor[start:stop]``; a lazy one stays unread."""
    return Rows(tensor, start, stop) if isinstance(tensor, LazyTensor) else tensor[start:stop]


def as_bytes(tensor: Tensor) -> memoryview:
    """Memory of a contiguous CPU tensor of any dtype. Copies nothing."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint is a folder.

    Raises:
        CheckpointError: there is nothing of this name.
    """
    place = Place(path)
    if not place.exists():
        raise CheckpointError(f"{place} does not exist. Give a checkpoint: a folder, or a .ckpt file.")
    return bool(place.fs.isdir(place.path))


def open_folder(path: str | os.PathLike[str]) -> tuple[Reader, Manifest | None]:
    """A committed folder of ours, or one that another strategy of Lightning wrote, which has no manifest.

    Raises:
        CheckpointError: it is not whole.
    """
    place = Place(path)
    foreign = not place.exists(MANIFEST) and place.exists(META) and place.exists(METADATA)
    manifest = None if foreign else read_manifest(path)
    reader = Reader(path, manifest)
    if foreign and any(reader.under(RANDOM)):
        read_manifest(path)  # ours, and without a manifest: says why that is refused
    return reader, manifest


def read_weights(path: str | os.PathLike[str], *, average: bool = False) -> Weights:
    """The weights alone. Of a folder nothing else is built, so that no class of the training need be importable.

    Args:
        path: folder or file.
        average: the average of the weights that `ShardedEMA` keeps.

    Raises:
        CheckpointError: the checkpoint is not whole, or has none.
    """
    key = "ema_state_dict" if average else "state_dict"
    if is_folder(path):
        reader, _ = open_folder(path)
        paths = [p for root in (key, *(() if average else ("model",))) for p in reader.under(root)]
        tensors = [p for p in paths if reader.tensor_metadata(p) is not None]
        weights = Weights.of({".".join(p[1:]): SavedTensor(reader, p) for p in tensors})
    else:
        weights = Weights.of(_load_file(path, weights_only=True).get(key, {}))
    if not weights.tensors:
        cure = "Train with the ShardedEMA callback to have an average." if average else "Give a Lightning checkpoint."
        raise CheckpointError(f"{path} has no tensors under {key!r}. {cure}")
    return weights


def read_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None, map_location: Any = "cpu"
) -> dict[str, Any]:
    """Lightning's checkpoint dictionary, as ``torch.load`` of a single file gives it.

    Args:
        path: folder or file.
        weights_only: whether ``torch.load`` may build only what it holds for safe. None: torch's own default.
        map_location: as for ``torch.load``; of a folder for what is in memory, which `LazyTensor` are not.

    Raises:
        CheckpointError: the checkpoint is not whole, or something in it cannot be built.
    """
    if not is_folder(path):
        return _load_file(path, weights_only=weights_only, map_location=map_location)
    reader, manifest = open_folder(path)
    safe = True if weights_only is None else weights_only
    meta = _load_meta(path, manifest, weights_only=weights_only, map_location=map_location)
    checkpoint = assemble(reader, meta, weights_only=safe)
    extra: dict[str, Any] = {RANDOM: checkpoint.pop(RANDOM)} if RANDOM in checkpoint else {}
    if manifest is not None and manifest.left_out:
        extra["left_out"] = manifest.left_out
    if extra:
        checkpoint[OURS] = {**(checkpoint.get(OURS) or {}), **extra}
    for key in ("state_dict", "ema_state_dict"):
        if key in checkpoint:
            checkpoint[key] = Weights.of(checkpoint[key]).state_dict()
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [numbered(s, str(reader.place)) for s in checkpoint["optimizer_states"]]
    _add_scaler_state(checkpoint)
    return checkpoint


def read_full(
    path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """`read_checkpoint` with every tensor in memory, for what knows nothing of `LazyTensor`. Tied ones stay tied.

    Args:
        path: folder or file.
        map_location: as for ``torch.load``. None: what ranks hold in parts goes to the CPU.
        weights_only: as for `read_checkpoint`.

    Raises:
        CheckpointError: the checkpoint is not whole, or something in it cannot be built.
    """
    checkpoint = read_checkpoint(path, weights_only=weights_only, map_location=map_location)
    device = device_of(map_location)
    brought: dict[int, Tensor] = {}

    def load(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
            return leaf
        if id(leaf) not in brought:
            brought[id(leaf)] = (leaf.materialize() if isinstance(leaf, LazyTensor) else leaf).to(device)
        return brought[id(leaf)]

    return tree_map(load, checkpoint)


def device_of(map_location: Any) -> torch.device:
    """Where ``torch.load`` would put a tensor of the CPU."""
    if map_location is None:
        return torch.device("cpu")
    file = io.BytesIO()
    torch.save(torch.empty(0), file)
    file.seek(0)
    return torch.load(file, map_location=map_location, weights_only=True).device


def _add_scaler_state(checkpoint: dict[str, Any]) -> None:
    """The loss scale also as Lightning's own precision plugin has it, with torch's own growth."""
    state = checkpoint.get("ZeROPrecision")
    if not state or "MixedPrecision" in checkpoint:
        return
    growth = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    tracker = int(state["good_steps"]) % growth["growth_interval"]
    checkpoint["MixedPrecision"] = {"scale": float(state["scale"]), **growth, "_growth_tracker": tracker}


def numbered(state: dict[str, Any], path: str) -> dict[str, Any]:
    """An optimizer's state dict as torch writes it: parameters are numbered through all groups.

    Raises:
        CheckpointError: a state is of no parameter of the groups; ``path`` is named.
    """
    groups = state["param_groups"]
    names = [name for group in groups for name in group["params"]]
    position = {name: i for i, name in enumerate(names)}
    unknown = sorted(map(str, state.get("state", {}).keys() - position.keys()))
    if unknown:
        raise CheckpointError(
            f"{path}: an optimizer has a state of {', '.join(unknown)}, but no parameter group that contains "
            "it. Something else than this package wrote the folder."
        )
    states = {position[name]: values for name, values in state.get("state", {}).items()}
    groups = [{**group, "params": [position[n] for n in group["params"]]} for group in groups]
    return {**state, "state": dict(sorted(states.items())), "param_groups": groups}


def _load_meta(path: str | os.PathLike[str], manifest: Manifest | None, **arguments: Any) -> dict[str, Any]:
    place = Place(path)
    if manifest is not None:
        if META not in manifest.files:
            raise CheckpointError(f"{place} has no {META}: it was not saved by a Trainer.")
        verify(path, META, manifest.files[META])
    with place.open(META, "rb") as file:
        return _load(f"{place}/{META}", file, **arguments)


def _load_file(path: str | os.PathLike[str], **arguments: Any) -> dict[str, Any]:
    place = Place(path)
    if not place.local:
        with place.fs.open(place.path, "rb") as file:
            return _load(str(place), file, **arguments)
    with Path(place.path).open("rb") as file:
        mappable = file.read(4) == b"PK\x03\x04"  # files of torch before 1.6 are no zip archives
    return _load(str(place), place.path, mmap=mappable, **arguments)


def _load(name: str, file: Any, *, map_location: Any = "cpu", **arguments: Any) -> dict[str, Any]:
    try:
        found = torch.load(file, map_location=map_location, **arguments)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} has objects that torch does not hold for safe: {error}. If you trust the checkpoint, read it "
            "with weights_only=False; or name their classes to torch.serialization.add_safe_globals."
        ) from error
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{name} has an object whose class cannot be imported here: {error}. Run where the training's own modules "
            "can be imported (PYTHONPATH), or take the weights alone: safetensors need none of them."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} holds a {type(found).__name__}, a Lightning checkpoint is a dictionary.")
    return found
