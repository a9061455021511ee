"""The manifest of a committed checkpoint: names, sizes and checksums of its files. It is written last.

A reader accepts a folder that has a manifest and files of the sizes that the manifest lists.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ls_strategy.checkpoint.place import CheckpointPath, sync_file
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError

FORMAT = 1
"""Version of the format. A reader refuses higher ones."""


@dataclass
class FileRecord:
    """Size and checksums of one file."""

    bytes: int
    parts: list[tuple[int, int, int]]
    """``(offset, length, crc32)`` of adjacent ranges that cover the file."""


@dataclass
class Manifest:
    """Manifest of a committed checkpoint: its step, the layout that saved it, and the records of its files."""

    step: int
    epoch: int
    layout: dict[str, Any]
    """What saved it: world size, ZeRO stage, tiers, precision. For display; loading does not use it."""

    files: dict[str, FileRecord]
    left_out: list[str] = field(default_factory=list)
    """Frozen parameters that were left out on purpose."""

    saved_at: float = 0.0
    """Seconds since 1970, by rank 0's clock."""

    format: int = FORMAT

    def to_json(self) -> str:
        """Return the file's text, which includes a checksum of itself."""
        fields = {**vars(self), "files": {name: vars(record) for name, record in self.files.items()}}
        return json.dumps({**fields, "crc32": _crc_of(fields)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the text of `to_json`.

        Raises:
            ValueError: The text is damaged, or another program wrote it.
        """
        try:
            raw = json.loads(text)
            if raw.pop("crc32") != _crc_of(raw):
                raise ValueError("its checksum differs")
            if isinstance(raw["format"], int) and raw["format"] > FORMAT:
                return cls(0, 0, {}, {}, format=raw["format"])  # the rest may be of any form
            files = {name: _record(each) for name, each in raw.pop("files").items()}
            found = cls(files=files, **raw)
            wrong = [name for name, is_right in _RIGHT.items() if not is_right(getattr(found, name))]
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if wrong:
            raise ValueError(f"{wrong[0]} is {getattr(found, wrong[0])!r:.40}")
        return found


_LATEST_S = 253402214400.0
"""The last day that a calendar of Python has."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "epoch": _is_count,
    "layout": lambda value: isinstance(value, dict),
    "left_out": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "saved_at": lambda value: isinstance(value, (int, float)) and 0 <= value < _LATEST_S,
    "format": _is_count,
}
"""Whether a field has a value that a save writes."""


def _record(raw: dict[str, Any]) -> FileRecord:
    parts = [(offset, length, crc) for offset, length, crc in raw["parts"]]
    if not _is_count(raw["bytes"]) or not all(_is_count(number) for part in parts for number in part):
        raise ValueError(f"{raw!r:.60} is not the record of a file")
    return FileRecord(raw["bytes"], parts)


def _crc_of(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def record_of(place: CheckpointPath, name: str) -> FileRecord:
    """Sync a small file that another function wrote, and return its record."""
    with place.open(name, "rb") as file:
        data = file.read()
        sync_file(file)
    return FileRecord(len(data), [(0, len(data), zlib.crc32(data))])


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Return whether a complete checkpoint folder of this package exists. Checks sizes, not contents."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointError: It is missing or damaged, or a file is missing or has the wrong size.
    """
    place = CheckpointPath(path)
    try:
        with place.open(MANIFEST, "r") as file:
            manifest = Manifest.from_json(file.read())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{place} is not a committed checkpoint: it has no {MANIFEST}, which is written last. The save was "
            "interrupted, or something else wrote the folder. Resume from another checkpoint."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{place}/{MANIFEST} is damaged ({error}). Resume from another checkpoint.") from error
    if manifest.format > FORMAT:
        raise CheckpointError(
            f"{place} was written by a newer version: it has format {manifest.format}, and this version reads up to "
            f"{FORMAT}. Update ls_strategy."
        )
    for name, record in manifest.files.items():
        size = place.size(name)
        if size != record.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{place}/{name} {found}, but the manifest says {record.bytes} bytes. Resume from another checkpoint."
            )
    return manifest


def verify(path: str | os.PathLike[str], name: str, record: FileRecord) -> None:
    """Read one file in full and compare its checksums.

    Raises:
        CheckpointError: A range differs. The message names the file and the range.
    """
    place = CheckpointPath(path)
    with place.open(name, "rb") as file:
        for offset, length, expected in record.parts:
            check(place, name, offset, file.read(length), expected)


def check(place: CheckpointPath, name: str, offset: int, data: bytes | memoryview, expected: int) -> None:
    """Compare the checksum of bytes that were read.

    Raises:
        CheckpointError: It differs.
    """
    if zlib.crc32(data) != expected:
        raise CheckpointError(
            f"{place}/{name} is damaged: bytes [{offset}, {offset + len(data)}) do not match their checksum. Resume "
            "from another checkpoint, and check the disk."
        )
