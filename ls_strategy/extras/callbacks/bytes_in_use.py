"""Read what `Monitor` logs from the strategy: bytes sent, and bytes in use by category."""

from __future__ import annotations

import os
from pathlib import Path

from ls_strategy import device as dev
from ls_strategy.extras.plots.charts import ByteUnit
from ls_strategy.lightning.strategy import ZeROStrategy


def sent_bytes(strategy: ZeROStrategy) -> int:
    """Return the bytes that this rank has sent for sharded states, and to its tensor- and context-parallel groups."""
    meters = (strategy.traffic, strategy.tensor_parallel_traffic, strategy.context_parallel_traffic)
    return sum(sum(meter.bytes.values()) for meter in {id(m): m for m in meters}.values())


def memory_metrics(strategy: ZeROStrategy, unit: ByteUnit) -> dict[str, float]:
    """Return the scalars of the memory in use now, and of the peak since the last call."""
    states = strategy.memory_bytes()
    group = f"zero_memory_{unit.name}"
    result = {f"{group}/{k}": v / unit.nbytes for k, v in states.items()}
    device = strategy.root_device
    if dev.is_accelerator(device):
        peak = dev.peak_bytes(device, reset=True)
        result[f"{group}/peak"] = peak / unit.nbytes
        result[f"{group}/activations"] = max(peak - sum(states.values()), 0) / unit.nbytes
    return result


def bytes_in_use(strategy: ZeROStrategy) -> dict[str, int]:
    """Return the bytes in use now, by category."""
    held = dict(strategy.memory_bytes())
    if dev.is_accelerator(strategy.root_device):
        allocated = dev.allocated_bytes(strategy.root_device)
        held["activations"] = max(allocated - sum(held.values()), 0)
        held["allocated"] = allocated
    offloaded = strategy.activations.metrics().get("zero_activations/stored_bytes")
    if offloaded is not None:
        held["offloaded"] = int(offloaded)
    statistics = Path("/proc/self/statm")  # Linux
    if statistics.exists():
        held["process"] = int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return held
