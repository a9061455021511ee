"""Check that a save, a link or a removal replaces a checkpoint and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
META = "meta.pt"
INDEX = "index.json"

_NAMES = "|".join(map(re.escape, (METADATA, META, INDEX, MANIFEST, f"{MANIFEST}.tmp")))
_OURS = re.compile(rf"__\d+_\d+\.distcp|{_NAMES}")
_BY_THE_SYSTEM = re.compile(r"\.nfs[0-9a-f]+")
"""Files on NFS that were removed while a process had them open."""

_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""First bytes of files from torch before 1.6."""


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Check that a path, as the user gave it, is free or holds a checkpoint.

    Raises:
        CheckpointError: It holds something else, which would be lost.
    """
    text = os.fspath(path)
    place = CheckpointPath(text)
    problem = _of_the_name(text, place) or _of_what_is_there(place)
    if problem is not None:
        raise CheckpointError(f"Got the checkpoint path {text!r}, which {problem}")


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder with a manifest of this package, even a damaged one."""
    place = CheckpointPath(path)
    if not place.fs.isdir(place.path):
        return False
    names = {name for name, _ in _names_in(place)}
    return MANIFEST in names and _looks_ours(place, names)


def _of_the_name(text: str, place: CheckpointPath) -> str | None:
    if not text.strip():
        return "is empty. Give a name, such as runs/last.ckpt."
    if place.name in ("", ".", "..") or not (place.local or place.path.count("/")):
        return "is the root of a file system. Give a name below it."
    if not place.local:
        return None
    with contextlib.suppress(FileNotFoundError):  # the working directory may be gone
        here, there = Path.cwd(), Path(os.path.realpath(place.path))
        if there == here or there in here.parents:
            return "is the working directory or contains it. Give another name, such as runs/last.ckpt."
    return None


def _of_what_is_there(place: CheckpointPath) -> str | None:
    if not place.local:
        of_kind = _of_folder if place.fs.isdir(place.path) else _of_file
        return of_kind(place) if place.exists() else None
    try:
        mode = Path(place.path).lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    for is_kind, of_kind in ((stat.S_ISLNK, _of_link), (stat.S_ISDIR, _of_folder), (stat.S_ISREG, _of_file)):
        if is_kind(mode):
            return of_kind(place)
    return "is a device, a pipe or a socket. A save replaces only checkpoints. Give another name."


def _of_link(place: CheckpointPath) -> str | None:
    """Check the target of a link, although only the link would be replaced."""
    target = place.at(os.path.realpath(place.path))
    if not target.exists() or _of_what_is_there(target) is None:
        return None
    return (
        f"is a link to {target}, which is not a checkpoint. A save replaces only checkpoints and links to them. Give "
        f"a name in that folder, {place.path}/last.ckpt, or another name."
    )


def _of_folder(place: CheckpointPath) -> str | None:
    found: set[str] = set()
    for name, is_file in _names_in(place):
        if not is_file or not (_OURS.fullmatch(name) or _BY_THE_SYSTEM.fullmatch(name)):
            return (
                f"is a folder that holds something other than a checkpoint: {name}. A save replaces only checkpoints. "
                f"Give a name in it, such as {place}/last.ckpt, or remove the folder."
            )
        found.add(name)
    if not found or (MANIFEST in found and _looks_ours(place, found)):
        return None
    if not place.local:  # an interrupted copy
        return None
    return (
        f"is a folder that this package did not write, or a checkpoint without its {MANIFEST}. A save replaces "
        "only its own checkpoints. Give another name, or remove the folder."
    )


def _names_in(place: CheckpointPath) -> Iterator[tuple[str, bool]]:
    """Yield names, and whether each is a regular file."""
    if not place.local:
        for entry in place.fs.ls(place.path, detail=True, refresh=True):
            name = str(entry["name"]).rstrip("/")
            if name != place.path:  # object stores list the folder's own marker
                yield place.at(name).name, entry["type"] != "directory"
        return
    with os.scandir(place.path) as entries:
        for entry in entries:
            yield entry.name, entry.is_file(follow_symlinks=False)


def _looks_ours(place: CheckpointPath, names: set[str]) -> bool:
    """Return whether the manifest is one of ours, possibly damaged: other tools use the same file name."""
    if METADATA in names or any(name.endswith(".distcp") for name in names):
        return True
    try:
        with place.open(MANIFEST, "r") as file:
            return {"files", "layout", "crc32"} <= json.loads(file.read()).keys()
    except (OSError, ValueError, AttributeError, RecursionError, CheckpointError):
        return False


def _of_file(place: CheckpointPath) -> str | None:
    with place.open_itself() as file:
        head = file.read(1024)
    if not head or head.startswith(_OLD_TORCH) or _is_torch_archive(head):
        return None
    return (
        "is a file that torch.save did not write. A save replaces only checkpoints. Give another name, or remove the "
        "file."
    )


def _is_torch_archive(head: bytes) -> bool:
    """Return whether the first record is the pickle of a ``torch.save``, even in a truncated file."""
    length = int.from_bytes(head[26:28], "little")
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + length].endswith(b"/data.pkl")
