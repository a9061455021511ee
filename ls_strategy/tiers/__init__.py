"""Store model states between uses: on the device, in host memory, or on NVMe.

A new tier is a class with the four methods of `ls_strategy.tiers.base.Tier`, and an entry of `TIERS`, from whichever
package: ``offload`` takes its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ls_strategy.config import OffloadConfig
from ls_strategy.registry import Registry
from ls_strategy.tiers.base import ResidentTier, Sizes, Tier
from ls_strategy.tiers.link import host_empty
from ls_strategy.tiers.nvme import NVMeTier
from ls_strategy.tiers.nvme_folder import check_path

CHUNK_BYTES = 4 << 20
"""The maximum of one ``get`` of an update, a norm or a gather."""

_BUFFERS = 20
"""Chunks in memory for the NVMe tier. Read, update and write hold up to 5 each (master, two moments with their scales,
gradient), a gather 2, and gradients in flight the other 3."""


@dataclass(frozen=True)
class TierKind:
    """One kind of tier."""

    place: str
    """Where its states are, for logs."""

    resident: bool
    """Whether states are tensors in memory. Otherwise leases load and store chunks of them, and only fused updates can
    step them."""

    open: Callable[[Sizes, OffloadConfig, torch.device, int], Tier] | None = None
    """Opens the tier of one rank, given its states, the options, the device and the rank. None: nothing to open."""


def _open_host(sizes: Sizes, _config: OffloadConfig, device: torch.device, _rank: int) -> ResidentTier:
    return ResidentTier(sizes, lambda numel, dtype: host_empty(numel, dtype, device), "cpu")


def _open_nvme(sizes: Sizes, config: OffloadConfig, _device: torch.device, rank: int) -> NVMeTier:
    folder = Path(config.nvme_path)
    check_path(folder, sum(numel * dtype.itemsize for numel, dtype in sizes.values()), config.nvme_allow_ram)
    return NVMeTier(folder, sizes, io=config.nvme_io, rank=rank, buffer_bytes=CHUNK_BYTES, buffers=_BUFFERS)


TIERS: Registry[TierKind] = Registry(
    "tiers",
    {
        "device": TierKind("on the device", resident=True),
        "cpu": TierKind("in host memory", resident=True, open=_open_host),
        "nvme": TierKind("on NVMe", resident=False, open=_open_nvme),
    },
)
"""The tiers by name."""
