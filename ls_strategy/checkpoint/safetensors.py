"""Export weights as Hugging Face safetensors, in one file or several, without holding a copy of them in memory.

Format (huggingface.co/docs/safetensors): 8 bytes with the header's length (little-endian); the header, JSON with
dtype, shape and range of each tensor; the tensors' bytes. The safetensors package itself can only write from memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ls_strategy.checkpoint.files import as_bytes
from ls_strategy.checkpoint.output import WRITER, Progress, atomic_output
from ls_strategy.checkpoint.place import sync_file
from ls_strategy.checkpoint.source import read_weights, rows_of
from ls_strategy.errors import CheckpointError, ConfigError
from ls_strategy.meta_init.lazy import parts_of

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""Names of dtypes in the header."""

MAX_SHARD_BYTES = 5 * 10**9
"""The default of transformers."""


@dataclass(frozen=True)
class FilePart:
    """Rows of a tensor under a new name, for splitting a fused matrix."""

    name: str
    rows: tuple[int, int] | None = None
    """First row and one past the last. None: the full tensor."""

    alone: bool = False
    """Drop the dimension of the rows: the part is one of several stacked tensors."""


Rename = Callable[[str, tuple[int, ...]], Sequence[FilePart]]
"""``(name, shape)`` of a tensor to the parts to write. An empty result leaves the tensor out."""


@dataclass(frozen=True)
class _WrittenTensor:
    """One tensor to write."""

    name: str
    tensor: Tensor
    dtype: torch.dtype
    alone: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)[1:] if self.alone else tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_safetensors(  # noqa: PLR0913 - options of an export, keyword-only
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    rename: Rename | None = None,
    average: bool = False,
    extra_files: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the weights and buffers of a checkpoint to a folder of safetensors.

    Writes ``model.safetensors`` if everything fits into one file, else ``model-00001-of-0000N.safetensors`` and
    ``model.safetensors.index.json``. Tied weights are written once, under their first name. Needs memory for a few
    chunks of one tensor. Unpickles only tensors.

    Args:
        source: A sharded checkpoint or a single file.
        target: The folder to create.
        dtype: Dtype of floating-point tensors. None: as saved.
        max_shard_bytes: Largest file. A larger tensor gets its own file.
        rename: Maps names and splits tensors. None keeps the names of the state dict.
        average: Write the average of `ShardedEMA` instead of the weights.
        extra_files: Further files of the export, name to text.
        force: Replace ``target`` if it exists.
        progress: Called with the bytes written so far and the total.

    Raises:
        CheckpointError: ``source`` is incomplete, or ``target`` could not be written.
        ConfigError: ``target`` exists, two tensors get the same name, or safetensors does not support a dtype.
    """
    entries = _entries(read_weights(source, average=average).tensors, dtype, rename)
    if not entries:
        raise CheckpointError(f"{source}: no tensor is left to write. Check the mapping of names.")
    texts = {name: text.encode() for name, text in (extra_files or {}).items()}
    _write_folder(target, {"model": entries}, texts, max_shard_bytes, force, progress)


def write_safetensors(
    target: str | os.PathLike[str],
    weights: Mapping[str, Mapping[str, Tensor]],
    *,
    files: Mapping[str, bytes],
    max_shard_bytes: int | None = MAX_SHARD_BYTES,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a folder of safetensors and other files. A `LazyTensor` is read portion by portion.

    Args:
        target: The folder to create, complete or not at all.
        weights: By the start of the files' names, such as ``model``: tensors by name.
        files: Further files, path in the folder to content.
        max_shard_bytes: Largest file. A larger tensor gets its own file. None: one file for each of ``weights``.
        force: Replace ``target`` if it is a folder that this function wrote.
        progress: Called with the bytes written so far and the total.

    Raises:
        CheckpointError: ``target`` could not be written.
        ConfigError: ``target`` may not be replaced, or safetensors does not support a dtype.
    """
    parts = {stem: _entries(tensors, None, None) for stem, tensors in weights.items()}
    _write_folder(target, parts, files, max_shard_bytes, force, progress)


def _write_folder(
    target: str | os.PathLike[str],
    parts: Mapping[str, Sequence[_WrittenTensor]],
    others: Mapping[str, bytes],
    limit: int | None,
    force: bool,
    progress: Progress | None,
) -> None:
    if limit is not None and limit < 1:
        raise ConfigError(f"Got max_shard_bytes={limit}, but a file has at least 1 byte. Set a larger size.")
    others, files = dict(others), dict[str, Sequence[_WrittenTensor]]()
    for stem, entries in parts.items():
        shards = _shards(entries, limit)
        names = _file_names(stem, len(shards))
        files |= zip(names, shards, strict=True)
        if len(shards) > 1:
            weight_map = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
            index = {"metadata": {"total_size": sum(e.nbytes for e in entries)}, "weight_map": weight_map}
            others[f"{stem}.safetensors.index.json"] = (json.dumps(index, indent=2) + "\n").encode()
    total = sum(e.nbytes for entries in parts.values() for e in entries)
    done = 0
    with atomic_output(Path(target), nbytes=total, force=force) as folder:
        for name in [*files, *others]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name, shard in files.items():
            for size in _write(folder / name, shard, [*files, *others]):
                done += size
                if progress is not None:
                    progress(done, total)
        for name, content in others.items():
            with (folder / name).open("wb") as file:
                file.write(content)
                sync_file(file)


def rename_prefixes(prefixes: Sequence[tuple[str, str]]) -> Rename:
    """Return a mapping that replaces the first matching prefix of a name, ``(old, new)``. Other names stay.

    >>> rename_prefixes([("model.", "")])("model.head.weight", (2, 3))[0].name
    'head.weight'
    """

    def rename(name: str, shape: tuple[int, ...]) -> list[FilePart]:
        return [FilePart(next((new + name[len(old) :] for old, new in prefixes if name.startswith(old)), name))]

    return rename


def split_experts(rename: Rename | None = None) -> Rename:
    """Return a mapping that splits stacked experts, as most readers of such files name them, then applies ``rename``.

    >>> [part.name for part in split_experts()("mlp.experts.up.weight", (2, 8, 4))]
    ['mlp.experts.0.up.weight', 'mlp.experts.1.up.weight']
    """

    def split(name: str, shape: tuple[int, ...]) -> Sequence[FilePart]:
        before, found, after = f".{name}".rpartition(".experts.")
        if not found or not shape or after.split(".")[0].isdigit():
            return [FilePart(name)] if rename is None else rename(name, shape)
        parts: list[FilePart] = []
        for i in range(shape[0]):
            own = f"{before}.experts.{i}.{after}".removeprefix(".")
            named = [FilePart(own)] if rename is None else rename(own, shape[1:])
            if any(part.rows is not None for part in named):
                raise ConfigError(f"{name}: an expert is written in one piece, but the mapping splits it into rows.")
            parts += [FilePart(part.name, (i, i + 1), alone=True) for part in named]
        return parts

    return split


def _entries(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, rename: Rename | None) -> list[_WrittenTensor]:
    entries: dict[str, _WrittenTensor] = {}
    for name, tensor in tensors.items():
        for part in [FilePart(name)] if rename is None else rename(name, tuple(tensor.shape)):
            taken = tensor if part.rows is None else rows_of(tensor, *part.rows)
            cast = dtype is not None and tensor.is_floating_point()
            entry = _WrittenTensor(part.name, taken, dtype if cast and dtype is not None else tensor.dtype, part.alone)
            if part.name in entries:
                raise ConfigError(
                    f"the mapping names two tensors {part.name!r}; the second is {name!r}. Give them different names."
                )
            if entry.dtype not in DTYPES:
                raise ConfigError(
                    f"{name} is {entry.dtype}, which safetensors does not support. Give a dtype to cast to."
                )
            entries[part.name] = entry
    return list(entries.values())


def _shards(entries: Sequence[_WrittenTensor], limit: int | None) -> list[list[_WrittenTensor]]:
    """Distribute entries to files in order, filling each up to the limit; without one, to one file."""
    shards: list[list[_WrittenTensor]] = [[]]
    size = 0
    for entry in entries:
        if limit is not None and shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _write(path: Path, entries: Sequence[_WrittenTensor], export: list[str]) -> Iterator[int]:
    """Write one of the files named in ``export``. Yield the bytes of each chunk after it is written."""
    # The widest dtypes first, so that each tensor is aligned to its dtype for readers that map the file.
    entries = sorted(entries, key=lambda e: -e.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", WRITER: json.dumps(export)}}
    position = 0
    for entry in entries:
        end = position + entry.nbytes
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in entries:
            for _, part in parts_of(entry.tensor, 0, entry.tensor.numel()):
                data = as_bytes(part.to(entry.dtype))
                file.write(data)
                yield data.nbytes
        sync_file(file)
