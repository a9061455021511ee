"""What a checkpoint folder says about its items: which file holds which box of which tensor.

::

    index.json    what this package reads: JSON, so that opening a folder builds no object that a file names
    .metadata     the same for the tools of ``torch.distributed.checkpoint`` (DCP): a pickle of torch's classes

Folders of other strategies, and of earlier versions, have ``.metadata`` alone. It is read without building anything
that it names: every class becomes a plain record of what the pickle gives it, under the exact names of `_NAMES`.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
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

from ls_strategy._compat import StorageInfo
from ls_strategy.checkpoint.manifest import FileRecord, Manifest, check
from ls_strategy.checkpoint.place import Place, sync_file
from ls_strategy.checkpoint.target import INDEX, METADATA
from ls_strategy.errors import CheckpointError

Path = tuple[str, ...]
"""Keys from the checkpoint's dictionary down to a value: ``("optimizer_0", "state", "blocks.0.weight", "exp_avg")``."""


@dataclass(frozen=True)
class Item:
    """Where one chunk of a tensor, or one object, is."""

    path: Path
    shape: tuple[int, ...] | None
    """Of the whole tensor; None for an object."""

    dtype: torch.dtype | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First byte in the file."""

    length: int
    """Bytes."""

    def to_plain(self) -> list[Any]:
        """In types that JSON has."""
        shape = None if self.shape is None else list(self.shape)
        dtype = None if self.dtype is None else _name_of(self.dtype)
        return [list(self.path), shape, dtype, list(self.offsets), list(self.sizes), self.start, self.length]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Item:
        """Back from `to_plain`.

        Raises:
            ValueError, TypeError: it is not that.
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
    """DCP's flat key."""
    return ".".join(path)


def merge(items: Iterable[tuple[str, Item]], aliases: Mapping[Path, Path]) -> Metadata:
    """All ranks' notes as one.

    Args:
        items: ``(file, item)``.
        aliases: further paths of tensors that are there: tied parameters.

    Raises:
        ValueError: chunks of one tensor do not agree, or lie outside of it.
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
    if any(at < 0 or size < 0 or at + size > whole for at, size, whole in boxes):
        raise ValueError(f"{key} has a chunk at {list(offsets)} of sizes {list(sizes)}, outside of {list(shape)}")


# --- writing ---------------------------------------------------------------------------------------------------------


def write_metadata(
    place: Place, items: Iterable[tuple[str, Item]], aliases: Mapping[Path, Path]
) -> dict[str, FileRecord]:
    """Write ``index.json`` and DCP's ``.metadata``. Rank 0 only.

    Args:
        place: folder.
        items: ``(file, item)`` of all ranks.
        aliases: further paths of tensors that are there: tied parameters.
    """
    metadata = merge(items, aliases)
    return {
        INDEX: _write(place, INDEX, to_json(metadata).encode()),
        METADATA: _write(place, METADATA, pickle.dumps(metadata)),
    }


def _write(place: Place, name: str, data: bytes) -> FileRecord:
    with place.open(name, "wb") as file:
        file.write(data)
        sync_file(file)
    return FileRecord(len(data), [(0, len(data), zlib.crc32(data))])


def to_json(metadata: Metadata) -> str:
    """``index.json``: entries in the order of the checkpoint, chunks as ``[file, start, length, offsets, sizes]``."""
    files = sorted({info.relative_path for info in metadata.storage_data.values()})
    numbers = {file: number for number, file in enumerate(files)}
    entries: dict[str, dict[str, Any]] = {}
    for key, state in metadata.state_dict_metadata.items():
        entries[key] = {"path": list(metadata.planner_data[key])}
        if isinstance(state, TensorStorageMetadata):
            entries[key] |= {"shape": list(state.size), "dtype": _name_of(state.properties.dtype)}
        entries[key]["chunks"] = []
    boxes = {
        (key, tuple(chunk.offsets)): list(chunk.sizes)
        for key, state in metadata.state_dict_metadata.items()
        if isinstance(state, TensorStorageMetadata)
        for chunk in state.chunks
    }
    for index, info in metadata.storage_data.items():
        offsets = list(index.offset or ())
        sizes = boxes.get((index.fqn, tuple(offsets)), [])
        entries[index.fqn]["chunks"].append([numbers[info.relative_path], info.offset, info.length, offsets, sizes])
    return json.dumps({"format": 1, "files": files, "entries": list(entries.values())})


# --- reading ---------------------------------------------------------------------------------------------------------


def read_metadata(place: Place, manifest: Manifest | None) -> Metadata:
    """What is in a folder. Builds no object that the folder names.

    Args:
        place: folder.
        manifest: its checksums; None for a folder that something else wrote with DCP.

    Raises:
        CheckpointError: it is damaged or cannot be read.
    """
    if manifest is None:
        name, data = METADATA, _read(place, METADATA, None)
    else:  # both are compared with their checksums, one is parsed
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


def _read(place: Place, name: str, manifest: Manifest | None) -> bytes:
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
    """Back from `to_json`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not what was written.
    """
    raw = json.loads(data)
    if raw["format"] != 1:
        raise ValueError(f"its format is {raw['format']}, this version reads 1. Update")
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
    """In place of an object: what the pickle would make it from."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *args: Any) -> None:
        """Arguments have been noted."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self, name: str) -> dict[str, Any]:
        """Attributes of a data class of this name."""
        if type(self).__name__ != name or not isinstance(self.state, dict):
            raise ValueError(f"it has a {type(self).__name__} in place of a {name}")
        return self.state


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
    "builtins": {kind.__name__: kind for kind in (dict, list, set, tuple, int, str, frozenset)},
}
"""What ``.metadata`` may name: exact names. None: a `_Record` is made in its place."""


class _Unpickler(pickle.Unpickler):
    """Builds records, containers and numbers. Nothing is imported, and no name is taken apart at its dots."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._records: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        found = _NAMES[module][name]
        if found is None:  # a class of this load alone: whatever a pickle does to it ends with the load
            found = self._records.setdefault(name, type(name, (_Record,), {}))
        return found


def from_pickle(data: bytes) -> Metadata:
    """DCP's ``.metadata``.

    Raises:
        Exception: of many kinds; it is not what DCP writes.
    """
    found = _fields(_Unpickler(data).load(), "Metadata")
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
    if not isinstance(record, _Record):
        raise ValueError(f"it has a {type(record).__name__} in place of a {name}")
    return record.fields(name)


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
    """From a record of ``torch.Size``, or a tuple."""
    values = record.args[0] if isinstance(record, _Record) and type(record).__name__ == "Size" else record
    return torch.Size(_sizes(values))
