"""What a run has: ranks, memory of devices and hosts, room on drives; given, or found out."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ls_strategy.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes from a number with a unit; GB are 10**9 bytes and GiB 2**30.

    >>> parse_bytes("80GB"), parse_bytes("1.5 GiB"), parse_bytes("4TB")
    (80000000000, 1610612736, 4000000000000)

    Raises:
        ConfigError: it is no such number.
    """
    found = _NUMBER.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is no size: give bytes, or a number and a unit, such as 80GB, 512GiB or 4TB.")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def show_bytes(nbytes: float) -> str:
    """In the unit in which there is a number below 1000.

    >>> show_bytes(512), show_bytes(1.31e9), show_bytes(2.5e13)
    ('512 B', '1.31 GB', '25 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Of one run. None: not known, and nothing is refused for the lack of it."""

    ranks: int = 1
    ranks_per_node: int = 1
    device: str = "cuda"
    """``cuda``: devices have memory of their own. ``cpu``: the ranks of a node share the host's."""

    device_memory: int | None = None
    """Bytes of each device."""

    host_memory: int | None = None
    """Bytes of each node."""

    drive: int | None = 0
    """Free bytes on the NVMe drive of each node; 0: there is none."""

    tflops: float | None = None
    """What a device computes at best, in 10**12 operations per second, in the precision of the run."""

    link_gbs: float | None = None
    """What a rank sends to the others, 10**9 bytes per second."""

    bus_gbs: float | None = None
    """Between device and host, in each direction."""

    drive_gbs: float | None = None
    """From and to the drive, of each rank."""

    reserved_share: float = 0.08
    """Of a device's memory: what its allocator cannot use, in between."""

    reserved_bytes: int = 1 << 30
    """Of a device's memory: the driver's context, and buffers of NCCL. Of a host's: everything else there."""

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks."""
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise ConfigError(f"{self.ranks} ranks, {self.ranks_per_node} per node: there is at least one.")

    @property
    def device_room(self) -> int | None:
        """Bytes for tensors on each device; with ``device="cpu"`` for everything that a rank holds."""
        whole = self.device_memory
        if self.device == "cpu" and whole is None and self.host_memory is not None:
            whole = self.host_memory // min(self.ranks_per_node, self.ranks)
        return None if whole is None else int(whole * (1 - self.reserved_share)) - self.reserved_bytes

    @property
    def host_room(self) -> int | None:
        """Bytes of host memory for what one rank keeps there."""
        if self.host_memory is None:
            return None
        return int(self.host_memory * (1 - self.reserved_share) - self.reserved_bytes) // self.on_a_node

    @property
    def drive_room(self) -> int | None:
        """Bytes on the drive for one rank."""
        return None if self.drive is None else self.drive // self.on_a_node

    @property
    def on_a_node(self) -> int:
        """Ranks of a full node."""
        return min(self.ranks_per_node, self.ranks)

    def describe(self) -> str:
        """One line."""

        def room(nbytes: int | None) -> str:
            return "unknown" if nbytes is None else "none" if not nbytes else show_bytes(nbytes)

        device = "" if self.device == "cpu" else f", {room(self.device_memory)} on each device"
        return (
            f"{self.ranks} ranks, {self.on_a_node} per node{device}, {room(self.host_memory)} of host memory and "
            f"{room(self.drive)} on the drive of each node"
        )


def found_here(device: torch.device, *, ranks: int, ranks_per_node: int, nvme_path: str = "") -> Hardware:
    """What this rank's host and device have free. Not collective.

    Args:
        device: of this rank.
        ranks: of the run.
        ranks_per_node: of them on this host.
        nvme_path: folder on the drive; empty: there is none.
    """
    memory = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    return Hardware(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        device=device.type,
        device_memory=memory,
        host_memory=free_host_memory(),
        drive=_free_on_nvme(Path(nvme_path)) if nvme_path else 0,
    )


def _free_on_nvme(folder: Path) -> int | None:
    """Bytes; None where nobody may look."""
    try:
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def free_host_memory() -> int | None:
    """Bytes that this process and its siblings may still take: the host's, or those of its control group if fewer."""
    limits = [_available(), _cgroup_room(Path("/sys/fs/cgroup"))]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_room(folder: Path) -> int | None:
    try:
        most = (folder / "memory.max").read_text().strip()
        used = (folder / "memory.current").read_text().strip()
        return None if most == "max" else int(most) - int(used)
    except (OSError, ValueError):
        return None
