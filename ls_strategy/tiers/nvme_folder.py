"""The folder of the NVMe tier: checks of the folder, and the scratch file of each rank."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.tiers.buffers import PAGE
from ls_strategy.tiers.file_io import DirectFile

GB = 1e9
_DEVICE = "a local NVMe device"
_RATED_BYTES = 600e12
"""Rated writes of a 1 TB consumer NVMe device (600 TBW). Server devices are rated for 2 to 30 times as much."""

_SUFFIX = ".ls_strategy"
_NAME = re.compile(r"rank\d+-[^-]+-\d+-[0-9a-f]{8}\.ls_strategy", re.ASCII)
"""What `_create` names a file."""

_IN_MEMORY = ("tmpfs", "ramfs", "rootfs", "hugetlbfs")
_KEEPS_NO_NAMELESS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p")
"""File systems that rename (NFS, FUSE) or refuse (SMB) the deletion of an open file, so the file keeps its name."""


class Mount(NamedTuple):
    """A line of ``/proc/mounts``."""

    source: str
    point: str
    kind: str
    options: str


def mount_of(path: Path) -> Mount:
    """Return the mounted file system of ``path``."""
    real = Path(os.path.realpath(path))
    best = Mount("", "/", "unknown", "")
    for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
        # Spaces and other special characters are octal numbers.
        fields = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in line.split(" ")[:4]]
        mount = Mount(*fields)
        # The last of several mounts on one point hides the others.
        if real.is_relative_to(mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def in_memory(mount: Mount) -> bool:
    """Return whether a file system keeps its bytes in host memory."""
    if mount.kind in _IN_MEMORY or mount.source.startswith(("/dev/ram", "/dev/zram")):
        return True
    if mount.kind == "overlay":
        # Writes go to the upper folder, if it is visible from here.
        upper = next((o[len("upperdir=") :] for o in mount.options.split(",") if o.startswith("upperdir=")), "")
        return bool(upper) and Path(upper).exists() and mount_of(Path(upper)).kind in _IN_MEMORY
    return False


def check_path(directory: str | Path, need_bytes: int, allow_tmpfs: bool = False) -> None:
    """Check whether the NVMe tier can use a folder; create the folder.

    Args:
        directory: the folder.
        need_bytes: bytes that all ranks of this host will write there.
        allow_tmpfs: accept a file system in memory.

    Raises:
        ConfigError: it is not a folder, cannot be created or written, or is in memory.
        PlanError: it does not have enough space.
    """
    if not str(directory):
        raise ConfigError(f"Got an empty nvme_path, but the NVMe tier needs a folder on {_DEVICE}. Set nvme_path.")
    path = Path(directory)
    try:
        path.mkdir(0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"Got nvme_path={str(path)!r}, which is a file. Set it to a folder on {_DEVICE}.") from None
    except OSError as error:
        raise ConfigError(
            f"Got nvme_path={str(path)!r}, which cannot be created: {error.strerror}. Set it to a folder on {_DEVICE} "
            "that this user may write to."
        ) from error
    _write_probe(path)
    mount = mount_of(path)
    if in_memory(mount) and not allow_tmpfs:
        raise ConfigError(
            f"Got nvme_path={str(path)!r}, which is on {mount.point} ({mount.kind}), in host memory: this would save "
            f"no memory. Set it to a folder on {_DEVICE}, or offload to the CPU. For tests, set nvme_allow_ram=True."
        )
    free = shutil.disk_usage(path).free
    if free < need_bytes:
        raise PlanError(_too_small(path, need_bytes, free))


def nvme_wear(bytes_per_step: int) -> str:
    """Return one sentence about the wear of the NVMe device by a step.

    >>> nvme_wear(84_000_000_000)
    'Each step writes 84.0 GB per rank: an NVMe device rated for 600 TB lasts about 7,143 such steps.'
    """
    if bytes_per_step <= 0:
        return "A step writes nothing to NVMe."
    return (
        f"Each step writes {bytes_per_step / GB:.1f} GB per rank: an NVMe device rated for 600 TB lasts about "
        f"{_RATED_BYTES / bytes_per_step:,.0f} such steps."
    )


def open_scratch(directory: Path, nbytes: int, *, rank: int, direct: bool) -> DirectFile:
    """Open a file of ``nbytes`` zeros that the kernel deletes with this process, also after ``kill -9``.

    Its space is reserved now, so that a full file system is not an error hours later. The file has no name, so that no
    other process can delete or open it. If the file system cannot delete an open file, it keeps a name and is locked by
    this process; the next run deletes files without a lock.

    Raises:
        ConfigError: no file can be created in the folder.
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
            f"no file can be created in nvme_path={str(directory)!r}: {error.strerror}. Set it to a folder on "
            f"{_DEVICE} that this user may write to."
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
    """A file with a name, which has to be deleted."""

    def __init__(self, fd: int, path: Path, *, direct: bool) -> None:
        super().__init__(fd, str(path), direct=direct)
        self._path = path

    def close(self) -> None:
        """Delete and close. Idempotent."""
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # of a failed device; the next run deletes the file
                self._path.unlink(missing_ok=True)
        super().close()


def remove_stale(directory: Path) -> list[Path]:
    """Delete the files that ended runs have left in a folder; return their paths."""
    removed = []
    for path in directory.glob(f"rank*{_SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # already deleted, another user's, or a link
            continue
        try:
            if _is_own(fd, path) and _is_stale(fd, path):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(fd)
    return removed


def _is_own(fd: int, path: Path) -> bool:
    """Return whether a file is one that `_create` made for this user."""
    found = os.fstat(fd)
    return bool(_NAME.fullmatch(path.name)) and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _is_stale(fd: int, path: Path) -> bool:
    """Return whether no process uses the file any more.

    None holds its lock; on a file system without locks, it is of a process of this host that has ended.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        parts = path.stem.split("-")
        return len(parts) == 4 and parts[1] == _host() and not Path(f"/proc/{parts[2]}").exists()
    return True


def _write_probe(path: Path) -> None:
    probe = path / f"probe-{secrets.token_hex(8)}{_SUFFIX}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # SMB keeps it until it is closed
                probe.unlink()  # before the slow part, in which a run may be killed
            os.write(fd, bytes(PAGE))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise (PlanError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError)(
            f"Got nvme_path={str(path)!r}, which cannot be written: {error.strerror}. Set it to a folder on {_DEVICE} "
            "that this user may write to, with free space."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _open_nameless(directory: Path, rank: int) -> tuple[int, Path]:
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600), directory / f"rank{rank}"
    except OSError as error:
        # File systems without O_TMPFILE return one of these.
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
        except BlockingIOError:  # another run that clears the folder has locked it
            os.close(fd)
            continue
        except OSError:  # a file system without locks: the name identifies this process
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
        os.ftruncate(fd, nbytes)  # not reserved: a full file system shows at a write


def _too_small(path: Path, need_bytes: int, free_bytes: int) -> str:
    return (
        f"nvme_path={str(path)!r} has {free_bytes / GB:.1f} GB free, but the states on the NVMe tier need "
        f"{need_bytes / GB:.1f} GB. Free space, use a larger device or more ranks, or offload less."
    )
