"""Files that only this user and root can have written, checked before they are loaded, and their locks.

A library runs with all permissions of the process that loads it, so it must not come from another user.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_NOBODY = 65534
"""Owner of files of users who do not exist in this container; seen on parent folders of the host."""


def reason_against(path: Path) -> str | None:
    """Return why the file or folder at ``path`` may be another user's, or None if it cannot be.

    All parent folders count: a user who may rename one of them can replace it. Folders with the sticky bit, such as
    ``/tmp``, do not allow that.
    """
    try:
        against = _against(path, path.lstat())
        for folder in dict.fromkeys([*path.absolute().parents, *path.resolve().parents]):
            against = against or _against(folder, folder.stat(), above=True)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return against


def _against(path: Path, found: os.stat_result, *, above: bool = False) -> str | None:
    me = os.geteuid()
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link"
    if found.st_uid not in (me, 0, *((_NOBODY,) if above else ())):
        return f"{path} belongs to user {found.st_uid}, and this process runs as user {me}"
    if above and found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"all users may write to {path} (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"group {found.st_gid} may write to {path} (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _is_own_group(gid: int) -> bool:
    """Return whether this user is a group's only member: the group of root, or the group with the user's name."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def make_private(path: Path) -> None:
    """Create a folder, and missing parents, that only this user may enter.

    Raises:
        OSError: it cannot be created, or is a file.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        folder.mkdir(0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(20, "it is not a folder", str(path))


@contextlib.contextmanager
def locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold the lock of a file, which the operating system releases if this process ends.

    Raises:
        BlockingIOError: another process holds it at ``deadline``, a time of ``time.monotonic``.
        OSError: the file cannot be made.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield  # closing the file releases the lock
