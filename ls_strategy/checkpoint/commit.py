"""A checkpoint folder is there in full, or not at all.

::

    .last.ckpt.3f2a.partial/    every rank writes its file here, checksums it, syncs it
        manifest.json           rank 0, last, when every rank has reported: the commit
    last.ckpt/                  the folder renamed, in one step where the file system can swap two names
    .last.ckpt.3f2a.old/        what had the name before, on its way out

A reader accepts a folder with a manifest, whose files have the sizes that the manifest says. If the process ends
between two renames (where the file system cannot swap), `recover` finds the committed folder beside the name. Whatever
has no manifest is removed by the next save under the same name.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import posixpath
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ls_strategy.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
META = "meta.pt"
FORMAT = 1
"""Of the manifest. A reader refuses a higher number."""


@dataclass
class FileRecord:
    """Size and checksums of one file."""

    bytes: int
    parts: list[tuple[int, int, int]]
    """``(offset, length, crc32)`` of adjacent stretches that make up the file."""


@dataclass
class Manifest:
    """What a committed checkpoint consists of."""

    step: int
    epoch: int
    layout: dict[str, Any]
    """What saved it: world size, stage, tiers, precision. To be shown; loading does not depend on it."""

    files: dict[str, FileRecord]
    left_out: list[str] = field(default_factory=list)
    """Frozen parameters that were left out on purpose."""

    saved_at: float = 0.0
    """Seconds since 1970, by the clock of rank 0."""

    format: int = FORMAT

    def to_json(self) -> str:
        """As the file has it, with a checksum of itself."""
        fields = asdict(self)
        return json.dumps({**fields, "crc32": _crc_of(fields)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Back from `to_json`.

        Raises:
            ValueError: it is not what was written.
        """
        raw = json.loads(text)
        if raw.pop("crc32") != _crc_of(raw):
            raise ValueError("its checksum differs")
        files = {k: FileRecord(v["bytes"], [tuple(p) for p in v["parts"]]) for k, v in raw.pop("files").items()}
        return cls(files=files, **raw)


def _crc_of(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


class Place:
    """A checkpoint's folder on some file system: local, or any that fsspec knows by the path's protocol."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """``path`` may have a protocol, ``s3://bucket/name.ckpt``."""
        self.fs, bare = url_to_fs(os.fspath(path))
        self.local = isinstance(self.fs, LocalFileSystem)
        self.path = bare.rstrip("/")

    def __str__(self) -> str:
        return self.path if self.local else str(self.fs.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        """Last part of the path."""
        return posixpath.basename(self.path)

    def at(self, path: str) -> Place:
        """Another path of the same file system, without protocol."""
        place = object.__new__(Place)
        place.fs, place.local, place.path = self.fs, self.local, path.rstrip("/")
        return place

    @property
    def parent(self) -> Place:
        """The folder that this one is in."""
        return self.at(posixpath.dirname(self.path) or ".")

    def sibling(self, name: str) -> Place:
        """A folder beside this one."""
        return self.at(posixpath.join(posixpath.dirname(self.path), name))

    def open(self, name: str, mode: str) -> IO[Any]:
        """A file in the folder."""
        path = f"{self.path}/{name}"
        if self.local:
            return Path(path).open(mode)
        return cast("IO[Any]", self.fs.open(path, mode))

    def exists(self, name: str = "") -> bool:
        """Whether the folder, or a file in it, is there."""
        return bool(self.fs.exists(f"{self.path}/{name}" if name else self.path))

    def size(self, name: str) -> int | None:
        """Bytes of a file in the folder; None if there is none."""
        try:
            if self.local:
                return Path(self.path, name).stat().st_size
            return int(self.fs.info(f"{self.path}/{name}")["size"])
        except FileNotFoundError:
            return None

    def entries(self) -> list[str]:
        """Paths of what is in the folder, without protocol."""
        return [str(e).rstrip("/") for e in self.fs.ls(self.path, detail=False, refresh=True)]

    def make(self) -> None:
        """Make the folder and those above it."""
        self.fs.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Remove whatever has this name: a folder, a file, or a link (not what it points to)."""
        if self.local:
            path = Path(self.path)
            if path.is_symlink() or path.is_file():
                path.unlink(missing_ok=True)
            elif path.is_dir():
                shutil.rmtree(path)
        elif self.fs.exists(self.path):
            self.fs.rm(self.path, recursive=True)

    def rename(self, target: Place) -> None:
        """Take another name, which is free. Atomic on local file systems only."""
        if self.local:
            Path(self.path).rename(target.path)
        else:
            self.fs.mv(self.path, target.path, recursive=True)

    def sync(self) -> None:
        """Make sure that the folder's entries outlive a loss of power."""
        if not self.local:
            return
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        finally:
            os.close(descriptor)


_CANNOT_SYNC = (22, 95)
"""EINVAL and ENOTSUP: some network file systems cannot sync a folder."""


def sync_file(file: IO[Any]) -> None:
    """Flush, and wait until a local file's bytes are on the disk."""
    file.flush()
    with contextlib.suppress(AttributeError, NotImplementedError, ValueError):
        descriptor = file.fileno()
        os.fsync(descriptor)


# --- writing ---------------------------------------------------------------------------------------------------------


def staging(path: str | os.PathLike[str], save_id: str) -> Place:
    """Where a save to ``path`` writes before it is committed."""
    place = Place(path)
    return place.sibling(f".{place.name}.{save_id}.partial")


def new_save_id() -> str:
    """Tells saves apart."""
    return uuid.uuid4().hex[:8]


def begin(path: str | os.PathLike[str], save_id: str) -> None:
    """Make the folder that all ranks write to. Rank 0 only. Removes what earlier saves to ``path`` left behind."""
    recover(path)
    _clean(Place(path))
    _sweep(Place(path).parent)
    staging(path, save_id).make()


def _clean(place: Place) -> None:
    for _, found in _beside(place):
        found.remove()


_KINDS = ("partial", "old", "link", "gone")
"""What saves and removals make beside a name: a save under way, what it replaces, a link, what is being removed."""

_ABANDONED_S = 3600.0
"""A folder of an unfinished save under another name that nothing has written to for so long belongs to no run."""


def _sweep(folder: Place) -> None:
    """Remove what interrupted saves and removals under other names left in a folder. Local only."""
    for entry in folder.entries() if folder.local and folder.exists() else ():
        path = Path(entry)
        words = path.name[1:].rsplit(".", 2)
        ours = len(words) == 3 and words[2] in _KINDS and re.fullmatch("[0-9a-f]{8}", words[1])
        if not path.name.startswith(".") or not ours:
            continue
        named = os.path.lexists(path.with_name(words[0]))
        whole = (path / MANIFEST).exists()
        if words[2] == "gone":
            leftover = True
        elif words[2] == "old":
            leftover = named or not whole  # with its manifest, and nothing under the name: `recover` may want it
        else:
            touched = max((f.lstat().st_mtime for f in (path, *path.glob("*"))), default=0.0)
            leftover = (named or not whole) and time.time() - touched > _ABANDONED_S
        if leftover:
            with contextlib.suppress(OSError):
                folder.at(entry).remove()


def _beside(place: Place) -> list[tuple[str, Place]]:
    """Folders that saves to ``place`` left beside it: ``(kind, place)``, kinds as in `_KINDS`."""
    if not place.parent.exists():
        return []
    result: list[tuple[str, Place]] = []
    for entry in place.parent.entries():
        name = posixpath.basename(entry)
        words = name[len(place.name) + 2 :].split(".")
        if name.startswith(f".{place.name}.") and len(words) == 2 and words[1] in _KINDS:
            result.append((words[1], place.sibling(name)))
    return result


def record_of(place: Place, name: str) -> FileRecord:
    """Sync a small file that something else wrote, and take its checksum."""
    with place.open(name, "rb") as file:
        data = file.read()
        sync_file(file)
    return FileRecord(len(data), [(0, len(data), zlib.crc32(data))])


def commit(path: str | os.PathLike[str], save_id: str, manifest: Manifest) -> None:
    """Check that every file is there, write the manifest, and give the folder its name. Rank 0 only.

    Raises:
        CheckpointError: a rank's file is not visible from here.
    """
    place, new = Place(path), staging(path, save_id)
    for name, record in manifest.files.items():
        if new.size(name) != record.bytes:
            raise CheckpointError(
                f"{name} of the checkpoint {place} has {new.size(name)} bytes as rank 0 sees it, the rank that wrote "
                f"it wrote {record.bytes}. Save to a file system that all nodes share."
            )
    manifest.saved_at = time.time()
    with new.open(f"{MANIFEST}.tmp", "w") as file:
        file.write(manifest.to_json())
        sync_file(file)
    if new.local:
        Path(new.path, f"{MANIFEST}.tmp").rename(Path(new.path, MANIFEST))
    else:
        new.fs.mv(f"{new.path}/{MANIFEST}.tmp", f"{new.path}/{MANIFEST}")
    new.sync()
    _replace(new, place, save_id)


def _replace(new: Place, place: Place, save_id: str) -> None:
    """Give ``new`` the name of ``place``; what had it goes."""
    old = place.sibling(f".{place.name}.{save_id}.old")
    occupied = os.path.lexists(place.path) if place.local else place.exists()
    if not occupied:
        new.rename(place)
    elif place.local and _exchange(new.path, place.path):
        new.rename(old)
    else:
        place.rename(old)
        new.rename(place)
    place.parent.sync()
    if occupied:
        old.remove()


def _exchange(a: str, b: str) -> bool:
    """Swap two names at once, ``renameat2(RENAME_EXCHANGE)``; False where the system or file system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0
    except (OSError, AttributeError):
        return False


def discard(path: str | os.PathLike[str], save_id: str) -> None:
    """A save failed: remove what it wrote. Rank 0 only."""
    with contextlib.suppress(OSError):
        staging(path, save_id).remove()


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, folder or file; it loses its name first, so that no half of it is ever found under it."""
    place = Place(path)
    exists = os.path.lexists(place.path) if place.local else place.exists()
    if not exists:
        return
    _turn_links(place)
    if place.local and Path(place.path).is_dir() and not Path(place.path).is_symlink():
        gone = place.sibling(f".{place.name}.{new_save_id()}.gone")
        place.rename(gone)
        gone.remove()
        return
    place.remove()


def _turn_links(place: Place) -> None:
    """Links to a checkpoint that goes turn to the newest other one: ``last.ckpt`` leads somewhere at any moment."""
    if not place.local or Path(place.path).is_symlink():
        return
    for entry in Path(place.path).parent.iterdir():
        if entry.is_symlink() and entry.resolve() == Path(place.path).resolve():
            others = [e for e in Path(place.path).parent.iterdir() if not e.is_symlink() and str(e) != place.path]
            ranked = [(saved_at, e) for e in others if (saved_at := _saved_at(place.at(str(e)))) is not None]
            if ranked:
                link(str(max(ranked)[1]), str(entry))


def link(path: str | os.PathLike[str], name: str | os.PathLike[str]) -> None:
    """Make ``name`` a relative link to the checkpoint ``path``, in one step, whatever ``name`` was. Local only."""
    target = Path(name).absolute()
    _clean(Place(target))
    new = target.parent / f".{target.name}.{new_save_id()}.link"
    new.symlink_to(os.path.relpath(Path(path).absolute(), target.parent))
    if target.is_dir() and not target.is_symlink():
        old = target.parent / f".{target.name}.{new_save_id()}.old"
        if _exchange(str(new), str(target)):
            new.rename(old)
        else:
            target.rename(old)
            new.rename(target)
        shutil.rmtree(old)
    else:
        new.replace(target)


# --- reading ---------------------------------------------------------------------------------------------------------


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Whether a whole checkpoint folder of ours is there. Sizes are looked at, contents are not."""
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a committed checkpoint.

    Raises:
        CheckpointError: there is none, it cannot be read, or a file is missing or has another size.
    """
    place = Place(path)
    try:
        with place.open(MANIFEST, "r") as file:
            manifest = Manifest.from_json(file.read())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{place} is not a committed checkpoint: it has no {MANIFEST}, which is written last. The save was "
            "interrupted, or something else wrote the folder. Resume from another checkpoint."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place}/{MANIFEST} is damaged ({error}). Resume from another checkpoint.") from error
    if manifest.format > FORMAT:
        raise CheckpointError(
            f"{place} was written by a newer version (format {manifest.format}, this one reads {FORMAT}). Update."
        )
    for name, record in manifest.files.items():
        size = place.size(name)
        if size != record.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{place}/{name} {found}, the manifest says {record.bytes} bytes. Resume from another checkpoint."
            )
    return manifest


def recover(path: str | os.PathLike[str]) -> None:
    """If ``path`` lost its name between two renames, give it back. Rank 0 only; does nothing otherwise."""
    place = Place(path)
    if os.path.lexists(place.path) if place.local else place.exists():
        return
    found = [p for kind, p in _beside(place) if kind != "gone" and is_committed(str(p))]
    if found:
        newest_one = max(found, key=lambda p: read_manifest(str(p)).saved_at)
        newest_one.rename(place)


def newest(folders: Iterable[str | os.PathLike[str]]) -> str | None:
    """The checkpoint that was saved last in any of these folders: a committed folder, or a ``.ckpt`` file.

    Folders count by the time in their manifest, files by their modification time. Call it on one rank.
    """
    found: list[tuple[float, str]] = []
    for folder in folders:
        place = Place(folder)
        if not place.exists():
            continue
        _recover_all(place)
        for entry in place.entries():
            child = place.at(entry)
            saved_at = _saved_at(child)
            if saved_at is not None:
                found.append((saved_at, str(child)))
    return max(found)[1] if found else None


def _recover_all(place: Place) -> None:
    """Give every checkpoint in a folder its name back."""
    for entry in place.entries():
        name = posixpath.basename(entry)
        if name.startswith(".") and name.endswith((".partial", ".old")) and name.count(".") >= 3:
            real = name[1:].rsplit(".", 2)[0]
            recover(f"{place}/{real}")


def _saved_at(place: Place) -> float | None:
    if place.name.startswith("."):
        return None
    if place.local and Path(place.path).is_symlink() and not Path(place.path).exists():
        return None
    if place.fs.isdir(place.path):
        try:
            return read_manifest(str(place)).saved_at
        except CheckpointError:
            return None
    if not place.name.endswith(".ckpt"):
        return None
    return Path(place.path).stat().st_mtime if place.local else place.fs.modified(place.path).timestamp()


def verify(path: str | os.PathLike[str], name: str, record: FileRecord) -> None:
    """Read one file in full and compare its checksums.

    Raises:
        CheckpointError: naming the file and the stretch that differs.
    """
    place = Place(path)
    with place.open(name, "rb") as file:
        for offset, length, expected in record.parts:
            check(place, name, offset, file.read(length), expected)


def check(place: Place, name: str, offset: int, data: bytes | memoryview, expected: int) -> None:
    """Compare the checksum of bytes that were read.

    Raises:
        CheckpointError: it differs.
    """
    if zlib.crc32(data) != expected:
        raise CheckpointError(
            f"{place}/{name} is damaged: bytes [{offset}, {offset + len(data)}) do not have the checksum that they "
            "were written with. Resume from another checkpoint, and look at the disk."
        )
