"""Measure the speeds of the ranks while all of them work, when a fit begins, to compare candidates.

A candidate's step is predicted from counted work: operations, bytes and messages to other ranks, bytes that updates
touch, bytes over the bus. On the host, all of it adds up, because ranks send with the cores that compute. An
accelerator sends and copies while it computes, so there the longest of these counts; updates come on top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from ls_strategy import device as dev
from ls_strategy.distributed.comm import Comm
from ls_strategy.extras.planner.forecast import EFFICIENCY, Forecast
from ls_strategy.ops.moments import Moment
from ls_strategy.ops.update import adamw_

SAME = 0.05
"""Predictions that differ by less than this share say nothing: then the lighter candidate is taken."""

_SIDE = {True: 4096, False: 384}
"""Rows of the square matrices that are multiplied, on an accelerator and on the host."""

_SHARD = {True: 4 << 20, False: 1 << 18}
"""Elements of every rank's shard in the gather that is timed."""

_STEPPED = {True: 16 << 20, False: 1 << 21}
"""Elements of the update that is timed: more than caches hold."""

_TRIES = 5
"""Times that each is measured; the median counts."""

_ADAMW_BYTES = 28
"""Per element that AdamW updates: weight and two moments are read and written, the gradient is read; fp32."""


@dataclass(frozen=True)
class Speeds:
    """Speeds that every rank reaches at least, while all of them do the same."""

    flops: float
    """Operations per second in products of matrices, in the forward's dtype."""

    link: float
    """Bytes per second to other ranks, of large messages."""

    message: float
    """Seconds of a collective that sends next to nothing."""

    update: float
    """Bytes per second that an update on the device reads and writes."""

    host_update: float
    """Bytes per second that an update on the host reads and writes."""

    bus: float
    """Bytes per second from the device to its host and back. Infinite where they are one."""

    overlaps: bool
    """Whether traffic hides behind computation."""

    def seconds(self, forecast: Forecast) -> float:
        """Predict one optimizer step; reads and writes of NVMe are not included."""
        moved = forecast.traffic
        compute = forecast.flops / (self.flops * EFFICIENCY)
        links = moved.sent / self.link + forecast.messages * self.message
        update = forecast.stepped_bytes / (self.update if forecast.candidate.optimizer is None else self.host_update)
        update += forecast.step_flops / self.flops
        bus = moved.bus / self.bus
        return (max(compute, links, bus) if self.overlaps else compute + links + bus) + update


def measure(world: Comm, device: torch.device, dtype: torch.dtype) -> Speeds:
    """Measure, and return the slowest rank's values. Collective.

    Args:
        world: the ranks.
        device: of the model.
        dtype: of the forward's products.
    """
    own = dev.is_accelerator(device)
    message, link = _links(world, device, _SHARD[own])
    update = _updates(world, device, _STEPPED[own])
    mine = Speeds(
        flops=_flops(world, device, dtype, _SIDE[own]),
        link=link,
        message=message,
        update=update,
        host_update=_updates(world, torch.device("cpu"), _STEPPED[False]) if own else update,
        bus=_bus(world, device, _SHARD[own]) if own else float("inf"),
        overlaps=own,
    )
    everyones: list[Speeds] = world.exchange_objects(mine)
    slowest = {f.name: min(getattr(each, f.name) for each in everyones) for f in fields(Speeds)}
    return Speeds(**{**slowest, "message": max(each.message for each in everyones)})


def _seconds(world: Comm, device: torch.device, work: Callable[[], object]) -> float:
    """Return the median time of some work that all ranks begin together. Collective."""
    times: list[float] = []
    for attempt in range(_TRIES + 1):
        dev.synchronize(device)
        world.agree(torch.zeros(1, dtype=torch.uint8))
        started = time.perf_counter()
        work()
        dev.synchronize(device)
        if attempt:  # the first one builds kernels and connections
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def _flops(world: Comm, device: torch.device, dtype: torch.dtype, side: int) -> float:
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _seconds(world, device, lambda: matrix @ matrix)


def _links(world: Comm, device: torch.device, shard: int) -> tuple[float, float]:
    """Return the seconds of an empty message, and bytes per second of large ones."""
    if world.world_size == 1:
        return 0.0, float("inf")

    def gather(numel: int) -> float:
        full = torch.ones(numel * world.world_size, device=device)
        return _seconds(world, device, lambda: world.all_gather(full, "speeds").wait())

    least, most = gather(1), gather(shard)
    return least, 4 * shard * (world.world_size - 1) / max(most - least, 1e-9)


def _updates(world: Comm, device: torch.device, numel: int) -> float:
    param, grad, first, second = (torch.ones(numel, device=device) for _ in range(4))
    moments = (Moment(first, None, signed=True), Moment(second, None, signed=False))

    def update() -> None:
        adamw_(param, *moments, grad, lr=0.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)

    return _ADAMW_BYTES * numel / _seconds(world, device, update)


def _bus(world: Comm, device: torch.device, numel: int) -> float:
    away = torch.ones(numel, device=device)
    here = torch.zeros(numel, pin_memory=True)

    def both_ways() -> None:
        here.copy_(away, non_blocking=True)
        away.copy_(here, non_blocking=True)

    return 8 * numel / _seconds(world, device, both_ways)


def quickest(forecasts: Sequence[Forecast], speeds: Speeds) -> Forecast | None:
    """Return the first of those that fit and take at most `SAME` longer than the fastest; None if nothing fits.

    Forecasts that are both faster and smaller on the device go before it. NVMe is not measured: what needs it is taken
    only if nothing else fits.
    """
    fitting = [f for f in forecasts if f.fits]
    resident = [f for f in fitting if not f.traffic.drive] or fitting[:1]
    if not resident:
        return None
    most = min(map(speeds.seconds, resident)) * (1 + SAME)
    chosen = next(f for f in resident if speeds.seconds(f) <= most)
    for other in resident:
        if speeds.seconds(other) < speeds.seconds(chosen) and other.peak.device < chosen.peak.device:
            chosen = other
    return chosen
