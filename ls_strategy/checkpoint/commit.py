"""Atomic checkpoints: the steps of a save, and recovery from an interrupted one.

::

    .last.ckpt.saving           locked by the process that saves: see `claim`
    .last.ckpt.3f2a.partial/    every rank writes its file here, with checksums, and syncs it
        manifest.json           written last by rank 0, after every rank has reported
    last.ckpt/                  the folder after the rename, which is the commit; atomic where names can be swapped
    .last.ckpt.3f2a.old/        the previous checkpoint of that name, where names cannot be swapped
    .last.ckpt.3f2a.gone/       a checkpoint that is being removed

A reader accepts a folder with a manifest under its own name: see `manifest`. A name can be lost only between two
renames. That leaves a ``.partial`` (or ``.link``) and an ``.old`` of the same save, and `recover` restores the name.
Nothing else is restored, so what a user has removed stays removed. The next save in the folder removes leftovers. A
save replaces nothing but checkpoints: see `target`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import posixpath
import re
import time
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ls_strategy.checkpoint.claim import SUFFIX, Claim, claim, is_lock_file, require_claim
from ls_strategy.checkpoint.history import HISTORY, History, Saved, latest
from ls_strategy.checkpoint.inert import read_inert
from ls_strategy.checkpoint.manifest import Manifest, is_committed, read_manifest
from ls_strategy.checkpoint.place import CheckpointPath, sync_file
from ls_strategy.checkpoint.source import OURS
from ls_strategy.checkpoint.target import MANIFEST, check_replaceable
from ls_strategy.checkpoint.web import is_web
from ls_strategy.errors import CheckpointError

_log = logging.getLogger(__name__)


# --- writing ---------------------------------------------------------------------------------------------------------


def staging(path: str | os.PathLike[str], save_id: str) -> CheckpointPath:
    """Return the folder or file that a save to ``path`` writes before it is committed."""
    place = CheckpointPath(path)
    return place.sibling(f".{place.name}.{save_id}.partial")


def new_save_id() -> str:
    """Return an id for one save."""
    return uuid.uuid4().hex[:8]


def begin(path: str | os.PathLike[str], save_id: str, *, folder: bool = True) -> Claim:
    """Claim the name, remove leftovers of earlier saves, and create the folder that all ranks write to. Rank 0 only.

    The caller releases the claim when the save has ended. With ``folder=False`` it writes a single file instead.

    Raises:
        CheckpointError: The name belongs to something other than a checkpoint, or another process is saving to it.
    """
    place = CheckpointPath(path)
    _check_name(place)
    check_replaceable(path)
    place.parent.make()
    held = require_claim(place)
    try:
        _restore_name(place, held)
        clean(place, held)
        _sweep(place.parent)
        if folder:
            staging(path, save_id).make()
    except BaseException:
        held.release()
        raise
    return held


def _check_name(place: CheckpointPath) -> None:
    """Refuse a name that leaves no room for the names of a save in progress.

    Raises:
        CheckpointError: It is too long.
    """
    if not place.local:
        return
    folder = Path(place.parent.path)
    most = (os.pathconf(folder, "PC_NAME_MAX") if folder.is_dir() else 255) - len(f"..{new_save_id()}.partial")
    size = len(os.fsencode(place.name))
    if size > most:
        raise CheckpointError(
            f"Got a checkpoint name of {size} bytes, {place.name[:40]!r}..., but it can have at most {most}: while it "
            "is saved, it has a longer name. Give a shorter one (filename of ModelCheckpoint)."
        )


def clean(place: CheckpointPath, held: Claim) -> None:
    """Remove leftovers of saves to ``place``, except the only copy of a checkpoint."""
    for kind, _, found in _temporaries(place):
        if kind == "old" and not place.taken and _saved_at(found) is not None:
            continue
        if held.certain or (found.idle_for() or 0.0) > _ABANDONED_S:
            _try_to_remove(found)


def _try_to_remove(place: CheckpointPath) -> None:
    try:
        place.remove()
    except OSError as error:  # harmless, and the next save tries again
        _log.warning("%s is left over from a checkpoint and could not be removed: %s", place, error)


_KINDS = ("partial", "old", "link", "gone")
"""Suffixes of temporary names: a save in flight, the checkpoint it replaces, a link, a checkpoint being removed."""

_LEFTOVER = re.compile(rf"\.(.+)\.([0-9a-f]{{8}})\.({'|'.join(_KINDS)})")

_ABANDONED_S = 3600.0
"""Seconds without a write after which a leftover belongs to no run, where no lock tells."""

_RENAMED_S = 60.0
"""Seconds after which a save that has written its manifest is not between two renames, where no lock tells."""


def _sweep(folder: CheckpointPath) -> None:
    """Remove leftovers of interrupted saves and removals under other names in a folder. Local only."""
    for entry in folder.entries() if folder.local else ():
        name = Path(entry).name
        leftover = _LEFTOVER.fullmatch(name)
        if leftover is not None:
            place = folder.at(entry).sibling(leftover[1])
            if not place.taken and _lost(place):
                continue  # left for `recover`
        elif name.startswith(".") and name.endswith(SUFFIX) and is_lock_file(Path(entry)):
            place = folder.at(entry).sibling(name[1 : -len(SUFFIX)])
        else:
            continue
        with contextlib.suppress(OSError):
            held = claim(place)
            if held is not None:
                with held:
                    clean(place, held)


def _temporaries(place: CheckpointPath) -> list[tuple[str, str, CheckpointPath]]:
    """Return the temporary files of saves to ``place`` as ``(kind, save_id, place)``, kinds as in `_KINDS`."""
    result: list[tuple[str, str, CheckpointPath]] = []
    for entry in place.parent.entries():
        found = _LEFTOVER.fullmatch(posixpath.basename(entry))
        if found is not None and found[1] == place.name:
            result.append((found[3], found[2], place.at(entry)))
    return result


def commit(path: str | os.PathLike[str], save_id: str, manifest: Manifest) -> None:
    """Check that all files are visible, write the manifest, and give the folder its name. Rank 0 only.

    Raises:
        CheckpointError: A rank's file is not visible on this node.
    """
    place, new = CheckpointPath(path), staging(path, save_id)
    for name, record in manifest.files.items():
        if new.size(name) != record.bytes:
            raise CheckpointError(
                f"{name} of the checkpoint {place} has {new.size(name)} bytes as rank 0 sees it, but its rank wrote "
                f"{record.bytes}. Save to a file system that all nodes share."
            )
    new.sync()  # the files' names must be on disk before the manifest
    manifest.saved_at = time.time()
    with new.open(f"{MANIFEST}.tmp", "w") as file:
        file.write(manifest.to_json())
        sync_file(file)
    if new.local:
        Path(new.path, f"{MANIFEST}.tmp").rename(Path(new.path, MANIFEST))
    else:
        new.fs.mv(f"{new.path}/{MANIFEST}.tmp", f"{new.path}/{MANIFEST}")
    new.sync()
    take_name(path, save_id)


def take_name(path: str | os.PathLike[str], save_id: str) -> None:
    """Give the staged checkpoint its name and remove the one it replaces. Rank 0 only, after `begin`.

    Raises:
        CheckpointError: Something else has taken the name since `begin`.
    """
    check_replaceable(path)
    place, new = CheckpointPath(path), staging(path, save_id)
    old, gone = (place.sibling(f".{place.name}.{save_id}.{kind}") for kind in ("old", "gone"))
    left: CheckpointPath | None = None
    if not place.taken:
        new.rename(place)
    elif place.local and not Path(new.path).is_dir() and not Path(place.path).is_dir():
        Path(new.path).replace(place.path)
    elif place.local and exchange_names(new.path, place.path):
        left = new
    else:
        place.rename(old)
        try:
            new.rename(place)
        except OSError as error:
            try:
                old.rename(place)
            except OSError:
                raise CheckpointError(f"{place} is now named {old} ({error}). Rename it back.") from error
            raise
        left = old
    # The checkpoint is committed. Later failures do not undo it.
    try:
        place.parent.sync()
        if left is not None:
            left.rename(gone)
            left = gone
    except OSError as error:
        _log.warning("%s is saved, but %s", place, error)
    if left is not None:
        _try_to_remove(left)


def exchange_names(a: str, b: str) -> bool:
    """Swap two names atomically with ``renameat2(RENAME_EXCHANGE)``. Return False where that is not supported."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0
    except (OSError, AttributeError):
        return False


def discard(path: str | os.PathLike[str], save_id: str) -> None:
    """Remove what a failed save wrote. Rank 0 only."""
    _try_to_remove(staging(path, save_id))


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, folder or file. A folder is renamed first, so that its name never shows a part of it.

    Raises:
        CheckpointError: It is not a checkpoint, or another process is saving to it.
    """
    place = CheckpointPath(path)
    check_replaceable(path)
    if not place.taken:
        return
    with require_claim(place) as held:
        _redirect_links(place)
        if place.local and Path(place.path).is_dir() and not Path(place.path).is_symlink():
            gone = place.sibling(f".{place.name}.{new_save_id()}.gone")
            place.rename(gone)
            _try_to_remove(gone)
        else:
            place.remove()
        clean(place, held)


def _redirect_links(place: CheckpointPath) -> None:
    """Point links to a checkpoint that is being removed to the newest other one, so that ``last.ckpt`` stays valid."""
    if not place.local or Path(place.path).is_symlink():
        return
    for entry in map(Path, place.parent.entries()):
        if entry.is_symlink() and entry.resolve() == Path(place.path).resolve():
            others = [e for e in place.parent.entries() if not Path(e).is_symlink() and e != place.path]
            found = latest([saved for e in others if (saved := _saved(place.at(e), e)) is not None])
            if found is not None:
                link(found.path, str(entry))


def link(path: str | os.PathLike[str], name: str | os.PathLike[str]) -> None:
    """Make ``name`` a relative link to the checkpoint ``path``, atomically. Local only.

    Raises:
        CheckpointError: ``name`` belongs to something other than a checkpoint, or another process is saving to it.
    """
    target = Path(CheckpointPath(name).path)
    _check_name(CheckpointPath(target))
    check_replaceable(name)
    with require_claim(CheckpointPath(target)) as held:
        clean(CheckpointPath(target), held)
        save_id = new_save_id()
        new, old = (target.parent / f".{target.name}.{save_id}.{kind}" for kind in ("link", "old"))
        new.symlink_to(os.path.relpath(CheckpointPath(path).path, target.parent))
        if not target.is_dir() or target.is_symlink():
            new.replace(target)
            return
        if exchange_names(str(new), str(target)):
            new.rename(old)
        else:
            target.rename(old)
            new.rename(target)
        _try_to_remove(CheckpointPath(old))


# --- reading ---------------------------------------------------------------------------------------------------------


def recover(path: str | os.PathLike[str]) -> None:
    """Restore the name of a checkpoint that was interrupted between two renames. Rank 0 only.

    Does nothing for other checkpoints, and nothing while another process saves to ``path``.
    """
    if is_web(path):  # nothing is saved there
        return
    place = CheckpointPath(path)
    if not _lost(place):
        return
    try:
        held = claim(place)
        if held is not None:
            with held:
                _restore_name(place, held)
    except OSError as error:
        _log.warning("%s lost its name in an interrupted save, and it could not be restored: %s", place, error)


def _lost(place: CheckpointPath) -> list[CheckpointPath]:
    """Return the checkpoints of saves that ended between two renames: the new one, or the one it was to replace."""
    if place.taken and (place.local or not place.fs.isdir(place.path) or is_committed(str(place))):
        return []
    saves: dict[str, list[CheckpointPath]] = {}
    for kind, save_id, found in _temporaries(place):
        if kind in ("partial", "link", "old"):
            saves.setdefault(save_id, []).append(found)
    pairs = [sorted(pair, key=lambda each: each.path.endswith(".old")) for pair in saves.values() if len(pair) == 2]
    return [complete[0] for pair in pairs if (complete := [each for each in pair if _saved_at(each) is not None])]


def _restore_name(place: CheckpointPath, held: Claim) -> None:
    """Restore the name to the newest of the checkpoints that lost it."""
    found = latest([saved for each in _lost(place) if (saved := _saved(each, each.path)) is not None])
    if found is None or (not held.certain and abs(time.time() - found.saved_at) < _RENAMED_S):
        return
    if place.taken:
        place.remove()  # an interrupted copy, on a file system that cannot rename
    place.at(found.path).rename(place)


def newest(folders: Iterable[str | os.PathLike[str]]) -> str | None:
    """Return the newest checkpoint in these folders, the first of `newest_first`. Call it on one rank."""
    return next(newest_first(folders), None)


def newest_first(folders: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Yield the checkpoints in these folders: committed folders and ``.ckpt`` files. Call it on one rank.

    Those of one run are ranked by their steps, as `latest` describes. Between runs the time counts: of folders that in
    the manifest, of files the modification time. Checkpoints that other processes are saving or have just removed do
    not count.
    """
    found: list[Saved] = []
    for folder in folders:
        place = CheckpointPath(folder)
        for name in {leftover[1] for e in place.entries() if (leftover := _LEFTOVER.fullmatch(posixpath.basename(e)))}:
            recover(f"{place}/{name}")
        for entry in place.entries():
            child = place.at(entry)
            saved = None if child.name.startswith(".") else _saved(child, str(child))
            if saved is not None:
                found.append(saved)
    while (last := latest(found)) is not None:
        found = [each for each in found if each.path != last.path]
        yield last.path


def _saved(place: CheckpointPath, path: str) -> Saved | None:
    """Return when and where in its run a checkpoint was saved, under the name ``path``. None as for `_saved_at`."""
    saved_at = _saved_at(place)
    if saved_at is None:
        return None
    try:
        if place.fs.isdir(place.path):
            manifest = read_manifest(str(place))
            return Saved(path, saved_at, manifest.step, History.of(manifest.layout.get(HISTORY)))
        with place.fs.open(place.path, "rb") as file:
            if file.read(4) != b"PK\x03\x04":
                return Saved(path, saved_at)
            file.seek(0)
            contents = read_inert(file, path)
        history = History.of(contents[OURS][HISTORY])
        return Saved(path, saved_at, int(contents["global_step"]), history)
    except FileNotFoundError:
        return None
    except (CheckpointError, KeyError, TypeError, ValueError, IndexError):
        return Saved(path, saved_at)  # of another strategy, or something else


def _saved_at(place: CheckpointPath) -> float | None:
    """Return when a checkpoint was saved. None if it is incomplete, is not a checkpoint, or does not exist any more."""
    try:
        if place.fs.isdir(place.path):
            return read_manifest(str(place)).saved_at
        if not place.name.endswith((".ckpt", ".partial", ".old")) or not place.fs.isfile(place.path):
            return None
        if not _is_complete_file(place):
            return None
        return Path(place.path).stat().st_mtime if place.local else place.fs.modified(place.path).timestamp()
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return None


def _is_complete_file(place: CheckpointPath) -> bool:
    """Return whether a single file is complete. A full disk leaves truncated files under other strategies."""
    with place.open_itself() as file:
        head = file.read(4)
        return bool(head) and (head != b"PK\x03\x04" or zipfile.is_zipfile(file))
