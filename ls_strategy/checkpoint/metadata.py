"""The index of a checkpoint folder: which file holds which box of which tensor.

::

    index.json    read by this package: JSON, so that opening a folder builds no object that a file names
    .metadata     the same for the tools of ``torch.distributed.checkpoint`` (DCP): a pickle of torch's classes

Folders of other strategies and of earlier versions have only ``.metadata``. It is read without building the objects
that it names: every class becomes a plain record of its pickled state, and only the names in `_NAMES` are accepted.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ls_strategy._torch import StorageInfo
from ls_strategy.checkpoint.manifest import FileRecord, Manifest, check
from ls_strategy.checkpoint.place import CheckpointPath, sync_file
from ls_strategy.checkpoint.target import INDEX, METADATA
from ls_strategy.errors import CheckpointError

Path = tuple[str, ...]
"""Keys that lead to a value in the checkpoint: ``("optimizer_0", "state", "blocks.0.weight", "exp_avg")``."""


@dataclass(frozen=True)
class Item:
    """Location of one chunk of a tensor, or of one object."""

    path: Path
    shape: tuple[int, ...] | None
    """Shape of the full tensor; None for an object."""

    dtype: torch.dtype | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First byte in the file."""

    length: int
    """Bytes."""

    def to_plain(self) -> list[Any]:
        """Return it in JSON types."""
        shape = None if self.shape is None else list(self.shape)
        dtype = None if self.dtype is None else _name_of(self.dtype)
        return [list(self.path), shape, dtype, list(self.offsets), list(self.sizes), self.start, self.length]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Item:
        """Parse the result of `to_plain`.

        Raises:
            ValueError, TypeError: It is malformed.
        """
        path, shape, dtype, offsets, sizes, start, length = plain
        return cls(
            tuple(map(str, path)),
            None if shape is None else _sizes(shape),
            None if dtype is None else _dtype(dtype),
            _sizes(offsets),
            _sizes(sizes),
            *_sizes([start, length]),
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def key_of(path: Path) -> str:
    """Return DCP's flat key."""
    return ".".join(path)


def merge(items: Iterable[tuple[str, Item]], aliases: Mapping[Path, Path]) -> Metadata:
    """Merge the ``(file, item)`` of all ranks. ``aliases``: further paths of tensors among them, for tied parameters.

    Raises:
        ValueError: Chunks of a tensor contradict each other or lie outside of it.
    """
    metadata = Metadata({}, {}, {}, version="1.0.0")
    also: dict[Path, list[Path]] = {}
    for other, path in aliases.items():
        also.setdefault(path, []).append(other)
    for file, item in items:
        for path in (item.path, *also.get(item.path, ())):
            _add(metadata, file, item, path)
    return metadata


def _add(metadata: Metadata, file: str, item: Item, path: Path) -> None:
    key = key_of(path)
    metadata.planner_data[key] = path
    info = StorageInfo(file, item.start, item.length)
    if item.shape is None or item.dtype is None:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = info
        return
    shape = torch.Size(item.shape)
    state = metadata.state_dict_metadata.setdefault(key, TensorStorageMetadata(TensorProperties(item.dtype), shape, []))
    if not isinstance(state, TensorStorageMetadata) or state.size != shape or state.properties.dtype != item.dtype:
        raise ValueError(f"{key} has chunks of different shapes or dtypes")
    _check_box(key, item.shape, item.offsets, item.sizes)
    state.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
    metadata.storage_data[MetadataIndex(key, item.offsets)] = info


def _check_box(key: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    boxes = zip(offsets, sizes, shape, strict=True)
    if any(at < 0 or size < 0 or at + size > full for at, size, full in boxes):
        raise ValueError(f"{key} has a chunk at {list(offsets)} of sizes {list(sizes)}, outside of {list(shape)}")


# --- writing ---------------------------------------------------------------------------------------------------------


def write_metadata(
    place: CheckpointPath,
    items: Iterable[tuple[str, Item]],
    aliases: Mapping[Path, Path],
    order: Callable[[Path], tuple[int, int]] | None = None,
) -> dict[str, FileRecord]:
    """Write ``index.json`` and DCP's ``.metadata``. Rank 0 only.

    See `merge` for the arguments. ``order`` is the sort key of the paths; by default they stay as they come.
    """
    metadata = merge(items, aliases)
    if order is not None:
        entries = sorted(metadata.state_dict_metadata.items(), key=lambda e: order(metadata.planner_data[e[0]]))
        metadata.state_dict_metadata = dict(entries)
    return {
        INDEX: _write(place, INDEX, to_json(metadata).encode()),
        METADATA: _write(place, METADATA, pickle.dumps(metadata)),
    }


def _write(place: CheckpointPath, name: str, data: bytes) -> FileRecord:
    with place.open(name, "wb") as file:
        file.write(data)
        sync_file(file)
    return FileRecord(len(data), [(0, len(data), zlib.crc32(data))])


def to_json(metadata: Metadata) -> str:
    """Return ``index.json``: entries in checkpoint order, with chunks as ``[file, start, length, offsets, sizes]``."""
    files = sorted({info.relative_path for info in metadata.storage_data.values()})
    numbers = {file: number for number, file in enumerate(files)}
    entries: dict[str, dict[str, Any]] = {}
    boxes: dict[Any, list[int]] = {}
    for key, state in metadata.state_dict_metadata.items():
        entries[key] = {"path": list(metadata.planner_data[key])}
        if isinstance(state, TensorStorageMetadata):
            entries[key] |= {"shape": list(state.size), "dtype": _name_of(state.properties.dtype)}
            boxes |= {(key, tuple(chunk.offsets)): list(chunk.sizes) for chunk in state.chunks}
        entries[key]["chunks"] = []
    for index, info in metadata.storage_data.items():
        offsets = list(index.offset or ())
        sizes = boxes.get((index.fqn, tuple(offsets)), [])
        entries[index.fqn]["chunks"].append([numbers[info.relative_path], info.offset, info.length, offsets, sizes])
    return json.dumps({"format": 1, "files": files, "entries": list(entries.values())})


# --- reading ---------------------------------------------------------------------------------------------------------


def read_metadata(place: CheckpointPath, manifest: Manifest | None) -> Metadata:
    """Read the index of a folder without building the objects that it names.

    ``manifest`` is None if another program wrote the folder with DCP.

    Raises:
        CheckpointError: The index is damaged or cannot be read.
    """
    if manifest is None:
        name, data = METADATA, _read(place, METADATA, None)
    else:  # verify both, parse one
        found = {known: _read(place, known, manifest) for known in (METADATA, INDEX) if known in manifest.files}
        if not found:
            raise CheckpointError(f"{place}: the manifest names no {METADATA}. Resume from another checkpoint.")
        name, data = list(found.items())[-1]
    try:
        metadata = from_json(data) if name == INDEX else from_pickle(data)
        _check_files(metadata, manifest)
    except Exception as error:
        raise CheckpointError(f"{place}/{name} cannot be read: {error}") from error
    return metadata


def _read(place: CheckpointPath, name: str, manifest: Manifest | None) -> bytes:
    try:
        with place.open(name, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise CheckpointError(f"{place} has no {name}: it is not a sharded checkpoint.") from None
    for offset, length, crc in manifest.files[name].parts if manifest is not None else ():
        check(place, name, offset, data[offset : offset + length], crc)
    return data


def _check_files(metadata: Metadata, manifest: Manifest | None) -> None:
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        if manifest is not None and name not in manifest.files:
            raise ValueError(f"it names the file {name}, which the manifest does not")
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"it names the file {name}, which is not in the folder")


def from_json(data: bytes) -> Metadata:
    """Parse the result of `to_json`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is malformed.
    """
    raw = json.loads(data)
    if raw["format"] != 1:
        raise ValueError(f"its format is {raw['format']}, and this version reads 1. Update ls_strategy")
    return merge(_items(raw), {})


def _items(raw: dict[str, Any]) -> Iterable[tuple[str, Item]]:
    for entry in raw["entries"]:
        shape, dtype = entry.get("shape"), entry.get("dtype")
        for file, start, length, offsets, sizes in entry["chunks"]:
            name = raw["files"][_sizes([file])[0]]
            yield name, Item.from_plain([entry["path"], shape, dtype, offsets, sizes, start, length])


def _sizes(values: Any) -> tuple[int, ...]:
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise ValueError(f"{values} is not a list of sizes")
    return tuple(values)


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this torch")
    return found


# --- reading .metadata -----------------------------------------------------------------------------------------------


class _Record:
    """Holds the pickled arguments and state of an object in its place."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _member(kind: Any, name: Any) -> _Record:
    """Stand for ``builtins.getattr``, by which Python 3.11.0 to 3.11.3 pickles members of enumerations."""
    if not (isinstance(kind, type) and issubclass(kind, _Record) and isinstance(name, str)):
        raise pickle.UnpicklingError("it names builtins.getattr, which no checkpoint needs")
    return kind(name)


_CLASSES = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
_PATHS = {name: None for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}
_NAMES: dict[str, dict[str, Any]] = {
    "torch.distributed.checkpoint.metadata": {
        name: None for name in (*_CLASSES, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": None},
    "torch.serialization": {"_get_layout": None},
    "torch": {"Size": None, **{name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": {"OrderedDict": OrderedDict, "defaultdict": defaultdict},
    "builtins": {
        "getattr": _member,
        **{kind.__name__: kind for kind in (dict, list, set, tuple, int, str, frozenset)},
    },
}
"""Classes and functions that ``.metadata`` may name. None: a `_Record` takes its place."""


class _MetadataUnpickler(pickle.Unpickler):
    """Builds records, containers and numbers. Imports nothing and does not resolve dotted names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._records: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        found = _NAMES[module][name]
        if found is None:  # a class for this load only, because a pickle can modify it
            found = self._records.setdefault(name, type(name, (_Record,), {}))
        return found


def from_pickle(data: bytes) -> Metadata:
    """Parse DCP's ``.metadata``.

    Raises:
        Exception: Of any kind, if DCP did not write it.
    """
    found = _fields(_MetadataUnpickler(data).load(), "Metadata")
    metadata = Metadata({}, {}, {}, version=str(found.get("version")))
    planner = found.get("planner_data") or {}
    for key, state in found["state_dict_metadata"].items():
        metadata.state_dict_metadata[str(key)] = _state(state)
        metadata.planner_data[str(key)] = tuple(map(str, planner.get(key, (key,))))
    for index, info in found["storage_data"].items():
        at, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        offset = None if at.get("offset") is None else _shape(at["offset"])
        start, length = _sizes([where["offset"], where["length"]])
        place = StorageInfo(where["relative_path"], start, length)
        metadata.storage_data[MetadataIndex(str(at["fqn"]), offset)] = place
    return metadata


def _fields(record: Any, name: str) -> dict[str, Any]:
    """Return the attributes of a dataclass of this name."""
    if not isinstance(record, _Record) or type(record).__name__ != name or not isinstance(record.state, dict):
        raise ValueError(f"it has a {type(record).__name__} instead of a {name}")
    return record.state


def _state(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, _Record) and type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    found = _fields(record, "TensorStorageMetadata")
    properties = found["properties"]
    if not isinstance(properties, _Record) or not isinstance(properties.state, tuple):
        raise ValueError("it has a tensor without properties")
    dtype, size = properties.state[0], _shape(found["size"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype} is not a dtype")
    chunks = []
    for chunk in found["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _shape(box["offsets"]), _shape(box["sizes"])
        _check_box("a tensor", size, offsets, sizes)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _shape(record: Any) -> torch.Size:
    """Convert a record of ``torch.Size``, or a tuple."""
    values = record.args[0] if isinstance(record, _Record) and type(record).__name__ == "Size" else record
    return torch.Size(_sizes(values))
