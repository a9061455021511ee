"""Ranges of tensors in safetensors files, without the package and without mapping files into memory.

Format (huggingface.co/docs/safetensors): 8 bytes with the header's length (little-endian); the header, JSON with
dtype, shape and range of each tensor; the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ls_strategy.checkpoint.safetensors import DTYPES
from ls_strategy.checkpoint.source import as_bytes
from ls_strategy.errors import CheckpointError
from ls_strategy.pretrained.recipe import RecipeTensor, RecordedTensor

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_INDEX = ".safetensors.index.json"
_LARGEST_HEADER = 100_000_000
"""Maximum bytes of a header, as the format defines it."""

_SMALL_GAP = 64
"""Bytes between two runs that are always read along: a system call costs more. Wider gaps are, up to an eighth of a
run, so that all ranks together read little more than the file."""

_AT_ONCE = 1 << 24
"""Maximum bytes of a read that includes gaps."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, row by row from byte ``first`` on: a `Recipe`."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int

    def flat(self, start: int, stop: int) -> Tensor:
        """Read elements ``[start, stop)`` of the flattened tensor."""
        out = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        read_into(self.path, self.first + start * self.dtype.itemsize, as_bytes(out), self.name)
        return out

    def box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a rectangular part: each of its runs, or neighbouring runs together with small gaps between them."""
        numel = math.prod(sizes)
        if numel == 0:
            return torch.empty(sizes, dtype=self.dtype, device="cpu")
        run, starts = _runs(self.shape, offsets, sizes)
        if run == numel:
            (only,) = starts
            return self.flat(only, only + run).view(sizes)
        out = torch.empty(numel // run, run, dtype=self.dtype, device="cpu")
        size, rows = self.dtype.itemsize, list(starts)
        gap = max(_SMALL_GAP // size, run // 8)
        row = 0
        while row < len(rows):
            end = row + 1
            while (
                end < len(rows)
                and rows[end] - rows[end - 1] - run <= gap
                and (rows[end] + run - rows[row]) * size <= _AT_ONCE
            ):
                end += 1
            got = self.flat(rows[row], rows[end - 1] + run)
            for i in range(row, end):
                at = rows[i] - rows[row]
                out[i] = got[at : at + run]
            row = end
        return out.view(sizes)


def _runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, Iterator[int]]:
    """Return the length of a box's contiguous runs, and where each begins in the flattened tensor, in order."""
    outer = len(shape)
    while outer > 0 and sizes[outer - 1] == shape[outer - 1]:
        outer -= 1
    # dimensions from `outer` on are complete; the one before it is cut, and is the last that a run extends over
    split = max(outer - 1, 0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    run = math.prod(sizes[split:])
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))

    def starts(dim: int, at: int) -> Iterator[int]:
        if dim == split:
            yield at
            return
        for i in range(sizes[dim]):
            yield from starts(dim + 1, at + i * strides[dim])

    return run, starts(0, base)


def read_into(path: Path, first: int, target: memoryview, what: str) -> None:
    """Fill ``target`` from byte ``first`` of a file on. ``what``: for messages.

    Raises:
        CheckpointError: the file cannot be read, or ends too early.
    """
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(first)
            done = 0
            while done < len(target):
                moved = file.readinto(target[done:])
                if not moved:
                    raise CheckpointError(f"{path} ends inside {what}: it is incomplete. Copy it again.")
                done += moved
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def read_safetensors(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, recording: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a file, of several, or of all files of a folder, by name. Each is read when it is used.

    With ``recording``, what is done to them is recorded, and they are read when the result's values are needed. In a
    folder with an index (``model.safetensors.index.json``), the files that it names count.

    Raises:
        CheckpointError: a file is missing, or is not a complete safetensors file.
    """
    found: dict[str, Tensor] = {}
    for file in files_of(path):
        found |= _tensors_of(file, RecordedTensor if recording else RecipeTensor)
    return found


def files_of(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the safetensors files of a folder, of an index or of a list.

    Raises:
        CheckpointError: an index cannot be read, or a folder has no such file.
    """
    if not isinstance(path, (str, os.PathLike)):
        return [file for each in path for file in files_of(each)]
    place = Path(path)
    if place.name.endswith(_INDEX):
        return _indexed(place)
    if not place.is_dir():
        return [place]
    indexes = sorted(place.glob(f"*{_INDEX}"))
    if indexes:
        return _indexed(next((i for i in indexes if i.name == f"model{_INDEX}"), indexes[0]))
    return sorted(place.glob("*.safetensors"))


def _indexed(index: Path) -> list[Path]:
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.parent / file for file in sorted(files)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}. Copy it again.") from error


def _tensors_of(path: Path, kind: type[RecipeTensor]) -> dict[str, Tensor]:
    header, begin_of_data, nbytes = _header_of(path)
    found: dict[str, Tensor] = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = _BY_NAME[entry["dtype"]], entry["shape"], entry["data_offsets"]
            fits = end - begin == torch.Size(shape).numel() * dtype.itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the header's entry of {name} cannot be read: {error!r}.") from error
        if not fits or not 0 <= begin <= end <= nbytes:
            raise CheckpointError(
                f"{path} is damaged: its header puts {name} at bytes [{begin}, {end}) of {nbytes}. Copy it again."
            )
        found[name] = kind(Stored(path, name, dtype, tuple(shape), begin_of_data + begin))
    return found


def _header_of(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return a file's header, the offset of its data, and the bytes of data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length <= min(size - 8, _LARGEST_HEADER) else None
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Give a safetensors file, or a folder of them.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: it has no header.")
    header.pop("__metadata__", None)
    return header, 8 + length, size - 8 - length
