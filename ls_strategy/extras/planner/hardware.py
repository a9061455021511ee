"""The hardware of a run: ranks, device and host memory, NVMe space; given by the user, or detected."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ls_strategy import device as dev
from ls_strategy.errors import ConfigError
from ls_strategy.extras.planner.sizes import show_bytes
from ls_strategy.host_memory import free_host_memory


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The hardware of one run. None means unknown: no strategy is rejected because of it."""

    ranks: int = 1
    ranks_per_node: int = 1
    device: str = "cuda"  # ``cuda``: devices have their own memory. ``cpu``: the ranks of a node share the host's.
    device_memory: int | None = None  # bytes per device
    host_memory: int | None = None  # bytes per node
    drive: int | None = 0  # free bytes on the NVMe device of each node; 0: there is none
    tflops: float | None = None  # peak 10**12 operations per second of a device, in the run's precision
    # 10**9 bytes per second that a rank can send to the others; with ``node_gbs``, to those on its node.
    link_gbs: float | None = None
    # 10**9 bytes per second that a node can send to the others. None: not known apart from ``link_gbs``.
    node_gbs: float | None = None
    bus_gbs: float | None = None  # between device and host, per direction
    drive_gbs: float | None = None  # to and from the NVMe device, per rank
    reserved_share: float = 0.08  # fraction of memory that the allocator loses to fragmentation
    # Device memory for the driver's context and NCCL's buffers; host memory for all other processes.
    reserved_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise ConfigError(
                f"Got {self.ranks} ranks and {self.ranks_per_node} per node, but both must be at least 1."
            )

    @property
    def device_room(self) -> int | None:
        """Bytes for tensors on each device; with ``device="cpu"``, for everything that a rank stores."""
        total = self.device_memory
        if self.device == "cpu" and total is None and self.host_memory is not None:
            total = self.host_memory // min(self.ranks_per_node, self.ranks)
        return None if total is None else int(total * (1 - self.reserved_share)) - self.reserved_bytes

    @property
    def host_room(self) -> int | None:
        """Bytes of host memory per rank."""
        if self.host_memory is None:
            return None
        return int(self.host_memory * (1 - self.reserved_share) - self.reserved_bytes) // self.on_a_node

    @property
    def drive_room(self) -> int | None:
        """Bytes on the NVMe device per rank."""
        return None if self.drive is None else self.drive // self.on_a_node

    @property
    def on_a_node(self) -> int:
        """Ranks of a full node."""
        return min(self.ranks_per_node, self.ranks)

    def describe(self) -> str:
        """Return one line."""

        def room(nbytes: int | None) -> str:
            return "unknown" if nbytes is None else "none" if not nbytes else show_bytes(nbytes)

        device = "" if self.device == "cpu" else f", {room(self.device_memory)} on each device"
        return (
            f"{self.ranks} ranks, {self.on_a_node} per node{device}, {room(self.host_memory)} host memory and "
            f"{room(self.drive)} of NVMe on each node"
        )


def found_here(device: torch.device, *, ranks: int, ranks_per_node: int, nvme_path: str = "") -> Hardware:
    """Return this rank's free host, device and NVMe memory; an empty ``nvme_path``: no NVMe. Not collective."""
    memory = dev.free_bytes(device) if dev.is_accelerator(device) else None
    return Hardware(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        device=device.type,
        device_memory=memory,
        host_memory=free_host_memory(),
        drive=_free_on_nvme(Path(nvme_path)) if nvme_path else 0,
    )


def _free_on_nvme(folder: Path) -> int | None:
    """Return free bytes; None without the permission to look."""
    try:
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free
    except OSError:
        return None
