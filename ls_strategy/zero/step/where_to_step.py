"""Choose where offloaded states are updated: by the CPU, or on the device, with a copy there and back.

The AdamW update of one parameter moves 28 bytes through host memory on the CPU (16 read, 12 written). On the device it
moves 12 bytes over the bus in either direction. So the CPU is faster if its memory has more than 28 / 12 times the
bandwidth of the bus (for example 130 GB/s against 56 GB/s of PCIe 5.0 x16). Both are measured once, on all ranks at the
same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ls_strategy.ops.moments import Moment
from ls_strategy.ops.update import adamw_
from ls_strategy.tiers.link import Link, host_empty
from ls_strategy.zero.flat.state_store import chunks
from ls_strategy.zero.step.device_step import DeviceStep

_NUMEL = 8 << 20
"""Elements of the measured update: 128 MiB of states, larger than any cache."""

_SETTINGS = {
    "lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "step": 1, "decoupled": True
}  # fmt: skip


@dataclass(frozen=True)
class StepSpeed:
    """Seconds to update one parameter."""

    cpu: float
    device: float

    @property
    def device_is_faster(self) -> bool:
        """Return whether the device is faster by more than 5%, the noise of one measurement."""
        return self.device < 0.95 * self.cpu

    def __str__(self) -> str:
        return f"{1e-9 / self.cpu:.2f} billion parameters per second by the CPU, {1e-9 / self.device:.2f} by the device"


def measure(device: torch.device, link: Link) -> StepSpeed:
    """Time one AdamW update both ways, with fp32 states and 16-bit gradients. This takes a few tenths of a second."""
    states = [host_empty(_NUMEL, torch.float32, device).zero_() for _ in range(3)]
    grad = host_empty(_NUMEL, torch.bfloat16, device).zero_()

    def by_cpu() -> None:
        p, m, v = states
        adamw_(p, Moment(m, None, True), Moment(v, None, False), grad, **_SETTINGS)

    def by_device() -> None:
        step = DeviceStep(link)
        for lo, hi in chunks(0, _NUMEL):
            with step.operation():
                p, m, v, there = (step.send(s[lo:hi]) for s in (*states, grad))
                adamw_(p, Moment(m, None, True), Moment(v, None, False), there, **_SETTINGS)
                for host, result in zip(states, (p, m, v), strict=True):
                    step.bring(host[lo:hi], result)
        step.finish()

    return StepSpeed(_seconds(by_cpu) / _NUMEL, _seconds(by_device) / _NUMEL)


def _seconds(work: Callable[[], None]) -> float:
    """Return the faster of two runs, after a warm-up for page faults and compilation."""
    work()
    times: list[float] = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
