"""Whether a library may be loaded: only this user and root can have put it where it is, and nobody else can change it.

A library runs with all the rights of the process that loads it. In a folder that others may write to, it may be theirs.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

_NOBODY = 65534
"""Owner of what belongs to users who do not exist in this container; seen on the folders above, of the host."""


def reason_against(path: Path) -> str | None:
    """Why what is at ``path``, a file or a folder, may be somebody else's; None if it cannot be.

    Every folder above counts: who may rename one of them can put another one in its place. Those with the sticky bit,
    such as ``/tmp``, do not allow that.
    """
    try:
        against = _against(path, path.lstat())
        for folder in dict.fromkeys([*path.absolute().parents, *path.resolve().parents]):
            against = against or _against(folder, folder.stat(), above=True)
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
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
        return f"everybody may write to {path} (mode {stat.S_IMODE(found.st_mode):o})"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"group {found.st_gid} may write to {path} (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _is_own_group(gid: int) -> bool:
    """Whether a group has this user as its only member: root's, or one that has the user's name."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def make_private(path: Path) -> None:
    """Make a folder, and those above it that are not there, which only this user may enter.

    Raises:
        OSError: it cannot be made, or is a file.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        folder.mkdir(0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(20, "it is not a folder", str(path))
