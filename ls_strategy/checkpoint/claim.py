"""Locks on checkpoint names: only one process at a time changes a checkpoint, and its lock ends with it.

::

    .last.ckpt.saving    locked (flock) by the process that saves to, links, removes or recovers last.ckpt.
                         Names its owner. Removed when the owner is done.

The lock tells whether a ``.partial`` folder belongs to a save in flight or to one that was interrupted. A killed
process leaves the file without a lock, and the next claim takes it over.

Locks are not available everywhere: object stores have none, Lustre mounted without ``flock`` refuses them, and some
mounts keep them local to one machine (``local_lock``, ``localflock``). A claim there is not *certain*. Its holder
changes only what has not been written to for a long time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from ls_strategy.checkpoint.place import CheckpointPath, open_file
from ls_strategy.errors import CheckpointError

SUFFIX = ".saving"
_NOTE = "ls_strategy "
"""First word of a lock file, so that files of other programs are not mistaken for one."""

_UNSIGNED_S = 1.0
"""Seconds after which a file without an owner's name was left by a process that was killed before it signed."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Claim:
    """The right to change the checkpoint of one name, and the leftovers of saves to it. Made by `claim`.

    A context manager that releases the claim.
    """

    def __init__(self, path: str = "", descriptor: int | None = None, *, certain: bool = False) -> None:
        self._path, self._descriptor = path, descriptor
        self.certain = certain
        """Whether the lock excludes all other processes."""

        if descriptor is not None:
            _HELD.add(self)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the claim. Idempotent."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # noqa: PTH108 - still locked, so it cannot belong to another process
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child may share the descriptor
        self.forget()
        _HELD.discard(self)

    def forget(self) -> None:
        """Close the file but keep the lock: in a forked child, the parent owns it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_HELD: set[Claim] = set()


def forget_all() -> None:
    """Close all lock files, as the end of the process does."""
    for held in list(_HELD):
        held.forget()
    _HELD.clear()


os.register_at_fork(after_in_child=forget_all)


def claim(place: CheckpointPath) -> Claim | None:
    """Claim a name. Return None if another process or thread holds it.

    Raises:
        OSError: The folder is not writable.
    """
    if not place.local:
        return Claim()
    path = lock_path(place)
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return Claim()  # removing a checkpoint must work on a full disk
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(descriptor, path):  # its holder has removed it in between
                os.close(descriptor)
                continue
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            return Claim()
        return Claim(path, descriptor, certain=_take_over(descriptor))


def require_claim(place: CheckpointPath) -> Claim:
    """Claim a name.

    Raises:
        CheckpointError: Another process holds it.
        OSError: The folder is not writable.
    """
    held = claim(place)
    if held is None:
        raise CheckpointError(
            f"{place} is being saved by another process ({_holder(place)}). Two runs must not save under the same "
            "name. Give each run its own folder (default_root_dir, or dirpath of ModelCheckpoint), or wait for the "
            "other to end."
        )
    return held


def lock_path(place: CheckpointPath) -> str:
    """Return the path of the lock file."""
    return place.sibling(f".{place.name}{SUFFIX}").path


def is_lock_file(path: Path) -> bool:
    """Return whether `claim` created this file. It may be unsigned for good: of a process that was killed by then."""
    try:
        with open_file(path) as file:
            note = file.read(len(_NOTE)).decode(errors="replace")
            return note == _NOTE or (not note and time.time() - os.fstat(file.fileno()).st_mtime > _UNSIGNED_S)
    except (OSError, CheckpointError):  # the latter: a pipe, which would be waited for
        return False


def _is_at(descriptor: int, path: str) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def _take_over(descriptor: int) -> bool:
    """Sign the file. Return whether no other machine has signed it before: its locks may not reach this one."""
    signature = f"{_NOTE}{_machine()} pid {os.getpid()} on {socket.gethostname()}\n"
    before = os.pread(descriptor, 200, 0).decode(errors="replace")
    with contextlib.suppress(OSError):  # a full disk: only the lock matters
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, signature.encode(), 0)
    return not before or before.split()[1:2] == [_machine()]


def _machine() -> str:
    """Return an id of the running kernel: locks are seen by all its processes, in any container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _holder(place: CheckpointPath) -> str:
    try:
        fields = Path(lock_path(place)).read_text(errors="replace").split(maxsplit=2)
    except OSError:
        return "which has just ended"
    return fields[2].strip() if len(fields) == 3 else "unknown"
