"""The files of a sharded checkpoint: one per rank, in the format of ``torch.distributed.checkpoint`` (DCP).

Every rank appends *items* to its file, each a chunk of a tensor (a box of it, at its true place in the true shape) or a
pickled object, and notes where they are; rank 0 merges the notes to DCP's ``.metadata``. So whatever reads DCP reads
this: ``dcp.load``, Lightning's consolidation, torch's ``dcp_to_torch_save``.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ls_strategy._compat import StorageInfo, without_crc32
from ls_strategy.checkpoint.commit import METADATA, FileRecord, Manifest, Place, check, sync_file
from ls_strategy.errors import CheckpointError
from ls_strategy.layout import flat_range_to_boxes

_LARGE = 1 << 20
"""Bytes from which on a checksum is computed beside the write."""

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


def key_of(path: Path) -> str:
    """DCP's flat key."""
    return ".".join(path)


class RankFile:
    """One rank's file while it is written. Every byte is checksummed on its way."""

    def __init__(self, place: Place, name: str) -> None:
        """Make the file."""
        self.name = name
        self.items: list[Item] = []
        self._parts: list[tuple[int, int, int]] = []
        self._file = place.open(name, "wb")
        self._beside = ThreadPoolExecutor(1)
        self._error: OSError | None = None
        self._position = 0
        self._crc = 0

    def write(self, data: Any) -> int:
        """What ``torch.save`` calls."""
        try:
            if len(data) < _LARGE:
                self._crc = zlib.crc32(data, self._crc)
                self._file.write(data)
            else:  # both leave Python's lock
                crc = self._beside.submit(zlib.crc32, data, self._crc)
                self._file.write(data)
                self._crc = crc.result()
        except OSError as error:
            self._error = self._error or error
            raise
        self._position += len(data)
        return len(data)

    def flush(self) -> None:
        """What ``torch.save`` calls; there is nothing to do before `close`."""

    def add_tensor(self, path: Path, shape: Sequence[int], offsets: Sequence[int], chunk: Tensor) -> None:
        """Append a box of a tensor, on the CPU; ``chunk`` has the box's shape."""
        start = self._begin()
        with without_crc32():
            self._save(_with_own_storage(chunk))
        self._end(start, Item(path, tuple(shape), chunk.dtype, tuple(offsets), tuple(chunk.shape), start, 0))

    def add_object(self, path: Path, value: Any) -> None:
        """Append anything that ``torch.save`` takes."""
        start = self._begin()
        self._save(value)
        self._end(start, Item(path, None, None, (), (), start, 0))

    def _save(self, value: Any) -> None:
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except RuntimeError:
            if self._error is not None:  # torch.save has buried it under an error about positions
                raise self._error from None
            raise

    def _begin(self) -> int:
        self._crc = 0
        return self._position

    def _end(self, start: int, item: Item) -> None:
        length = self._position - start
        self._parts.append((start, length, self._crc))
        self.items.append(Item(item.path, item.shape, item.dtype, item.offsets, item.sizes, start, length))

    def close(self) -> FileRecord:
        """Wait until everything is on the disk."""
        self._beside.shutdown()
        sync_file(self._file)
        self._file.close()
        return FileRecord(self._position, self._parts)

    def abandon(self) -> None:
        """Close the file; what is in it does not matter any more."""
        self._beside.shutdown()
        try:
            self._file.close()
        except OSError:  # a full disk says so again when the last bytes are flushed
            return


def _with_own_storage(tensor: Tensor) -> Tensor:
    """The same elements without the rest of their storage, which ``torch.save`` would write too. Copies nothing."""
    tensor = tensor.detach().contiguous()
    first = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[first : first + tensor.numel() * tensor.element_size()]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # type: ignore[call-overload]


def write_metadata(place: Place, items: Iterable[tuple[str, Item]], aliases: Mapping[Path, Path]) -> FileRecord:
    """Write DCP's ``.metadata``. Rank 0 only.

    Args:
        place: folder.
        items: ``(file, item)`` of all ranks.
        aliases: further paths of tensors that are there: tied parameters.
    """
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    planner: dict[str, Path] = {}
    also: dict[Path, list[Path]] = {}
    for other, path in aliases.items():
        also.setdefault(path, []).append(other)
    for file, item in items:
        info = StorageInfo(file, item.start, item.length)
        for path in (item.path, *also.get(item.path, ())):
            key = key_of(path)
            planner[key] = path
            if item.shape is None or item.dtype is None:
                state[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = info
                continue
            if key not in state:
                state[key] = TensorStorageMetadata(TensorProperties(item.dtype), torch.Size(item.shape), [])
            chunk = ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes))
            state[key].chunks.append(chunk)
            storage[MetadataIndex(key, item.offsets)] = info
    metadata = Metadata(state, planner, storage, version="1.0.0")
    data = pickle.dumps(metadata)
    with place.open(METADATA, "wb") as file_:
        file_.write(data)
        sync_file(file_)
    return FileRecord(len(data), [(0, len(data), zlib.crc32(data))])


# --- reading ---------------------------------------------------------------------------------------------------------

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": None,
    "torch._utils": None,
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple", "int", "str", "frozenset"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
}
"""What ``.metadata`` may name. It is a pickle, and a pickle may name anything."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        names = _ALLOWED.get(module, set())
        if names is None or name in names:
            found = super().find_class(module, name)
            if names is not None or isinstance(found, (type, torch.dtype, torch.layout)):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


class Reader:
    """A sharded checkpoint for reading: what is in it, and verified chunks of it. Any rank, any number of readers."""

    def __init__(self, path: Any, manifest: Manifest | None) -> None:
        """Read ``.metadata``.

        Args:
            path: folder.
            manifest: checksums; None for a folder that something else wrote with DCP.

        Raises:
            CheckpointError: it is damaged or cannot be read.
        """
        self.place = Place(path)
        self.manifest = manifest
        try:
            with self.place.open(METADATA, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            raise CheckpointError(f"{self.place} has no {METADATA}: it is not a sharded checkpoint.") from None
        if manifest is not None:
            check(self.place, METADATA, 0, data, manifest.files[METADATA].parts[0][2])
        try:
            self.metadata: Metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        except Exception as error:
            raise CheckpointError(f"{self.place}/{METADATA} cannot be read: {error}") from error
        self.paths: dict[Path, str] = {
            tuple(map(str, (self.metadata.planner_data or {}).get(key, (key,)))): key
            for key in self.metadata.state_dict_metadata
        }
        self._checksums: dict[str, dict[int, tuple[int, int]]] = {}
        self._last: tuple[MetadataIndex, Tensor] | None = None

    def under(self, *prefix: str) -> Iterator[Path]:
        """Paths that begin with ``prefix``."""
        return (p for p in self.paths if p[: len(prefix)] == prefix)

    def tensor_metadata(self, path: Path) -> TensorStorageMetadata | None:
        """Shape, dtype and chunks of a tensor; None for an object."""
        found = self.metadata.state_dict_metadata[self.paths[path]]
        return found if isinstance(found, TensorStorageMetadata) else None

    def read_object(self, path: Path, *, weights_only: bool | None = True) -> Any:
        """An object."""
        data = self._bytes(MetadataIndex(self.paths[path]))
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)

    def read_chunk(self, path: Path, offsets: Sequence[int]) -> Tensor:
        """The chunk that begins at ``offsets``, in its own shape. The last one is kept, for callers that cut it up."""
        index = MetadataIndex(self.paths[path], offsets)
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        self._last = None
        chunk = torch.load(io.BytesIO(self._bytes(index)), map_location="cpu", weights_only=True)
        self._last = (index, chunk)
        return chunk

    def forget(self) -> None:
        """Give the last chunk's memory back."""
        self._last = None

    def _bytes(self, index: MetadataIndex) -> bytes:
        info = self.metadata.storage_data[index]
        try:
            with self.place.open(info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
        except FileNotFoundError:
            raise CheckpointError(f"{self.place}/{info.relative_path} is missing.") from None
        if self.manifest is not None:
            length, crc = self._checksums_of(info.relative_path)[info.offset]
            assert length == info.length
            check(self.place, info.relative_path, info.offset, data, crc)
        return data

    def _checksums_of(self, name: str) -> dict[int, tuple[int, int]]:
        assert self.manifest is not None
        if name not in self._checksums:
            self._checksums[name] = {o: (n, c) for o, n, c in self.manifest.files[name].parts}
        return self._checksums[name]


def read_range(reader: Reader, path: Path, start: int, stop: int) -> Tensor:
    """Elements ``[start, stop)`` of a flattened tensor; ``(stop - start,)``. Every chunk that has some is read once.

    Raises:
        CheckpointError: the chunks leave a gap.
    """
    metadata = reader.tensor_metadata(path)
    assert metadata is not None
    out = torch.empty(stop - start, dtype=metadata.properties.dtype)
    boxes = flat_range_to_boxes(tuple(metadata.size), start, stop)
    _fill(reader, path, [(b.offsets, out[b.start - start : b.stop - start].view(b.sizes)) for b in boxes])
    return out


def read_box(reader: Reader, path: Path, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """A rectangular part of a tensor; ``sizes``. Every chunk that has some of it is read once.

    Raises:
        CheckpointError: the chunks leave a gap.
    """
    metadata = reader.tensor_metadata(path)
    assert metadata is not None
    out = torch.empty(sizes, dtype=metadata.properties.dtype)
    _fill(reader, path, [(offsets, out)])
    return out


def _fill(reader: Reader, path: Path, boxes: list[tuple[tuple[int, ...], Tensor]]) -> None:
    """Fill tensors, each with the part of the saved one that begins at its offsets."""
    metadata = reader.tensor_metadata(path)
    assert metadata is not None
    found = 0
    for chunk_metadata in metadata.chunks:
        offsets, sizes = tuple(chunk_metadata.offsets), tuple(chunk_metadata.sizes)
        for at, box in boxes:
            lows = [max(a, b) for a, b in zip(offsets, at, strict=True)]
            highs = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, at, box.shape, strict=True)]
            if any(lo >= hi for lo, hi in zip(lows, highs, strict=True)):
                continue
            chunk, target = reader.read_chunk(path, offsets), box
            for dim, (lo, hi) in enumerate(zip(lows, highs, strict=True)):
                chunk = chunk.narrow(dim, lo - offsets[dim], hi - lo)
                target = target.narrow(dim, lo - at[dim], hi - lo)
            target.copy_(chunk)
            found += target.numel()
    wanted = sum(box.numel() for _, box in boxes)
    if found < wanted:
        raise CheckpointError(
            f"{reader.place}: {key_of(path)} has {found} of {wanted} elements that are needed: it is not whole. "
            "Resume from another checkpoint."
        )
