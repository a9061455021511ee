"""``torch.save`` for dictionaries that do not fit into memory: reads each `LazyTensor` while writing it.

The file is the one that ``torch.save`` writes: an uncompressed zip archive of a pickle and one record per storage.
Records are aligned to 64 bytes, so that ``torch.load(mmap=True)`` can map them. They have valid checksums, so that
``unzip -t`` and other zip tools accept the archive.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Container, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.storage import TypedStorage

from ls_strategy.checkpoint.files import as_bytes
from ls_strategy.checkpoint.output import Progress
from ls_strategy.checkpoint.place import sync_file
from ls_strategy.meta_init.lazy import LazyTensor, parts_of

ALIGNMENT = 64
"""Bytes between record starts, as in torch's own writer."""

ROOT = "archive"
PROTOCOL = 2


class AbsentStorage:
    """Represents in the pickle the storage of a tensor whose elements are not in memory."""

    def __init__(self, tensor: Tensor) -> None:
        """``tensor``: lazy, or one that stands in for elements that others write."""
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.element_size()

    def parts(self) -> Iterator[memoryview]:
        """Yield the elements of a lazy tensor."""
        for _, part in parts_of(self.tensor, 0, self.tensor.numel()):
            yield as_bytes(part)


Storage = AbsentStorage | torch.UntypedStorage


class TorchPickler(pickle.Pickler):
    """The pickle of ``torch.save``, without storages. Collects them in the order of their records."""

    def __init__(self, file: IO[bytes], stand_ins: Container[int] = ()) -> None:
        """``stand_ins``: ids of further tensors that are saved without their elements."""
        super().__init__(file, protocol=PROTOCOL)
        self.storages: list[Storage] = []
        self._stand_ins = stand_ins
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        """By the address of a storage in memory."""

    def reducer_override(self, obj: Any) -> Any:
        """Make a tensor without elements load as a plain tensor with its own storage."""
        if not isinstance(obj, LazyTensor) and id(obj) not in self._stand_ins:
            return NotImplemented
        rebuild, arguments = torch.empty(0, dtype=obj.dtype).__reduce_ex__(PROTOCOL)  # type: ignore[misc]
        stride = torch.empty(obj.shape, device="meta").stride()
        return rebuild, (AbsentStorage(obj), 0, tuple(obj.shape), stride, False, OrderedDict(), *arguments[6:])

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference to a storage. ``torch.load`` finds its record by the key."""
        if isinstance(obj, AbsentStorage):
            kind = torch.empty(0, dtype=obj.tensor.dtype).__reduce_ex__(PROTOCOL)[1][0]  # type: ignore[index]
            typed = isinstance(kind, TypedStorage)
            storage_type = getattr(torch, kind._pickle_storage_type()) if typed else torch.UntypedStorage
            return self._identity(obj, id(obj), storage_type, obj.tensor.numel() if typed else obj.nbytes)
        if isinstance(obj, TypedStorage):
            untyped = obj._untyped_storage
            self._check_dtype(untyped, obj.dtype)
            return self._identity(
                untyped.cpu(), untyped._cdata, getattr(torch, obj._pickle_storage_type()), obj._size()
            )
        if isinstance(obj, torch.UntypedStorage):
            self._check_dtype(obj, torch.uint8)
            return self._identity(obj.cpu(), obj._cdata, torch.UntypedStorage, obj.nbytes())
        return None

    def _check_dtype(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        """Refuse what ``torch.save`` refuses: ``torch.load`` reads a record in one dtype, whoever refers to it.

        Raises:
            RuntimeError: The same memory is saved in another dtype.
        """
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")

    def _identity(self, storage: Any, identity: int, storage_type: Any, numel: int) -> tuple[Any, ...]:
        if identity not in self._keys:
            self._keys[identity] = str(len(self.storages))
            self.storages.append(storage)  # kept alive, so that its id is not reused
        return "storage", storage_type, self._keys[identity], "cpu", numel


class StreamedSave:
    """One ``torch.save`` that streams lazy tensors."""

    def __init__(self, value: Any) -> None:
        """Pickle ``value``, any object that ``torch.save`` accepts, with `LazyTensor`s in it. Reads no tensor."""
        buffer = io.BytesIO()
        pickler = TorchPickler(buffer)
        pickler.dump(value)
        self._pickled = buffer.getvalue()
        self._storages = pickler.storages

    @property
    def nbytes(self) -> int:
        """Bytes of the data. The archive adds less than 1 KiB per tensor."""
        return len(self._pickled) + sum(_nbytes(s) for s in self._storages)

    def write(self, path: Path, progress: Progress | None = None) -> None:
        """Write a new file and wait until it is on disk. ``progress`` is called after every chunk.

        Needs memory for the pickle and a few chunks of one tensor. Tensors on devices are saved as CPU tensors.
        """
        done, total = 0, self.nbytes
        with path.open("xb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                _record(archive, file, "data.pkl", self._pickled)
                _record(archive, file, ".format_version", b"1")
                _record(archive, file, ".storage_alignment", str(ALIGNMENT).encode())
                _record(archive, file, "byteorder", sys.byteorder.encode())
                for key, storage in enumerate(self._storages):
                    for size in _record_parts(archive, file, f"data/{key}", parts_of_storage(storage)):
                        done += size
                        if progress is not None:
                            progress(done, total)
                _record(archive, file, "version", b"3\n")
            sync_file(file)


def _nbytes(storage: Storage) -> int:
    return storage.nbytes if isinstance(storage, AbsentStorage) else storage.nbytes()


def parts_of_storage(storage: Storage) -> Iterator[memoryview]:
    """Yield the bytes of a storage."""
    if isinstance(storage, AbsentStorage):
        yield from storage.parts()
    else:
        yield as_bytes(torch.empty(0, dtype=torch.uint8).set_(storage))  # type: ignore[call-overload]


def _record(archive: zipfile.ZipFile, file: IO[bytes], name: str, data: bytes) -> None:
    for _ in _record_parts(archive, file, name, iter([memoryview(data)])):
        pass


def _record_parts(archive: zipfile.ZipFile, file: IO[bytes], name: str, parts: Iterator[memoryview]) -> Iterator[int]:
    """Write one aligned record. Yield the bytes of each part after it is written."""
    info, _ = aligned_record(name, file.tell())
    with archive.open(info, "w", force_zip64=True) as record:
        for part in parts:
            record.write(part)
            yield part.nbytes


def aligned_record(name: str, position: int) -> tuple[zipfile.ZipInfo, int]:
    """Return a record whose header, with 64-bit sizes, begins at ``position``, and where its data begins."""
    info = zipfile.ZipInfo(f"{ROOT}/{name}")
    # The header: 30 bytes, the name, 20 bytes of zip64 sizes, and a padding field with a 4-byte header.
    header = position + 30 + len(info.filename) + 20 + 4
    padding = -header % ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return info, header + padding
