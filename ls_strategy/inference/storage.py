"""Where the weights of streamed blocks rest, and how a block's bytes come from there to where it computes.

::

    tier     | block 0 ......... | block 1 ......... | block 2 ......... |     one extent of bytes per block
                                        ▼ read
    buffers  | block 0, computes | block 1, arrives |                          prefetch + 1 of the largest block's size

A block computes on views of its buffer. Where block and tier share their memory (the CPU), nothing is brought: the
extent itself is what the block computes on.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ls_strategy.checkpoint.source import as_bytes
from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.tiers.base import Key, Lease, ResidentTier, Tier
from ls_strategy.tiers.buffers import PAGE
from ls_strategy.tiers.link import Arrival, Link, host_empty
from ls_strategy.tiers.nvme import NVMeTier
from ls_strategy.tiers.nvme_folder import check_path

ALIGN = 64
"""Bytes; every tensor of a block begins at a multiple of it, as the allocators of torch have it."""


@dataclass(frozen=True)
class Extent:
    """Where in its block's bytes a tensor is."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are in the order of their indices."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def view(self, data: Tensor) -> Tensor:
        """The tensor, in the bytes of its block, ``(nbytes of the block,)`` uint8."""
        flat = data[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


def pack(tensors: Sequence[Tensor]) -> tuple[list[Extent], int]:
    """Places for tensors in one run of bytes, in order, and its length. Shapes, dtypes and dense strides are kept.

    >>> pack([torch.empty(3), torch.empty(2, 2, dtype=torch.int8)])[1]
    68
    """
    slots: list[Extent] = []
    end = 0
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")  # dense, in the same order of dimensions
        slots.append(Extent(-(-end // ALIGN) * ALIGN, tuple(like.shape), like.stride(), like.dtype))
        end = slots[-1].offset + slots[-1].nbytes
    return slots, end


class DeviceBuffers:
    """Buffers of a device that has memory of its own, and the thread that fills them from a tier on its host."""

    def __init__(self, link: Link, count: int, nbytes: int) -> None:
        """``count`` buffers of ``nbytes`` bytes."""
        self.link = link
        self.free: deque[tuple[Tensor, Any]] = deque(
            (torch.empty(nbytes, dtype=torch.uint8, device=link.device), None) for _ in range(count)
        )
        """With the point in the device's work after which each may be written."""
        self.worker = ThreadPoolExecutor(1, "ls_strategy-stream", link.bind_thread)

    def fill(self, lease: Lease, nbytes: int) -> DeviceLease:
        """Start to copy what the tier lends into a free buffer; the lease ends with that."""
        buffer, after = self.free.popleft()

        def copy() -> Arrival:
            try:
                arrival = self.link.to_device(buffer[:nbytes], lease.wait(), after)
                arrival.wait_on_host()
            finally:
                lease.release()
            return arrival

        return DeviceLease(self, buffer, nbytes, self.worker.submit(copy))


class DeviceLease:
    """A block's bytes in a buffer of the device, or on their way there."""

    def __init__(self, buffers: DeviceBuffers, buffer: Tensor, nbytes: int, arriving: Future[Arrival]) -> None:
        """``arriving``: the copy."""
        self._buffers = buffers
        self._buffer, self._nbytes = buffer, nbytes
        self._arriving = arriving
        self._ended = False

    def wait(self) -> Tensor:
        """The bytes; the host waits until they are there."""
        self._arriving.result().wait_on_device()
        return self._buffer[: self._nbytes]

    def release(self) -> None:
        """Give the buffer back; it is written again when the device has done what it was told so far. Idempotent."""
        if not self._ended:
            self._ended = True
            # A copy that is still to come goes before the next one: both go through one thread and one stream.
            self._buffers.free.append((self._buffer, self._buffers.link.mark()))


@dataclass(frozen=True)
class BlockStorage:
    """Where blocks rest."""

    tier: Literal["cpu", "nvme"]
    """Host memory, or a drive."""

    path: str | os.PathLike[str] | None = None
    """``nvme``: a folder on it; without, the environment variable ``LS_STRATEGY_NVME_PATH``."""

    io: NVMeIOConfig | None = None
    """How the drive is read."""

    allow_ram: bool = False
    """Accept a folder that is in memory."""

    verify: bool = False
    """Compare blocks that are brought with checksums."""

    def __post_init__(self) -> None:
        """Refuse what is no place."""
        if self.tier not in ("cpu", "nvme"):
            raise ConfigError(f"tier={self.tier!r}: blocks rest in host memory, 'cpu', or on a drive, 'nvme'.")
        if self.tier == "nvme" and not self._given:
            raise ConfigError(
                "tier='nvme' without a path: give the folder on a local drive in which blocks rest, or name it in the "
                "environment variable LS_STRATEGY_NVME_PATH."
            )

    @property
    def _given(self) -> str:
        return os.fspath(self.path or os.environ.get("LS_STRATEGY_NVME_PATH", ""))

    @property
    def folder(self) -> Path:
        """On the drive."""
        return Path(self._given)


class CheckedLease:
    """A block that is compared with the checksum of what was written."""

    def __init__(self, lease: Lease, index: int, checksum: int) -> None:
        """``checksum``: CRC-32."""
        self._lease, self._index, self._checksum = lease, index, checksum

    def wait(self) -> Tensor:
        """The bytes, once they are known to be right.

        Raises:
            StateError: they are not.
        """
        data = self._lease.wait()
        if zlib.crc32(as_bytes(data)) != self._checksum:
            raise StateError(
                f"block {self._index} is not what was written to its tier: the drive or the memory gives back other "
                "bytes. Use another drive, and look at dmesg."
            )
        return data

    def release(self) -> None:
        """Give the bytes back."""
        self._lease.release()


class Resting:
    """The bytes of all blocks on one tier."""

    def __init__(self, sizes: Sequence[int], place: BlockStorage, device: torch.device, prefetch: int) -> None:
        """Reserve the space.

        Args:
            sizes: the most bytes that each block may come to.
            place: where they rest.
            device: where blocks compute.
            prefetch: how many blocks may be read ahead.

        Raises:
            ConfigError: an option is wrong, or no file can be made in the folder.
            PlanError: the drive has not enough space.
        """
        if prefetch < 1:
            raise ConfigError(f"prefetch={prefetch}: at least one block is read ahead of the one that computes.")
        self.device = device
        self.capacity = prefetch + 1
        """Blocks that may be here or on their way at a time."""
        self.sizes = list(sizes)
        self.buffer_nbytes = max(sizes, default=0)
        self._checksums: dict[int, int] | None = {} if place.verify else None
        keys: dict[Key, tuple[int, torch.dtype]] = {(i, "block"): (n, torch.uint8) for i, n in enumerate(sizes)}
        self.tier: Tier
        if place.tier == "cpu":
            self.tier = ResidentTier(keys, lambda numel, dtype: host_empty(numel, dtype, device), "cpu")
        else:
            self.tier = self._drive(place, keys)
        self._on_device = None
        if device.type != "cpu":
            self._on_device = DeviceBuffers(Link(device), self.capacity, self.buffer_nbytes)
        worker = None if self._on_device is None else self._on_device.worker
        self._finalizer = weakref.finalize(self, _close, self.tier, worker)

    def _drive(self, place: BlockStorage, keys: dict[Key, tuple[int, torch.dtype]]) -> NVMeTier:
        check_path(place.folder, sum(n for n, _ in keys.values()), place.allow_ram)
        io = place.io or NVMeIOConfig()
        # Whoever starts to read a block goes on at once, however large it is: all of it has room in the queue.
        whole = self.capacity * -(-self.buffer_nbytes // io.block_bytes)
        # A lease of the tier is a buffer of the block's size, read into directly: these are the only buffers there are.
        return NVMeTier(
            place.folder,
            keys,
            io=replace(io, queue_depth=max(io.queue_depth, whole)),
            buffer_bytes=max(self.buffer_nbytes, PAGE),
            buffers=self.capacity,
            pin=self.device.type == "cuda",
        )

    @property
    def closed(self) -> bool:
        """Whether the bytes are gone."""
        return not self._finalizer.alive

    @property
    def bytes_read(self) -> int:
        """From the drive so far; 0 for host memory."""
        return getattr(self.tier, "bytes_read", 0)

    @property
    def buffers_nbytes(self) -> int:
        """That blocks which come and go take of the device and, for a drive, of host memory."""
        on_host = self.tier.name == "nvme"
        return self.capacity * self.buffer_nbytes * (on_host + (self._on_device is not None))

    def write(self, index: int, slots: Sequence[Extent], tensors: Sequence[Tensor]) -> None:
        """Let a block rest. Returns before it is on the drive.

        Args:
            index: of the block.
            slots: from `pack`.
            tensors: of any device, one per slot.
        """
        key = (index, "block")
        end = max((s.offset + s.nbytes for s in slots), default=0)
        if isinstance(self.tier, ResidentTier):
            self.tier.sizes[key] = (end, torch.uint8)  # before its first use: takes no more than it is
            data = self.tier.tensor(key)
        else:
            data = torch.zeros(min(-(-end // PAGE) * PAGE, self.sizes[index]), dtype=torch.uint8)
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.view(data).copy_(tensor)
        if self._checksums is not None:
            self._checksums[index] = zlib.crc32(as_bytes(data[:end]))
        if not isinstance(self.tier, ResidentTier):
            self.tier.put(key, data)

    def start(self, index: int, nbytes: int) -> Lease:
        """Start to bring a block to the device; its ``wait`` gives ``(nbytes,)`` uint8."""
        lease = self.tier.get((index, "block"), 0, nbytes)
        if self._checksums is not None:
            lease = CheckedLease(lease, index, self._checksums[index])
        return lease if self._on_device is None else self._on_device.fill(lease, nbytes)

    def read(self, index: int, start: int, stop: int) -> Tensor:
        """A copy in host memory of bytes ``[start, stop)`` of a block, uint8. Needs a free buffer."""
        page = start // PAGE * PAGE
        lease = self.tier.get((index, "block"), page, stop)
        try:
            return lease.wait()[start - page :].clone()
        finally:
            lease.release()

    def close(self) -> None:
        """End the threads, give memory and file back: the bytes are gone. Idempotent."""
        self._finalizer()


def _close(tier: Tier, worker: ThreadPoolExecutor | None) -> None:
    if worker is not None:
        worker.shutdown(wait=True)
    tier.close()
