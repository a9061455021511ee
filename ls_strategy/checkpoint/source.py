"""Read any checkpoint as Lightning's dictionary. Tensors are read when they are used.

The tensors of a folder are `SavedTensor`; a single file is memory-mapped by ``torch.load``.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._torch import make_wrapper, tree_map
from ls_strategy.checkpoint.files import Reader
from ls_strategy.checkpoint.inert import read_inert
from ls_strategy.checkpoint.manifest import Manifest, read_manifest, verify
from ls_strategy.checkpoint.place import CheckpointPath, open_file
from ls_strategy.checkpoint.reshard import SavedTensor, assemble
from ls_strategy.checkpoint.target import MANIFEST, META, METADATA
from ls_strategy.checkpoint.web import is_web, refuse_web_folder
from ls_strategy.errors import CheckpointError
from ls_strategy.meta_init.lazy import LazyTensor

OURS = "ls_strategy"
"""Key of the strategy's own data: its position in the training data, names of frozen parameters that were left out."""

RANDOM = "random_states"
"""Key of the ranks' random number generator states. In a single file it is below `OURS`."""


VERSIONS = "versions"
"""Key of the versions of modules in a folder, below `OURS`. A single file has them where torch has."""

FABRIC = "fabric"
"""Key of what a Fabric saved besides its module and optimizers; below `OURS`, of the names of those two."""


def as_fabric(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what a Fabric saved under its own keys; any other checkpoint is returned as it is."""
    names = checkpoint.get(OURS, {}).get(FABRIC)
    if names is None:
        return checkpoint
    optimizers = dict(zip(names["optimizers"], checkpoint.get("optimizer_states", []), strict=True))
    return {names["module"]: checkpoint["state_dict"], **optimizers, **checkpoint.get(FABRIC, {})}


def versions_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the versions of modules in a state dict of torch, by module, for modules that read older ones."""
    return getattr(state, "_metadata", None)


def with_versions(state: Mapping[str, Any], versions: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state dict with the versions of modules where torch has and looks for them."""
    if versions is None:
        return dict(state)
    result: Any = OrderedDict(state)
    result._metadata = OrderedDict(versions)
    return result


@dataclass
class Weights:
    """Weights and buffers of a model."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name in the state dict; tied tensors under their first name only."""

    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied tensors, to their name in ``tensors``."""

    objects: dict[str, Any] = field(default_factory=dict)
    """Entries that are not tensors: ``get_extra_state`` of modules."""

    names: list[str] = field(default_factory=list)
    """All names, in the order of the state dict."""

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> Weights:
        """Sort the entries of a state dict by kind. The first name of tied tensors counts."""
        weights = cls(names=list(state_dict))
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
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict with all names, in their order. Tied names share one tensor."""
        tied = {other: self.tensors[name] for other, name in self.aliases.items()}
        merged = {**self.tensors, **tied, **self.objects}
        return {name: merged[name] for name in self.names}


def _place(tensor: Tensor, places: dict[Reader, dict[str, Any]]) -> Any:
    """Return an id of a tensor's storage, equal for tied tensors. None if the tensor is empty."""
    if not tensor.numel():
        return None
    if not isinstance(tensor, SavedTensor):
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    if tensor.reader not in places:
        places[tensor.reader] = _first_chunks(tensor.reader)
    return places[tensor.reader][tensor.reader.paths[tensor.path]]


def _first_chunks(reader: Reader) -> dict[str, Any]:
    """Return file and byte of every tensor's first chunk, by DCP key."""
    result: dict[str, Any] = {}
    for index, info in reader.metadata.storage_data.items():
        found = (tuple(index.offset or ()), info.relative_path, info.offset)
        result[index.fqn] = min(result.get(index.fqn, found), found)
    return result


class LazyRows(LazyTensor):
    """Rows of a tensor that is read when it is used."""

    base: LazyTensor
    first: int

    @staticmethod
    def __new__(cls: Any, base: LazyTensor, start: int, stop: int) -> LazyRows:  # noqa: D102 - see the class
        shape = (stop - start, *base.shape[1:])
        self = make_wrapper(cls, shape, base.dtype)
        self.base, self.first = base, start * math.prod(base.shape[1:])
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyRows({self.base!r}, shape={tuple(self.shape)})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        return self.base.range(self.first + start, self.first + stop)


def rows_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return ``tensor[start:stop]``. A lazy tensor is not read."""
    return LazyRows(tensor, start, stop) if isinstance(tensor, LazyTensor) else tensor[start:stop]


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is a folder.

    Raises:
        CheckpointError: Nothing has this name, or it is a pipe, a device, or a folder on a web server.
    """
    if is_web(path):
        refuse_web_folder(path)
        return False
    place = CheckpointPath(path)
    if not place.exists():
        raise CheckpointError(f"{place} does not exist. Give a checkpoint: a folder, or a .ckpt file.")
    place.refuse_devices()
    return bool(place.fs.isdir(place.path))


def open_folder(path: str | os.PathLike[str]) -> tuple[Reader, Manifest | None]:
    """Open a committed folder of ours, or a folder without manifest from another Lightning strategy.

    Raises:
        CheckpointError: It is incomplete.
    """
    place = CheckpointPath(path)
    foreign = not place.exists(MANIFEST) and place.exists(META) and place.exists(METADATA)
    manifest = None if foreign else read_manifest(path)
    reader = Reader(path, manifest)
    if foreign and any(reader.under(RANDOM)):
        read_manifest(path)  # ours, but without a manifest: raises
    return reader, manifest


def read_weights(path: str | os.PathLike[str], *, average: bool = False) -> Weights:
    """Read the weights, or with ``average`` the average of `ShardedEMA`, from a folder or file.

    Of a folder nothing else is built, so that no class of the training must be importable.

    Raises:
        CheckpointError: The checkpoint is incomplete, or has no such weights.
    """
    key = "ema_state_dict" if average else "state_dict"
    if is_folder(path):
        reader, _ = open_folder(path)
        paths = [p for root in ((key,) if average else (key, "model")) for p in reader.under(root)]
        tensors = [p for p in paths if reader.tensor_metadata(p) is not None]
        weights = Weights.of({".".join(p[1:]): SavedTensor(reader, p) for p in tensors})
    else:
        found = _load_file(path, weights_only=True).get(key)
        weights = Weights.of(found if isinstance(found, Mapping) else {})
    if not weights.tensors:
        cure = "Train with the ShardedEMA callback to have an average." if average else "Give a Lightning checkpoint."
        raise CheckpointError(f"{path} has no tensors under {key!r}. {cure}")
    return weights


def read_checkpoint(
    path: str | os.PathLike[str], *, weights_only: bool | None = None, map_location: Any = "cpu"
) -> dict[str, Any]:
    """Read Lightning's checkpoint dictionary, as ``torch.load`` of a single file returns it.

    Args:
        path: Folder or file.
        weights_only: As for ``torch.load``. None: torch's default.
        map_location: As for ``torch.load``. `LazyTensor`s of a folder ignore it.

    Raises:
        CheckpointError: The checkpoint is incomplete, or contains an object that cannot be built.
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
    versions = (checkpoint.get(OURS) or {}).pop(VERSIONS, None)
    if extra:
        checkpoint[OURS] = {**(checkpoint.get(OURS) or {}), **extra}
    for key in ("state_dict", "ema_state_dict"):
        if key in checkpoint:
            checkpoint[key] = with_versions(Weights.of(checkpoint[key]).state_dict(), versions)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [numbered(s, str(reader.place)) for s in checkpoint["optimizer_states"]]
    _add_scaler_state(checkpoint)
    return checkpoint


def read_full(
    path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """`read_checkpoint` with all tensors in memory, for callers that do not support `LazyTensor`. Tied ones stay tied.

    With ``map_location=None`` sharded tensors go to the CPU.
    """
    checkpoint = read_checkpoint(path, weights_only=weights_only, map_location=map_location)
    device = device_of(map_location)
    loaded: dict[int, Tensor] = {}

    def load(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
            return leaf
        if id(leaf) not in loaded:
            loaded[id(leaf)] = (leaf.materialize() if isinstance(leaf, LazyTensor) else leaf).to(device)
        return loaded[id(leaf)]

    result = tree_map(load, checkpoint)
    for key in ("state_dict", "ema_state_dict"):
        if isinstance(result.get(key), dict):
            result[key] = with_versions(result[key], versions_of(checkpoint[key]))
    return result


def device_of(map_location: Any) -> torch.device:
    """Return the device to which ``torch.load`` maps CPU tensors."""
    if map_location is None:
        return torch.device("cpu")
    file = io.BytesIO()
    torch.save(torch.empty(0), file)
    file.seek(0)
    return torch.load(file, map_location=map_location, weights_only=True).device


def _add_scaler_state(checkpoint: dict[str, Any]) -> None:
    """Add the loss scale in the form of Lightning's own precision plugin, with torch's growth factors."""
    state = checkpoint.get("ZeROPrecision")
    if not state or "MixedPrecision" in checkpoint:
        return
    growth = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    tracker = int(state["good_steps"]) % growth["growth_interval"]
    checkpoint["MixedPrecision"] = {"scale": float(state["scale"]), **growth, "_growth_tracker": tracker}


def numbered(state: dict[str, Any], path: str) -> dict[str, Any]:
    """Return an optimizer's state dict as torch writes it, with parameters numbered through all groups.

    Raises:
        CheckpointError: A state belongs to no parameter of the groups. The message names ``path``.
    """
    groups = state["param_groups"]
    names = [name for group in groups for name in group["params"]]
    position = {name: i for i, name in enumerate(names)}
    unknown = sorted(map(str, state.get("state", {}).keys() - position.keys()))
    if unknown:
        raise CheckpointError(
            f"{path}: an optimizer has a state for {', '.join(unknown)}, but no parameter group contains it. Another "
            "program wrote the folder."
        )
    states = {position[name]: values for name, values in state.get("state", {}).items()}
    groups = [{**group, "params": [position[n] for n in group["params"]]} for group in groups]
    return {**state, "state": dict(sorted(states.items())), "param_groups": groups}


def _load_meta(path: str | os.PathLike[str], manifest: Manifest | None, **arguments: Any) -> dict[str, Any]:
    place = CheckpointPath(path)
    if manifest is not None:
        if META not in manifest.files:
            raise CheckpointError(f"{place} has no {META}: it was not saved by a Trainer.")
        verify(path, META, manifest.files[META])
    with place.open(META, "rb") as file:
        return _load(f"{place}/{META}", file, **arguments)


def _load_file(path: str | os.PathLike[str], **arguments: Any) -> dict[str, Any]:
    place = CheckpointPath(path)
    with place.open_itself() as file:
        if not place.local:
            return _load(str(place), file, **arguments)
        mappable = file.read(4) == b"PK\x03\x04"  # torch before 1.6 wrote no zip archives
    return _load(str(place), place.path, mmap=mappable, **arguments)


def _load(name: str, file: Any, *, map_location: Any = "cpu", **arguments: Any) -> dict[str, Any]:
    try:
        found = torch.load(file, map_location=map_location, **arguments)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{name} has an object whose class cannot be imported here: {error}. Run where the training's modules "
            "can be imported (PYTHONPATH), or export only the weights: safetensors do not need them."
        ) from error
    except Exception as error:  # of any kind: a damaged pickle may do anything that a pickle can
        refuse_damaged(name, file, error)
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{name} has objects that torch does not consider safe: {error}. If you trust the checkpoint, read it "
                "with weights_only=False, or pass their classes to torch.serialization.add_safe_globals."
            ) from error
        raise CheckpointError(f"{name} cannot be read: {type(error).__name__}: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} holds a {type(found).__name__}, but a Lightning checkpoint is a dictionary.")
    return found


def refuse_damaged(name: str, file: Any, error: BaseException) -> None:
    """Raise a clear error if what ``torch.load`` could not read is no file of ``torch.save`` at all.

    Args:
        name: for messages.
        file: a path, or a file that can be sought.
        error: of ``torch.load``.

    Raises:
        CheckpointError: ``torch.save`` did not write it, or it is damaged.
    """
    try:
        if hasattr(file, "seek"):
            file.seek(0)
            read_inert(file, name)
        else:
            with open_file(file) as opened:
                read_inert(opened, name)
    except CheckpointError as damaged:
        raise damaged from error
