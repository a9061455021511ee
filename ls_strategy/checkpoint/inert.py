"""Read the structure of a ``torch.save`` file without building the objects that it names and without reading tensors.

A pickle may name any function, which unpickling then calls. Here containers and dtypes are built as usual, torch's
functions that rebuild tensors return a description of the tensor, and every other name becomes `Unbuilt`.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import torch
from typing_extensions import override

from ls_strategy.errors import CheckpointError

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""The first number in a file of torch before 1.6."""

_LARGEST_PICKLE = 1 << 32


@dataclass(frozen=True)
class Storage:
    """A tensor's memory in the file."""

    key: str
    dtype: torch.dtype | None
    """None for bytes without a type."""


@dataclass(frozen=True)
class Described:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: Storage | None = None
    first: int = 0
    """First element in the storage."""


class Unbuilt:
    """Takes the place of an object, or of what a function would have returned."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept any arguments."""

    def __call__(self, *_: Any, **__: Any) -> Unbuilt:
        """Take the place of what a looked-up function would have returned."""
        return self

    def __setstate__(self, state: Any) -> None:
        """Accept any state."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accept the items of a dictionary's subclass."""

    def append(self, value: Any) -> None:
        """Accept the items of a list's subclass."""

    def extend(self, values: Any) -> None:
        """Accept the items of a list's subclass."""

    def add(self, value: Any) -> None:
        """Accept the items of a set's subclass."""


# --- torch's functions that rebuild tensors ---------------------------------------------------------------------------


def _tensor(storage: Any, first: Any, shape: Any, *_: Any) -> Any:
    if not isinstance(storage, Storage) or storage.dtype is None:
        return Unbuilt()
    return Described(_sizes(shape), storage.dtype, storage, int(first))


def _typed_tensor(storage: Any, first: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> Any:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        return Unbuilt()
    return Described(_sizes(shape), dtype, storage, int(first))


def _meta_tensor(dtype: Any, shape: Any, *_: Any) -> Any:
    return Described(_sizes(shape), dtype) if isinstance(dtype, torch.dtype) else Unbuilt()


def _first(value: Any, *_: Any) -> Any:
    return value


def _sparse_tensor(layout: Any, data: Any, *_: Any) -> Any:
    """Describe it by its full shape: ``data`` has the indices, then the values, and the shape."""
    sizes = next((part for part in data if isinstance(part, tuple)), None)
    values = [part for part in data if isinstance(part, Described)]
    return Described(_sizes(sizes), values[-1].dtype) if sizes is not None and values else Unbuilt()


def _of_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    return function(*arguments) if function in _REBUILD.values() else Unbuilt()


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in shape)


_REBUILD: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor_v3": _typed_tensor,
    "_rebuild_qtensor": _tensor,
    "_rebuild_sparse_tensor": _sparse_tensor,
    "_rebuild_meta_tensor_no_storage": _meta_tensor,
    "_rebuild_device_tensor_from_cpu_tensor": _first,
    "_rebuild_parameter": _first,
    "_rebuild_parameter_with_state": _first,
}

_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("collections", "Counter"): Counter,
    ("torch", "Size"): tuple,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    **{("builtins", kind.__name__): kind for kind in (dict, list, set, tuple, int, float, str, bool, frozenset)},
    **{("torch._utils", name): function for name, function in _REBUILD.items()},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


@dataclass(frozen=True)
class _Kind:
    """A class of storages, such as ``torch.FloatStorage``."""

    dtype: torch.dtype | None


_KINDS = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64, "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32, "QUInt8Storage": torch.quint8,
}  # fmt: skip


class _InertUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        """Import nothing."""
        if module.partition(".")[0] == "torch" and name.endswith("Storage"):
            return _Kind(_KINDS.get(name))
        found = _PLAIN.get((module, name))
        return type("Unbuilt", (Unbuilt,), {}) if found is None else found

    @override
    def persistent_load(self, pid: Any) -> Any:
        """Describe a storage: ``("storage", class, key, location, elements)``."""
        if isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == "storage":
            return Storage(str(pid[2]), pid[1].dtype if isinstance(pid[1], _Kind) else None)
        return Unbuilt()


# --- files ------------------------------------------------------------------------------------------------------------


def read_inert(file: IO[bytes], name: str) -> Any:
    """Return what ``torch.save`` wrote, with `Described` for tensors and `Unbuilt` for objects.

    Args:
        file: open for reading, at its beginning; with ``seek``.
        name: for messages.

    Raises:
        CheckpointError: ``torch.save`` did not write it, or it is damaged.
    """
    try:
        if zipfile.is_zipfile(file):
            return _read_archive(file)
        file.seek(0)
        if _InertUnpickler(file).load() != _LEGACY_MAGIC:
            raise ValueError("it begins with another number than torch's")
        for _ in ("version of the protocol", "sizes of the system's types"):
            _InertUnpickler(file).load()
        return _InertUnpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error}. Check the path and its permissions.") from error
    except Exception as error:  # of any kind: a damaged pickle may do anything that a pickle can
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise CheckpointError(
            f"Got {name}, but it is not a file that torch.save wrote, or it is damaged ({why}). Give a checkpoint: a "
            "folder, or a .ckpt file."
        ) from error


def _read_archive(file: IO[bytes]) -> Any:
    with zipfile.ZipFile(file) as archive:
        found = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(found) != 1:
            raise ValueError(f"the archive has {len(found)} records named data.pkl")
        if found[0].file_size > _LARGEST_PICKLE:
            raise ValueError(f"its data.pkl has {found[0].file_size} bytes")
        with archive.open(found[0]) as record:
            return _InertUnpickler(record).load()


def wrong_records(file: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Yield name and error of every record of an archive that differs from its checksum. Reads the file in full.

    A file of torch before 1.6 is no archive and has no checksums. All are 0 after
    ``torch.serialization.set_crc32_options(False)``.
    """
    if not zipfile.is_zipfile(file):
        return
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # of any kind, from a damaged directory of records
        yield "directory of records", repr(error)
        return
    records = archive.infolist()
    if not any(info.CRC for info in records):
        return
    for info in records:
        try:
            with archive.open(info) as record:
                while record.read(1 << 24):
                    pass
        except Exception as error:
            yield info.filename, str(error)


def tensors_in(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and tensor for every tensor in nested containers, in order."""
    ways: list[tuple[tuple[str, ...], Any]] = [((), value)]
    seen: set[int] = set()  # a pickle may hold a list that holds itself
    while ways:
        path, found = ways.pop()
        if isinstance(found, (Described, torch.Tensor)):
            yield path, found
            continue
        if isinstance(found, dict):
            inside = [(str(key), each) for key, each in found.items()]
        elif isinstance(found, (list, tuple)):
            inside = [(str(number), each) for number, each in enumerate(found)]
        else:
            continue
        if id(found) in seen:
            continue
        seen.add(id(found))
        ways += [((*path, key), each) for key, each in reversed(inside)]
