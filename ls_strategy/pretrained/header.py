"""The header of a safetensors file, as strictly as the package reads it: what it refuses, is refused here.

Format (huggingface.co/docs/safetensors): 8 bytes with the header's length (little-endian); the header, JSON with
dtype, shape and range of each tensor; the tensors' bytes, which cover the rest of the file without gaps or overlaps.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NoReturn

import torch

from ls_strategy.checkpoint.place import open_file
from ls_strategy.checkpoint.safetensors import DTYPES
from ls_strategy.errors import CheckpointError

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_LARGEST_HEADER = 100_000_000
"""Maximum bytes of a header, as the format defines it."""

_LARGEST = 1 << 63
"""Numbers of elements are less. torch multiplies the dimensions of empty tensors too."""


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor as the header describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """First byte of the data, which begins after the header."""

    end: int
    """One past the last."""


def read_header(path: Path) -> tuple[dict[str, HeaderEntry], int]:
    """Return the tensors of a file by name, in the header's order, and the offset of the data.

    Raises:
        CheckpointError: The file is missing, or is not a complete safetensors file.
    """
    text, begin, nbytes = _text_of(path)
    try:
        header = parse_json(text, parse_constant=_not_json, parse_int=_whole)
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        _check_metadata(header.pop("__metadata__", None))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}. Copy it again.") from error
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    _check_ranges(path, entries, nbytes)
    return entries, begin


def parse_json(text: bytes, **options: Any) -> Any:
    """Parse JSON in UTF-8 that has no name twice. ``options``: of ``json.loads``.

    Raises:
        ValueError: It is something else.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text.decode(), object_pairs_hook=_once, **options)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"it has {Counter(name for name, _ in pairs).most_common(1)[0][0]!r} twice")
    for words in pairs:
        for word in words:
            if isinstance(word, str):
                word.encode()  # half of a surrogate pair is in no other reader's strings, and cannot be printed
    return found


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _whole(digits: str) -> int:
    if digits.startswith("-"):
        raise ValueError(f"it has the negative number {digits[:20]}")
    return int(digits)


def _text_of(path: Path) -> tuple[bytes, int, int]:
    """Return the header's text, the offset of the data, and the bytes of data."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 0 < length <= min(size - 8, _LARGEST_HEADER) else b""
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Give a safetensors file, or a folder of them.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not a path: {error}. Give a safetensors file.") from error
    if not text or len(text) < length:
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: it has no header. Copy it again.")
    return text, 8 + length, size - 8 - length


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ValueError("its __metadata__ does not map strings to strings")


def _entry(path: Path, name: str, entry: Any) -> HeaderEntry:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path} is damaged: its header describes {name} by {shortened(entry)}. Copy it again.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BY_NAME:
        raise CheckpointError(
            f"{path}: {name} has the dtype {shortened(dtype)}, and this version reads {', '.join(_BY_NAME)}. Convert "
            "the file to one of these."
        )
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2 or not _whole_numbers(entry):
        raise CheckpointError(
            f"{path} is damaged: its header gives {name} the shape {shortened(shape)} and the bytes "
            f"{shortened(offsets)}. Copy it again."
        )
    return HeaderEntry(_BY_NAME[dtype], tuple(shape), *offsets)


def _whole_numbers(entry: dict[str, Any]) -> bool:
    return all(type(number) is int for number in (*entry["shape"], *entry["data_offsets"]))  # True is another type


def _check_ranges(path: Path, entries: dict[str, HeaderEntry], nbytes: int) -> None:
    """Check that the tensors have the sizes of their ranges, and cover the data without gaps or overlaps."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        elements = full = 1
        for size in entry.shape:
            elements, full = elements * size, full * max(size, 1)
            if full >= _LARGEST:
                raise CheckpointError(
                    f"{path} is damaged: {name} has the shape {shortened(list(entry.shape))}. Copy it again."
                )
        reason = None
        if entry.end > nbytes:
            reason = ""
        elif entry.end - entry.begin != elements * entry.dtype.itemsize:
            reason = f", which are not {elements} elements of {DTYPES[entry.dtype]}"
        elif entry.begin != at:
            reason = f", but {at} is where the bytes of the tensor before it end"
        if reason is not None:
            raise CheckpointError(
                f"{path} is damaged: its header puts {name} at bytes [{entry.begin}, {entry.end}) of {nbytes}{reason}. "
                "Copy it again."
            )
        at = entry.end
    if at < nbytes:
        raise CheckpointError(
            f"{path} is damaged: it has {nbytes} bytes of data, of which its header describes {at}. Copy it again."
        )
