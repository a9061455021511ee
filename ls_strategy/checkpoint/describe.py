"""Describe and verify a checkpoint without reading tensors or building objects.

::

    folder of ours        manifest: step, what saved it, sizes, checksums; index: tensors
    folder of DCP         the same index, as Lightning's FSDPStrategy and ModelParallelStrategy write it; no checksums
    file of torch.save    the pickle of Lightning's dictionary; an archive's own checksums
    anything else         `of_tensors`, by whoever reads it
"""

from __future__ import annotations

import datetime
import math
import os
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ls_strategy.checkpoint.files import Reader
from ls_strategy.checkpoint.history import HISTORY
from ls_strategy.checkpoint.inert import Described, read_inert, tensors_in, wrong_records
from ls_strategy.checkpoint.manifest import Manifest, read_manifest, verify
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.source import OURS, is_folder, open_folder
from ls_strategy.checkpoint.target import MANIFEST, META, METADATA
from ls_strategy.errors import CheckpointError

KINDS = ("weights", "optimizer states", "others")

FOLDER, DCP, FILE = "folder", "folder of torch.distributed.checkpoint", "file of torch.save"


@dataclass(frozen=True)
class DescribedEntry:
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
    """Description of a checkpoint, as ``ls-strategy inspect`` prints it."""

    path: str
    format: str
    """What kind of folder or file it is."""

    step: int | None
    """None: unknown; so are ``epoch`` and ``saved_at``."""

    epoch: int | None
    saved_at: float | None
    """Seconds since 1970."""

    files: dict[str, int]
    """Bytes of each file."""

    entries: list[DescribedEntry]
    layout: dict[str, Any] = field(default_factory=dict)
    """What saved it: world size, and by their options' names stage, parallel sizes, tiers and precision."""

    left_out: list[str] = field(default_factory=list)
    """Frozen parameters that were left out on purpose."""

    unknown: list[str] = field(default_factory=list)
    """Files in the folder that the manifest does not name and nothing reads."""

    has_checksums: bool = False
    """Whether `verify_all` can compare them."""

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
        date = None if self.saved_at is None else datetime.datetime.fromtimestamp(self.saved_at)
        rows = [
            ("path", self.path),
            ("format", self.format),
            ("step", _or_unknown(self.step)),
            ("epoch", _or_unknown(self.epoch)),
            ("saved at", _or_unknown(date and date.astimezone().isoformat(sep=" ", timespec="seconds"))),
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


def _table(entries: list[DescribedEntry]) -> list[str]:
    cells = [("name", "shape", "dtype", "size", "chunks")]
    for e in entries:
        shape = "object" if e.shape is None else str(list(e.shape))
        size = f"= {e.same_as}" if e.same_as else human_bytes(e.bytes)
        cells.append((e.name, shape, e.dtype or "", size, str(e.chunks)))
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _or_unknown(value: Any) -> str:
    return "unknown" if value is None else str(value)


# --- what there is ----------------------------------------------------------------------------------------------------


def describe(path: str | os.PathLike[str]) -> Description:
    """Describe a checkpoint folder, or a file of ``torch.save``.

    Raises:
        CheckpointError: It is not committed, a file is missing or has the wrong size, or it is no checkpoint.
    """
    if not is_folder(path):
        return _of_file(CheckpointPath(path))
    reader, manifest = _open(path)
    if manifest is None:
        return _of_dcp(reader)
    return Description(
        path=str(CheckpointPath(path)),
        format=FOLDER,
        step=manifest.step,
        epoch=manifest.epoch,
        saved_at=manifest.saved_at,
        layout={name: value for name, value in manifest.layout.items() if name != HISTORY},
        left_out=manifest.left_out,
        files={name: record.bytes for name, record in sorted(manifest.files.items())},
        unknown=_unknown(path, manifest),
        entries=_entries(reader),
        has_checksums=True,
    )


def _open(path: str | os.PathLike[str]) -> tuple[Reader, Manifest | None]:
    """Open a folder; of one without a manifest, name the checkpoints in it."""
    place = CheckpointPath(path)
    if not place.exists(MANIFEST) and not place.exists(METADATA):
        inside = [e for e in sorted(place.entries()) if e.endswith(".ckpt") or place.at(f"{e}/{MANIFEST}").exists()]
        if inside:
            shown = ", ".join(map(posixpath.basename, inside[:5])) + (" ..." if len(inside) > 5 else "")
            raise CheckpointError(
                f"Got {place}, but it is a folder of checkpoints. Give one of the {len(inside)} in it: {shown}."
            )
    return open_folder(path)


def _of_dcp(reader: Reader) -> Description:
    place = reader.place
    ends: dict[str, int] = {METADATA: 0, META: 0}
    for info in reader.metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    sizes: dict[str, int] = {}
    for name, end in sorted(ends.items()):
        size = place.size(name)
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{place}/{name} {found}, but {METADATA} places tensors up to byte {end} of it. Copy it again, or "
                "resume from another checkpoint."
            )
        sizes[name] = size
    with place.open(META, "rb") as file:
        meta = read_inert(file, f"{place}/{META}")
    step, epoch = _progress(meta)
    return Description(
        path=str(place),
        format=DCP,
        step=step,
        epoch=epoch,
        saved_at=_written(place.at(f"{place.path}/{META}")),
        files=sizes,
        entries=_entries(reader),
    )


def _of_file(place: CheckpointPath) -> Description:
    with place.open_itself() as file:
        found = read_inert(file, str(place))
        zipped = zipfile.is_zipfile(file)
    step, epoch = _progress(found)
    size = int(place.fs.info(place.path)["size"])
    ours = found.get(OURS) if isinstance(found, dict) else None
    ranks = ours.get("world_size") if isinstance(ours, dict) else None
    return Description(
        path=str(place),
        format=FILE,
        step=step,
        epoch=epoch,
        saved_at=_written(place),
        files={place.name: size},
        entries=of_tensors(tensors_in(found)),
        # The file itself depends on nothing else.
        layout={"world_size": ranks} if isinstance(ranks, int) and not isinstance(ranks, bool) else {},
        has_checksums=zipped,
    )


def _progress(found: Any) -> tuple[int | None, int | None]:
    """Return step and epoch of Lightning's dictionary."""
    values = [found.get(name) if isinstance(found, dict) else None for name in ("global_step", "epoch")]
    step, epoch = (value if isinstance(value, int) and not isinstance(value, bool) else None for value in values)
    return step, epoch


def _written(place: CheckpointPath) -> float | None:
    """Return when a file was last written. None if its file system does not say."""
    try:
        return float(place.fs.modified(place.path).timestamp())
    except (OSError, NotImplementedError, KeyError, AttributeError, TypeError, ValueError):
        return None


def of_tensors(tensors: Iterable[tuple[tuple[str, ...], Any]]) -> list[DescribedEntry]:
    """Return an entry for every tensor of a checkpoint that is one dictionary. Tensors are not read."""
    entries: list[DescribedEntry] = []
    first: dict[Any, str] = {}
    for path, tensor in tensors:
        name, shape = ".".join(path), tuple(tensor.shape)
        place = None
        if isinstance(tensor, Described) and tensor.storage is not None and math.prod(shape):
            place = tensor.storage.key, tensor.first, shape
        original = name if place is None else first.setdefault(place, name)
        entries.append(
            DescribedEntry(
                name=name,
                kind=_kind(path[0]),
                shape=shape,
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=math.prod(shape) * tensor.dtype.itemsize,
                chunks=1,
                same_as=None if original == name else original,
            )
        )
    return entries


def _unknown(path: str | os.PathLike[str], manifest: Manifest) -> list[str]:
    found = (posixpath.basename(entry) for entry in CheckpointPath(path).entries())
    return sorted(name for name in found if name != MANIFEST and name not in manifest.files)


def _entries(reader: Reader) -> list[DescribedEntry]:
    stored: dict[str, list[tuple[Any, ...]]] = {}
    lengths: dict[str, int] = {}
    for index, info in reader.metadata.storage_data.items():
        place = (tuple(index.offset or ()), info.relative_path, info.offset)
        stored.setdefault(index.fqn, []).append(place)
        lengths[index.fqn] = lengths.get(index.fqn, 0) + info.length
    result: list[DescribedEntry] = []
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
            DescribedEntry(
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
    """Return the kind of what is under a key: of ours, of Lightning's, of Fabric's."""
    if root in ("model", "state_dict", "module"):
        return "weights"
    return "optimizer states" if re.fullmatch(r"optimizers?(_\d+)?|optimizer_states?", root) else "others"


# --- whether it is unharmed -------------------------------------------------------------------------------------------


def verify_all(path: str | os.PathLike[str], progress: Callable[[str], None] | None = None) -> list[str]:
    """Read every file in full and compare its checksums. ``progress`` gets each file's name before it is read.

    A folder of DCP and a file of torch before 1.6 have none: of them, nothing is read.

    Returns:
        A message for each damaged file, or record of a file.

    Raises:
        CheckpointError: The folder is not committed, or a file is missing or has the wrong size.
    """
    place = CheckpointPath(path)
    if not is_folder(path):
        return _wrong_records(place, progress)
    if not place.exists(MANIFEST) and place.exists(META) and place.exists(METADATA):
        return []
    broken: list[str] = []
    for name, record in sorted(read_manifest(path).files.items()):
        if progress is not None:
            progress(name)
        try:
            verify(path, name, record)
        except CheckpointError as error:
            broken.append(str(error))
        except OSError as error:
            broken.append(f"{place}/{name} cannot be read: {error}")
    return broken


def _wrong_records(place: CheckpointPath, progress: Callable[[str], None] | None) -> list[str]:
    if progress is not None:
        progress(place.name)
    with place.open_itself() as file:
        return [
            f"{place} is damaged: its record {record} does not match its checksum ({why}). Resume from "
            "another checkpoint, and check the disk."
            for record, why in wrong_records(file)
        ]
