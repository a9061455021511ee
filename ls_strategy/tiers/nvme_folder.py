"""The folder that the NVMe tier was given: whether it is fit for it, and the one file per rank that is made in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.tiers.buffers import PAGE
from ls_strategy.tiers.file_io import DirectFile

GB = 1e9
_RATED_BYTES = 600e12
"""What a 1 TB consumer drive is warranted for (600 TBW); server drives take 2 to 30 times as much."""

_SUFFIX = ".ls_strategy"
_IN_MEMORY = ("tmpfs", "ramfs", "rootfs", "hugetlbfs")
_KEEPS_NO_NAMELESS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p")
"""Deleting an open file renames it (NFS, FUSE) or fails (SMB) here, so it keeps its name."""


class Mount(NamedTuple):
    """A line of ``/proc/mounts``."""

    source: str
    point: str
    kind: str
    options: str


def mount_of(path: Path) -> Mount:
    """The mounted file system that ``path`` lies on."""
    real = Path(os.path.realpath(path))
    best = Mount("", "/", "unknown", "")
    for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
        # Spaces and the like are written as octal numbers.
        fields = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in line.split(" ")[:4]]
        mount = Mount(*fields)
        # Of several mounts on one point, the last one hides the others.
        if real.is_relative_to(mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def in_memory(mount: Mount) -> bool:
    """Whether the file system's bytes are host memory."""
    if mount.kind in _IN_MEMORY or mount.source.startswith(("/dev/ram", "/dev/zram")):
        return True
    if mount.kind == "overlay":
        # Writes go to its upper folder, if we can see that one from here.
        upper = next((o[len("upperdir=") :] for o in mount.options.split(",") if o.startswith("upperdir=")), "")
        return bool(upper) and Path(upper).exists() and mount_of(Path(upper)).kind in _IN_MEMORY
    return False


def check_path(directory: str | Path, need_bytes: int, allow_tmpfs: bool = False) -> None:
    """Find out whether the NVMe tier can live in a folder; makes the folder.

    Args:
        directory: the folder.
        need_bytes: what all ranks of this host will write there.
        allow_tmpfs: accept a file system that is in memory.

    Raises:
        ConfigError: it is no folder, cannot be made or written, or is in memory.
        PlanError: it has not enough space.
    """
    if not str(directory):
        raise ConfigError("nvme_path is empty: the NVMe tier needs a folder on a local drive. Set nvme_path.")
    path = Path(directory)
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"nvme_path={str(path)!r} is a file: give a folder on a local drive.") from None
    except OSError as error:
        raise ConfigError(
            f"nvme_path={str(path)!r} cannot be made: {error.strerror}. Give a folder on a local drive that this user "
            "may write to."
        ) from error
    _write_probe(path)
    mount = mount_of(path)
    if in_memory(mount) and not allow_tmpfs:
        raise ConfigError(
            f"nvme_path={str(path)!r} lies on {mount.point} ({mount.kind}), which is host memory itself: nothing would "
            "be saved. Give a folder on a drive, offload to the CPU instead, or, for tests, set nvme_allow_ram=True."
        )
    free = shutil.disk_usage(path).free
    if free < need_bytes:
        raise PlanError(_too_small(path, need_bytes, free))


def drive_wear(bytes_per_step: int) -> str:
    """One sentence on what a step costs a drive.

    >>> drive_wear(84_000_000_000)
    'Each step writes 84.0 GB per rank to the drive: one that is rated for 600 TB lasts about 7,143 such steps.'
    """
    if bytes_per_step <= 0:
        return "A step writes nothing to the drive."
    return (
        f"Each step writes {bytes_per_step / GB:.1f} GB per rank to the drive: one that is rated for 600 TB lasts "
        f"about {_RATED_BYTES / bytes_per_step:,.0f} such steps."
    )


def open_scratch(directory: Path, nbytes: int, *, rank: int, direct: bool) -> DirectFile:
    """A file of ``nbytes`` zeros that vanishes with this process, however that ends.

    Its space is reserved here, so that a full drive is an error now and not hours later. It has no name: the kernel
    frees it when the last descriptor is gone, after ``kill -9`` too, and nobody can delete or open it. Where deleting
    an open file is not safe, it keeps its name and is locked as long as we live; the next run clears what has no lock.

    Raises:
        ConfigError: no file can be made in the folder.
        PlanError: there is not enough space.
    """
    mount = mount_of(directory)
    named = mount.kind in _KEEPS_NO_NAMELESS or mount.kind.startswith("fuse")
    try:
        if named:
            remove_stale(directory)
            fd, path = _open_locked(directory, rank)
        else:
            fd, path = _open_nameless(directory, rank)
    except OSError as error:
        raise ConfigError(
            f"no file can be made in nvme_path={str(directory)!r}: {error.strerror}. Give a folder on a local drive "
            "that this user may write to."
        ) from error
    try:
        _reserve(fd, max(nbytes, PAGE))
        return NamedFile(fd, path, direct=direct) if named else DirectFile(fd, str(path), direct=direct)
    except OSError as error:
        os.close(fd)
        if named:
            path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(directory).free
        raise PlanError(f"{_too_small(directory, nbytes, free)} ({error.strerror})") from error


class NamedFile(DirectFile):
    """A file that has to be deleted by its name."""

    def __init__(self, fd: int, path: Path, *, direct: bool) -> None:
        """Own ``fd`` and ``path``."""
        super().__init__(fd, str(path), direct=direct)
        self._path = path

    def close(self) -> None:
        """Delete and close. Idempotent."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # of a drive that failed; the next run clears it
                self._path.unlink(missing_ok=True)
        super().close()


def remove_stale(directory: Path) -> list[Path]:
    """Delete the files that runs which are dead by now left in a folder; returns their paths."""
    removed = []
    for path in directory.glob(f"rank*{_SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # gone meanwhile, another user's, or a link
            continue
        try:
            if _is_stale(fd, path):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(fd)
    return removed


def _is_stale(fd: int, path: Path) -> bool:
    """Whether nobody holds the file's lock; without locks, whether a process of this host made it and is dead."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        words = path.stem.split("-")
        return len(words) == 4 and words[1] == _host() and not Path(f"/proc/{words[2]}").exists()
    return True


def _write_probe(path: Path) -> None:
    probe = path / f"probe-{secrets.token_hex(8)}{_SUFFIX}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(PAGE))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise (PlanError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError)(
            f"nvme_path={str(path)!r} cannot be written: {error.strerror}. Give a folder on a local drive that this "
            "user may write to, with space left."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _open_nameless(directory: Path, rank: int) -> tuple[int, Path]:
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600), directory / f"rank{rank}"
    except OSError as error:
        # File systems without O_TMPFILE say one of these.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    fd, path = _create(directory, rank)
    path.unlink()
    return fd, path


def _open_locked(directory: Path, rank: int) -> tuple[int, Path]:
    while True:
        fd, path = _create(directory, rank)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another run that clears the folder was faster
            os.close(fd)
            continue
        except OSError:  # a file system without locks: the name tells who we are
            return fd, path
        if path.exists():
            return fd, path
        os.close(fd)


def _create(directory: Path, rank: int) -> tuple[int, Path]:
    path = directory / f"rank{rank}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path


def _host() -> str:
    return socket.gethostname().replace("-", "_")


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, nbytes)  # not reserved: a full drive shows when it is written


def _too_small(path: Path, need_bytes: int, free_bytes: int) -> str:
    return (
        f"nvme_path={str(path)!r} has {free_bytes / GB:.1f} GB free, and the states on the NVMe tier need "
        f"{need_bytes / GB:.1f} GB. Free space, use another drive, more ranks, or offload less."
    )
