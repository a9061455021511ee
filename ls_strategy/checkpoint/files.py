"""The files of a sharded checkpoint: one per rank, in the format of ``torch.distributed.checkpoint`` (DCP).

Every rank appends *items* to its file. An item is a chunk of a tensor (a box of the full tensor) or a pickled object.
The rank records where each item is, and rank 0 merges the records: see `metadata`. All DCP tools can read the folder:
``dcp.load``, Lightning's consolidation, torch's ``dcp_to_torch_save``.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ls_strategy import device as dev
from ls_strategy._torch import without_crc32
from ls_strategy.checkpoint.manifest import FileRecord, Manifest, check
from ls_strategy.checkpoint.metadata import Item, Path, key_of, read_metadata
from ls_strategy.checkpoint.place import CheckpointPath, begin_to_sync, sync_file
from ls_strategy.errors import CheckpointError, of_tensor_class
from ls_strategy.layout import flat_range_to_boxes

LARGE = 1 << 20
"""Bytes from which the checksum is computed in parallel with the write."""

_SYNCED_AT_ONCE = 4 << 20
"""Bytes after which the disk begins to write what the system has; at the end it would do nothing else."""


class RankFile:
    """One rank's file while it is being written. Computes checksums of all bytes."""

    def __init__(self, place: CheckpointPath, name: str, *, checksums: bool = True) -> None:
        """Create the file. Without ``checksums`` those of its record are 0."""
        self.name = name
        self._checksummed = checksums
        self.items: list[Item] = []
        self._parts: list[tuple[int, int, int]] = []
        self._file = place.open(name, "wb")
        self._descriptor = self._file.fileno() if place.local else None
        self._syncing = 0
        """Bytes that the disk has begun to write."""
        self._checksums = ThreadPoolExecutor(1, initializer=dev.selecting())
        self._frames: dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]] = {}
        self._error: OSError | None = None
        self._position = 0
        self._crc = 0

    def write(self, data: Any) -> int:
        """Write bytes. Called by ``torch.save``."""
        try:
            if not self._checksummed:
                self._file.write(data)
            elif len(data) < LARGE:
                self._crc = zlib.crc32(data, self._crc)
                self._file.write(data)
            else:  # both release the GIL
                crc = self._checksums.submit(zlib.crc32, data, self._crc)
                self._file.write(data)
                self._crc = crc.result()
        except OSError as error:
            self._error = self._error or error
            raise
        self._position += len(data)
        if self._descriptor is not None and self._position >= self._syncing + _SYNCED_AT_ONCE:
            begin_to_sync(self._descriptor, self._syncing, self._position - self._syncing)
            self._syncing = self._position
        return len(data)

    def flush(self) -> None:
        """Do nothing: `close` flushes. Called by ``torch.save``."""

    def add_tensor(self, path: Path, shape: Sequence[int], offsets: Sequence[int], chunk: Tensor) -> None:
        """Append one box of a tensor. ``chunk`` is on the CPU and has the box's shape."""
        start = self._begin()
        chunk = chunk.detach().resolve_conj().resolve_neg().contiguous()
        before, after = self._frame(chunk)
        elements = as_bytes(chunk)
        if len(elements) < LARGE:  # one call is one handover of the GIL
            self.write(b"".join((before, elements, after)))
        else:
            self.write(before)
            self.write(elements)
            self.write(after)
        self._end(start, Item(path, tuple(shape), chunk.dtype, tuple(offsets), tuple(chunk.shape), start, 0))

    def add_object(self, path: Path, value: Any) -> None:
        """Append any object that ``torch.save`` accepts."""
        start = self._begin()
        self._save(value)
        self._end(start, Item(path, None, None, (), (), start, 0))

    def _frame(self, chunk: Tensor) -> tuple[bytes, bytes]:
        """Return what ``torch.save`` writes before and after the elements, which is the same for all of one shape.

        A call of it per chunk would take 85 us and forty writes, for which it competes with training for the GIL.
        """
        key = (chunk.dtype, chunk.shape)
        if key not in self._frames:
            frame = _Frame(chunk.numel() * chunk.element_size())
            with without_crc32():
                torch.save(torch.empty(chunk.shape, dtype=chunk.dtype, device="cpu"), frame)  # type: ignore[arg-type]
            self._frames[key] = frame.parts()
        return self._frames[key]

    def _save(self, value: Any) -> None:
        try:
            torch.save(value, self)  # type: ignore[arg-type]
        except RuntimeError:
            if self._error is not None:  # torch.save replaces it by an error about positions
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
        """Wait until everything is on disk, and return the file's record."""
        self._checksums.shutdown()
        sync_file(self._file)
        self._file.close()
        return FileRecord(self._position, self._parts)

    def abandon(self) -> None:
        """Close the file after a failure, without syncing it."""
        self._checksums.shutdown()
        try:
            self._file.close()
        except OSError:  # a full disk fails again when the last bytes are flushed
            return


class _Frame:
    """Takes what ``torch.save`` writes of one tensor, and keeps all but the elements."""

    def __init__(self, nbytes: int) -> None:
        self._before, self._after = b"", b""
        self._elements = nbytes
        """Bytes of elements that are still to come."""
        self._until_elements: int | None = None
        """Writes to come before the elements, from the name of their record on: its padding."""

    def write(self, data: Any) -> int:
        """Called by ``torch.save``."""
        if self._until_elements is None or self._until_elements > 0:
            self._before += bytes(data)
            if self._until_elements is not None:
                self._until_elements -= 1
            elif self._before.endswith(b"/data/0"):
                self._until_elements = 1
        elif self._elements > 0:
            self._elements -= len(data)
        else:
            self._after += bytes(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing. Called by ``torch.save``."""

    def parts(self) -> tuple[bytes, bytes]:
        """Return what comes before the elements, and what comes after them.

        Raises:
            CheckpointError: This version of torch writes tensors in another form.
        """
        if self._elements or not self._after:
            raise CheckpointError(f"torch {torch.__version__} writes tensors in a form that is not known here.")
        return self._before, self._after


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype. No copy.

    Raises:
        CheckpointError: it is of a tensor class that has no bytes, such as those of torchao's optimizers.
    """
    try:
        return memoryview(tensor.view(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")
    except NotImplementedError as error:
        raise CheckpointError(of_tensor_class(type(tensor).__name__)) from error


# --- reading ---------------------------------------------------------------------------------------------------------


class Reader:
    """Reads a sharded checkpoint and verifies what it reads. Not collective."""

    def __init__(self, path: Any, manifest: Manifest | None) -> None:
        """Read the index of the folder ``path``. ``manifest`` is None if another program wrote it with DCP.

        Raises:
            CheckpointError: The folder is damaged or cannot be read.
        """
        self.place = CheckpointPath(path)
        self.manifest = manifest
        self.metadata = read_metadata(self.place, manifest)
        self.paths: dict[Path, str] = {
            self.metadata.planner_data[key]: key for key in self.metadata.state_dict_metadata
        }
        self._checksums: dict[str, dict[int, tuple[int, int]]] = {}
        self._last: tuple[MetadataIndex, Tensor] | None = None

    def under(self, *prefix: str) -> Iterator[Path]:
        """Return the paths that begin with ``prefix``."""
        return (p for p in self.paths if p[: len(prefix)] == prefix)

    def tensor_metadata(self, path: Path) -> TensorStorageMetadata | None:
        """Return shape, dtype and chunks of a tensor, or None for an object."""
        found = self.metadata.state_dict_metadata[self.paths[path]]
        return found if isinstance(found, TensorStorageMetadata) else None

    def read_object(self, path: Path, *, weights_only: bool | None = True) -> Any:
        """Read an object."""
        return self._load(MetadataIndex(self.paths[path]), weights_only=weights_only)

    def read_chunk(self, path: Path, offsets: Sequence[int]) -> Tensor:
        """Return the chunk that begins at ``offsets``. Cache it, because callers read several parts of a chunk."""
        index = MetadataIndex(self.paths[path], offsets)
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        self._last = None
        chunk = self._load(index, weights_only=True)
        if not isinstance(chunk, Tensor):
            raise CheckpointError(f"{self.place}: a chunk of {key_of(path)} is not a tensor.")
        self._last = (index, chunk)
        return chunk

    def forget(self) -> None:
        """Free the cached chunk."""
        self._last = None

    def _load(self, index: MetadataIndex, *, weights_only: bool | None) -> Any:
        data = io.BytesIO(self._bytes(index))
        try:
            return torch.load(data, map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{self.place}: {index.fqn} is damaged, or has objects that torch does not consider safe: {error}. If "
                "you trust the checkpoint, read it with weights_only=False, or pass their classes to "
                "torch.serialization.add_safe_globals."
            ) from error
        except Exception as error:  # of any kind: a damaged pickle may do anything that a pickle can
            raise CheckpointError(
                f"{self.place}: {index.fqn} cannot be read: {type(error).__name__}: {error}. Resume from another "
                "checkpoint."
            ) from error

    def _bytes(self, index: MetadataIndex) -> bytes:
        info = self.metadata.storage_data.get(index)
        if info is None:
            raise CheckpointError(f"{self.place} has no chunk of {index.fqn} there. Resume from another checkpoint.")
        try:
            with self.place.open(info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
        except FileNotFoundError:
            raise CheckpointError(f"{self.place}/{info.relative_path} is missing.") from None
        if self.manifest is not None:
            length, crc = self._checksums_of(info.relative_path).get(info.offset, (None, 0))
            if length != info.length:
                raise CheckpointError(
                    f"{self.place}: the index places {index.fqn} at bytes [{info.offset}, {info.offset + info.length}) "
                    f"of {info.relative_path}, which the manifest does not have. Resume from another checkpoint."
                )
            check(self.place, info.relative_path, info.offset, data, crc)
        return data

    def _checksums_of(self, name: str) -> dict[int, tuple[int, int]]:
        assert self.manifest is not None
        if name not in self._checksums:
            self._checksums[name] = {o: (n, c) for o, n, c in self.manifest.files[name].parts}
        return self._checksums[name]


def read_range(reader: Reader, path: Path, start: int, stop: int) -> Tensor:
    """Read elements ``[start, stop)`` of a flattened tensor, ``(stop - start,)``. Each chunk is read at most once.

    Raises:
        CheckpointError: Chunks are missing.
    """
    metadata = reader.tensor_metadata(path)
    assert metadata is not None
    out = torch.empty(stop - start, dtype=metadata.properties.dtype)
    boxes = flat_range_to_boxes(tuple(metadata.size), start, stop)
    _fill(reader, path, [(b.offsets, out[b.start - start : b.stop - start].view(b.sizes)) for b in boxes])
    return out


def read_box(reader: Reader, path: Path, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Read a box of a tensor, of shape ``sizes``. Each chunk is read at most once.

    Raises:
        CheckpointError: Chunks are missing.
    """
    metadata = reader.tensor_metadata(path)
    assert metadata is not None
    out = torch.empty(sizes, dtype=metadata.properties.dtype)
    _fill(reader, path, [(offsets, out)])
    return out


def _fill(reader: Reader, path: Path, boxes: list[tuple[tuple[int, ...], Tensor]]) -> None:
    """Fill each tensor with the part of the saved tensor that begins at its offsets."""
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
            f"{reader.place}: {key_of(path)} is incomplete: it has {found} of the {wanted} elements that are needed. "
            "Resume from another checkpoint."
        )
