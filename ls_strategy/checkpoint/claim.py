"""One process at a time changes what stands under a checkpoint's name: it holds a lock that ends with it.

::

    .last.ckpt.saving    locked (flock) by the process that saves to, links, removes or recovers last.ckpt;
                         it says who that is, and goes when the process is done

Whoever looks at checkpoints learns from the lock whether a `.partial` folder belongs to a save in flight or to one that
was interrupted. A killed process leaves the file, without a lock; the next claim of the name takes it over.

A lock is not always to be had: object stores have none, Lustre mounted without ``flock`` refuses it, and a mount may
keep locks to its own machine (``local_lock``, ``localflock``). Such a claim is not *certain*: its holder touches only
what nothing has written to for a long time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ls_strategy.checkpoint.place import Place
from ls_strategy.errors import CheckpointError

SUFFIX = ".saving"
_NOTE = "ls_strategy "
"""Begins what the file says, so that it is not taken for somebody else's."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Claim:
    """The right to change what has a name, and what saves left beside it."""

    def __init__(self, path: str = "", descriptor: int | None = None, *, certain: bool = False) -> None:
        """Made by `claim`."""
        self._path, self._descriptor = path, descriptor
        self.certain = certain
        """Whether no other process can have one."""

        if descriptor is not None:
            _HELD.add(self)

    def release(self) -> None:
        """Give it up. May be called again."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # noqa: PTH108 - while it is locked, so nobody else's
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child that has just been forked may share it
        self.forget()
        _HELD.discard(self)

    def forget(self) -> None:
        """Close the file: in a forked child, whose parent has the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_HELD: set[Claim] = set()


def forget_all() -> None:
    """Let go of every lock and leave the files, as the end of the process does."""
    for held in list(_HELD):
        held.forget()
    _HELD.clear()


os.register_at_fork(after_in_child=forget_all)


def claim(place: Place) -> Claim | None:
    """Claim a name; None if another process, or another thread, holds it.

    Raises:
        OSError: the folder cannot be written.
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
            return Claim()  # what is removed must be removable from a full disk
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(descriptor, path):  # its holder has just removed it
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


@contextmanager
def claimed(place: Place) -> Iterator[Claim]:
    """Hold the claim of a name.

    Raises:
        CheckpointError: another process holds it.
        OSError: the folder cannot be written.
    """
    held = claim(place)
    if held is None:
        raise in_use(place)
    try:
        yield held
    finally:
        held.release()


def in_use(place: Place) -> CheckpointError:
    """What to raise where another process has the name."""
    return CheckpointError(
        f"{place} is being saved by another process ({_holder(place)}). Two runs must not save under one name: give "
        "each a folder of its own (default_root_dir, or dirpath of ModelCheckpoint), or wait until the other has ended."
    )


def lock_path(place: Place) -> str:
    """The file whose lock is the claim."""
    return place.sibling(f".{place.name}{SUFFIX}").path


def is_lock_file(path: Path) -> bool:
    """Whether `claim` made it."""
    try:
        with path.open("rb") as file:
            return file.read(len(_NOTE)).decode(errors="replace") == _NOTE
    except OSError:
        return False


def _is_at(descriptor: int, path: str) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def _take_over(descriptor: int) -> bool:
    """Sign the file. Whether it was new, or left by a process of this machine; else locks may not reach that far."""
    signature = f"{_NOTE}{_machine()} pid {os.getpid()} on {socket.gethostname()}\n"
    before = os.pread(descriptor, 200, 0).decode(errors="replace")
    with contextlib.suppress(OSError):  # a full disk: the lock is what counts
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, signature.encode(), 0)
    return not before or before.split()[1:2] == [_machine()]


def _machine() -> str:
    """Names the running kernel: locks reach all of its processes, in whichever container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _holder(place: Place) -> str:
    try:
        words = Path(lock_path(place)).read_text(errors="replace").split(maxsplit=2)
    except OSError:
        return "it has just ended"
    return words[2].strip() if len(words) == 3 else "it has not said which"
