"""Threads of what the host computes for an accelerator: updates and casts of offloaded states."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ls_strategy import device as dev

CGROUP = Path("/sys/fs/cgroup")


def cpu_quota(folder: Path) -> float | None:
    """Return the cores that the control group may use, or None without a limit."""
    try:
        most, period = (folder / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None


def usable_cores() -> float:
    """Return the cores of this host that this process may use: those it is bound to, or fewer by its control group."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(bound), cpu_quota(CGROUP) or math.inf)


def use_share_of_cores(device: torch.device, environ: Mapping[str, str] = os.environ) -> int:
    """Let torch use this rank's share of the cores where torchrun has left it one thread. Call it before other work.

    torchrun sets ``OMP_NUM_THREADS=1`` for several ranks of a node if it is not set (``torch.distributed.run``). One
    thread moves about 10 GB/s, so an update of 7B parameters on 8 ranks would take 2 s. One core per rank is left to
    the thread that launches the device's work. No bit depends on the number of threads.

    Args:
        device: of this rank. On the CPU the threads are those of the model too, and stay as they are.
        environ: of this process.

    Returns:
        The number of threads that was set; 0 if it stays.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1"
    if not by_torchrun or not dev.is_accelerator(device) or torch.get_num_threads() != 1:
        return 0
    threads = int(usable_cores()) // int(environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    if threads < 2:
        return 0
    torch.set_num_threads(threads)
    return threads
