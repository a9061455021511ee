"""Storage of the streamed blocks, and the transfer of a block's bytes to the device.

::

    tier     | block 0 ......... | block 1 ......... | block 2 ......... |     one extent of bytes per block
                                        ▼ read
    buffers  | block 0, computes | block 1, in flight |                        prefetch + 1 of the largest block's size

A block computes on views of its buffer. If the tier is the device's own memory (the CPU), nothing is copied: the block
computes on the extent itself.
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

from ls_strategy.checkpoint.files import as_bytes
from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.base import Key, Lease, ResidentTier, Tier
from ls_strategy.tiers.buffers import PAGE
from ls_strategy.tiers.link import Link, host_empty
from ls_strategy.tiers.nvme import NVMeTier
from ls_strategy.tiers.nvme_folder import check_path

ALIGN = 64  # bytes. Every tensor of a block starts at a multiple of it, as with torch's allocators.


@dataclass(frozen=True)
class Extent:
    """Location of a tensor in the bytes of its block, with its shape, strides and dtype."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Return whether its elements are in the order of their indices."""
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()

    def view(self, data: Tensor) -> Tensor:
        """Return the tensor as a view of its block's bytes, ``(nbytes of the block,)`` uint8."""
        flat = data[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


def pack(tensors: Sequence[Tensor]) -> tuple[list[Extent], int]:
    """Lay tensors out in one run of bytes; returns extents and length. Shapes, dtypes and dense strides are kept.

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
    """Buffers on a device with its own memory, and the thread that fills them from host memory."""

    def __init__(self, link: Link, count: int, nbytes: int) -> None:
        self.link = link
        # Free buffers, each with the event after which it may be overwritten.
        self.free: deque[tuple[Tensor, Any]] = deque(
            (torch.empty(nbytes, dtype=torch.uint8, device=link.device), None) for _ in range(count)
        )
        self.worker = ThreadPoolExecutor(1, "ls_strategy-stream", link.bind_thread)

    def fill(self, lease: Lease, nbytes: int) -> DeviceLease:
        """Start to copy the tier's lease into a free buffer, and release the lease afterwards."""
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
    """A block's bytes in a device buffer, loaded or in flight."""

    def __init__(self, buffers: DeviceBuffers, buffer: Tensor, nbytes: int, arriving: Future[Arrival]) -> None:
        """``arriving`` is the copy in flight."""
        self._buffers = buffers
        self._buffer, self._nbytes = buffer, nbytes
        self._arriving = arriving
        self._ended = False

    def wait(self) -> Tensor:
        """Block the host until the copy is complete, and return the bytes."""
        self._arriving.result().wait_on_device()
        return self._buffer[: self._nbytes]

    def release(self) -> None:
        """Return the buffer, to be overwritten when the device has finished its current work. Idempotent."""
        if not self._ended:
            self._ended = True
            # A copy still in flight precedes the next one: both use the same thread and stream.
            self._buffers.free.append((self._buffer, self._buffers.link.mark()))


@dataclass(frozen=True)
class BlockStorage:
    """Storage for the blocks of a model: host memory, or files on an NVMe device."""

    tier: Literal["cpu", "nvme"]  # host memory, or an NVMe device
    # Folder for ``nvme``. None: the environment variable ``LS_STRATEGY_NVME_PATH``.
    path: str | os.PathLike[str] | None = None
    io: NVMeIOConfig | None = None  # how the NVMe device is read
    allow_ram: bool = False  # accept a folder in memory (tmpfs)
    verify: bool = False  # verify blocks by checksums when they are loaded

    def __post_init__(self) -> None:
        if self.tier not in ("cpu", "nvme"):
            raise ConfigError(f"Got tier={self.tier!r}. Give 'cpu' (host memory) or 'nvme' (files on an NVMe device).")
        if self.tier == "nvme" and not self._given:
            raise ConfigError(
                "Got tier='nvme' without a path. Give a folder on a local NVMe device, or set the environment variable "
                "LS_STRATEGY_NVME_PATH."
            )

    @property
    def _given(self) -> str:
        return os.fspath(self.path or os.environ.get("LS_STRATEGY_NVME_PATH", ""))

    @property
    def folder(self) -> Path:
        """The folder on the NVMe device."""
        return Path(self._given)


class CheckedLease:
    """A block that is verified by the checksum of what was written."""

    def __init__(self, lease: Lease, index: int, checksum: int) -> None:
        """``checksum`` is the CRC-32 of the block."""
        self._lease, self._index, self._checksum = lease, index, checksum

    def wait(self) -> Tensor:
        """Return the bytes after they were verified.

        Raises:
            StateError: the bytes differ from what was written.
        """
        data = self._lease.wait()
        if zlib.crc32(as_bytes(data)) != self._checksum:
            raise StateError(
                f"block {self._index} is not what was written to its tier: the device or the memory returned other "
                "bytes. Look at dmesg, and use another device."
            )
        return data

    def release(self) -> None:
        """Release the bytes."""
        self._lease.release()


class StoredBlocks:
    """The bytes of all blocks on one tier."""

    def __init__(self, sizes: Sequence[int], place: BlockStorage, device: torch.device, prefetch: int) -> None:
        """Reserve space for blocks of at most ``sizes`` bytes, of which ``prefetch`` may be read ahead.

        Raises:
            ConfigError: an option is invalid, or no file can be created in the folder.
            PlanError: the NVMe device has too little space.
        """
        if prefetch < 1:
            raise ConfigError(f"Got prefetch={prefetch}, but at least one block must be read ahead. Set prefetch=1.")
        self.device = device
        self.capacity = prefetch + 1  # blocks that may be loaded or in flight at a time
        self.sizes = list(sizes)
        self.buffer_nbytes = max(sizes, default=0)
        self._checksums: dict[int, int] | None = {} if place.verify else None
        keys: dict[Key, tuple[int, torch.dtype]] = {(i, "block"): (n, torch.uint8) for i, n in enumerate(sizes)}
        self.tier: Tier
        if place.tier == "cpu":
            self.tier = ResidentTier(keys, lambda numel, dtype: host_empty(numel, dtype, device), "cpu")
        else:
            self.tier = self._nvme_tier(place, keys)
        self._on_device = None
        if device.type != "cpu":
            self._on_device = DeviceBuffers(Link(device), self.capacity, self.buffer_nbytes)
        worker = None if self._on_device is None else self._on_device.worker
        self._finalizer = weakref.finalize(self, _close, self.tier, worker)

    def _nvme_tier(self, place: BlockStorage, keys: dict[Key, tuple[int, torch.dtype]]) -> NVMeTier:
        check_path(place.folder, sum(n for n, _ in keys.values()), place.allow_ram)
        io = place.io or NVMeIOConfig()
        # The queue has room for all requests of all blocks, so starting a read never blocks.
        depth = self.capacity * -(-self.buffer_nbytes // io.block_bytes)
        # A lease of the tier is a buffer of the block's size that is read into directly; there are no other buffers.
        return NVMeTier(
            place.folder,
            keys,
            io=replace(io, queue_depth=max(io.queue_depth, depth)),
            buffer_bytes=max(self.buffer_nbytes, PAGE),
            buffers=self.capacity,
            device=self.device,
        )

    @property
    def closed(self) -> bool:
        """Return whether the bytes have been freed."""
        return not self._finalizer.alive

    @property
    def bytes_read(self) -> int:
        """Bytes read from the NVMe device so far; 0 for host memory."""
        return getattr(self.tier, "bytes_read", 0)

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of the buffers, on the device and, for NVMe, in host memory."""
        return self.capacity * self.buffer_nbytes * ((not self.in_host_memory) + (self._on_device is not None))

    @property
    def in_host_memory(self) -> bool:
        """Return whether the blocks are in host memory, not on NVMe."""
        return isinstance(self.tier, ResidentTier)

    def write(self, index: int, slots: Sequence[Extent], tensors: Sequence[Tensor]) -> None:
        """Store block ``index``, one tensor per slot, on any device. Returns before it is written to NVMe."""
        key = (index, "block")
        end = max((s.offset + s.nbytes for s in slots), default=0)
        if isinstance(self.tier, ResidentTier):
            self.tier.sizes[key] = (end, torch.uint8)  # before its first use: allocates no more than needed
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
        """Start to load a block to the device. The lease's ``wait`` returns ``(nbytes,)`` uint8."""
        lease = self.tier.get((index, "block"), 0, nbytes)
        if self._checksums is not None:
            lease = CheckedLease(lease, index, self._checksums[index])
        return lease if self._on_device is None else self._on_device.fill(lease, nbytes)

    def read(self, index: int, start: int, stop: int) -> Tensor:
        """Return a host copy of the bytes ``[start, stop)`` of a block, uint8. Needs a free buffer."""
        page = start // PAGE * PAGE
        lease = self.tier.get((index, "block"), page, stop)
        try:
            return lease.wait()[start - page :].clone()
        finally:
            lease.release()

    def close(self) -> None:
        """Stop the threads and free memory and file. Idempotent."""
        self._finalizer()


def _close(tier: Tier, worker: ThreadPoolExecutor | None) -> None:
    if worker is not None:
        worker.shutdown(wait=True)
    tier.close()
