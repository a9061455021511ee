"""Describe and verify a checkpoint folder without reading tensors or building objects."""

from __future__ import annotations

import datetime
import math
import os
import posixpath
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ls_strategy.checkpoint.files import Reader
from ls_strategy.checkpoint.manifest import Manifest, read_manifest, verify
from ls_strategy.checkpoint.place import Place
from ls_strategy.checkpoint.source import is_folder
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError

KINDS = ("weights", "optimizer states", "others")


@dataclass(frozen=True)
class Entry:
    """One tensor or object of a checkpoint."""

    name: str
    kind: str
    """One of `KINDS`."""

    shape: tuple[int, ...] | None
    """None for an object."""

    dtype: str | None
    bytes: int
    """Size of the elements; for an object, its size in the file."""

    chunks: int
    """Number of chunks that it is stored in."""

    same_as: str | None = None
    """The entry that a tied parameter shares its chunks with."""


@dataclass(frozen=True)
class Description:
    """What ``ls-strategy inspect`` prints."""

    path: str
    step: int
    epoch: int
    saved_at: float
    """Seconds since 1970."""

    layout: dict[str, Any]
    """What saved it: world size, ZeRO stage, tiers, precision."""

    left_out: list[str]
    """Frozen parameters that were left out on purpose."""

    files: dict[str, int]
    """Bytes of each file."""

    unknown: list[str]
    """Files in the folder that the manifest does not name and nothing reads."""

    entries: list[Entry]

    def count(self, kind: str) -> tuple[int, int]:
        """Return the number of entries of a kind and their bytes. Tied entries count once."""
        found = [e for e in self.entries if e.kind == kind and e.same_as is None]
        return len(found), sum(e.bytes for e in found)

    def to_dict(self) -> dict[str, Any]:
        """Return it in JSON types."""
        totals = {kind: dict(zip(("count", "bytes"), self.count(kind), strict=True)) for kind in KINDS}
        return {**asdict(self), "totals": totals}

    def to_text(self, *, tensors: bool = False) -> str:
        """Return it as text, with a line per tensor if ``tensors``."""
        when = datetime.datetime.fromtimestamp(self.saved_at).astimezone().isoformat(sep=" ", timespec="seconds")
        rows = [
            ("path", self.path),
            ("step", str(self.step)),
            ("epoch", str(self.epoch)),
            ("saved at", when),
            ("saved from", ", ".join(f"{k} {v}" for k, v in self.layout.items()) or "unknown"),
        ]
        for kind in KINDS:
            number, nbytes = self.count(kind)
            rows.append((kind, f"{number:,} ({human_bytes(nbytes)})"))
        rows.append(("files", f"{len(self.files):,} ({human_bytes(sum(self.files.values()))})"))
        if self.left_out:
            rows.append(("left out", f"{len(self.left_out)} frozen parameters: {', '.join(self.left_out)}"))
        if self.unknown:
            rows.append(("not part of it", f"{', '.join(map(repr, self.unknown))}: not in the manifest, never read"))
        lines = [f"{name:<18}{value}" for name, value in rows]
        if tensors:
            lines += ["", *_table(self.entries)]
        return "\n".join(lines)


def human_bytes(nbytes: float) -> str:
    """Format a size with three digits.

    >>> human_bytes(1536), human_bytes(7)
    ('1.5 KiB', '7 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.4g} TiB"


def _table(entries: list[Entry]) -> list[str]:
    cells = [("name", "shape", "dtype", "size", "chunks")]
    for e in entries:
        shape = "object" if e.shape is None else str(list(e.shape))
        size = f"= {e.same_as}" if e.same_as else human_bytes(e.bytes)
        cells.append((e.name, shape, e.dtype or "", size, str(e.chunks)))
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def describe(path: str | os.PathLike[str]) -> Description:
    """Describe a committed checkpoint folder.

    Raises:
        CheckpointError: It is not committed, or a file is missing or has the wrong size.
    """
    manifest = _manifest(path)
    reader = Reader(path, manifest)
    return Description(
        path=str(Place(path)),
        step=manifest.step,
        epoch=manifest.epoch,
        saved_at=manifest.saved_at,
        layout=manifest.layout,
        left_out=manifest.left_out,
        files={name: record.bytes for name, record in sorted(manifest.files.items())},
        unknown=_unknown(path, manifest),
        entries=_entries(reader),
    )


def _unknown(path: str | os.PathLike[str], manifest: Manifest) -> list[str]:
    found = (posixpath.basename(entry) for entry in Place(path).entries())
    return sorted(name for name in found if name != MANIFEST and name not in manifest.files)


def _manifest(path: str | os.PathLike[str]) -> Manifest:
    if not is_folder(path):
        raise CheckpointError(
            f"{path} is a single file, which has no checksums. Give a checkpoint folder, or read it with torch.load."
        )
    return read_manifest(path)


def _entries(reader: Reader) -> list[Entry]:
    stored: dict[str, list[tuple[Any, ...]]] = {}
    lengths: dict[str, int] = {}
    for index, info in reader.metadata.storage_data.items():
        place = (tuple(index.offset or ()), info.relative_path, info.offset)
        stored.setdefault(index.fqn, []).append(place)
        lengths[index.fqn] = lengths.get(index.fqn, 0) + info.length
    result: list[Entry] = []
    first: dict[Any, str] = {}
    for key in reader.paths.values():  # in file order: a tied parameter's first name comes first
        if key in stored:
            first.setdefault(min(stored[key]), key)
    for path, key in sorted(reader.paths.items(), key=lambda item: _natural_order(item[1])):
        places = sorted(stored.get(key, []))
        metadata = reader.tensor_metadata(path)
        original = first[places[0]] if places else key
        shape = None if metadata is None else tuple(metadata.size)
        dtype = None if metadata is None else metadata.properties.dtype
        result.append(
            Entry(
                name=key,
                kind=_kind(path[0]),
                shape=shape,
                dtype=None if dtype is None else str(dtype).removeprefix("torch."),
                bytes=lengths.get(key, 0) if shape is None or dtype is None else math.prod(shape) * dtype.itemsize,
                chunks=len(places),
                same_as=None if original == key else original,
            )
        )
    return result


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts ``blocks.9`` before ``blocks.10``."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def _kind(root: str) -> str:
    if root == "model":
        return "weights"
    return "optimizer states" if re.fullmatch(r"optimizer_\d+", root) else "others"


def verify_all(path: str | os.PathLike[str], progress: Callable[[str], None] | None = None) -> list[str]:
    """Read every file in full and compare its checksums. ``progress`` gets each file's name before it is read.

    Returns:
        A message for each damaged file.

    Raises:
        CheckpointError: The folder is not committed, or a file is missing or has the wrong size.
    """
    broken: list[str] = []
    for name, record in sorted(_manifest(path).files.items()):
        if progress is not None:
            progress(name)
        try:
            verify(path, name, record)
        except CheckpointError as error:
            broken.append(str(error))
        except OSError as error:
            broken.append(f"{Place(path)}/{name} cannot be read: {error}")
    return broken
