"""Measure the speeds of the ranks while all of them work, when a fit begins.

What is timed repeats a piece of work until it takes longer than a turn of a process on a core, where ranks share cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ls_strategy import device as dev
from ls_strategy.activations.recompute import apply_recompute
from ls_strategy.config import RecomputeConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.extras.planner.speeds import Speeds
from ls_strategy.ops.moments import Moment
from ls_strategy.ops.update import adamw_
from ls_strategy.tiers.stream import Stream, Ticket

_SIDE = {True: 4096, False: 384}
"""Rows of the square matrices that are multiplied, on an accelerator and on the host."""

_SHARD = {True: 4 << 20, False: 1 << 18}
"""Elements of every rank's shard in the gather that is timed."""

_STEPPED = {True: 16 << 20, False: 1 << 21}
"""Elements of the update that is timed: more than caches hold."""

_TRIES = 5
"""Times that each is measured; the median counts."""

_REPEATS = 8
"""Times that a piece of work is repeated within a measurement."""

_IN_FLIGHT = 8
"""Messages that are in flight at once, as prefetches and reductions are."""

_ADAMW_BYTES = 28
"""Per element that AdamW updates: weight and two moments are read and written, the gradient is read; fp32."""

_BLOCKS, _CALLS = 8, 16
"""Blocks that are recomputed, and operations of each: many, as a decision about one takes little of a step's time."""

_FEW_CALLS = 8
"""The same of blocks during which updates run."""

_UPDATES = 2
"""Updates in flight while backward runs, as `UpdateSchedule` has it."""


def measure(world: Comm, device: torch.device, dtype: torch.dtype) -> Speeds:
    """Measure, and return what all ranks reach. Collective; the same on all ranks.

    Args:
        world: the ranks.
        device: of the model.
        dtype: of the forward's products.
    """
    own = dev.is_accelerator(device)
    message, link = _links(world, device, _SHARD[own])
    update = _updates(world, device, _STEPPED[own])
    return Speeds(
        flops=_flops(world, device, dtype, _SIDE[own]),
        link=link,
        message=message,
        update=update,
        host_update=_updates(world, torch.device("cpu"), _STEPPED[False]) if own else update,
        bus=_bus(world, device, _SHARD[own]) if own else float("inf"),
        overlaps=own,
        touch=_touch(world, device, _STEPPED[own]),
        **_calls(world, device),
        handover=_handovers(world),
    )


def _seconds(world: Comm, device: torch.device, work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the time of some work that all ranks begin together, until the last one is done. Collective.

    It is the median over attempts. Where ranks share a core, another one is last in every attempt, and each of them is
    quick in most.
    """
    times: list[float] = []
    for attempt in range(_TRIES + 1):
        dev.synchronize(device)
        world.agree(torch.zeros(1, dtype=torch.uint8))
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        dev.synchronize(device)
        if attempt:  # the first one builds kernels and connections
            times.append((time.perf_counter() - started) / repeats)
    return statistics.median(max(each) for each in zip(*world.exchange_objects(times), strict=True))


def _flops(world: Comm, device: torch.device, dtype: torch.dtype, side: int) -> float:
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _seconds(world, device, lambda: matrix @ matrix)


def _touch(world: Comm, device: torch.device, numel: int) -> float:
    one, other, result = (torch.ones(numel, device=device) for _ in range(3))
    return 12 * numel / _seconds(world, device, lambda: torch.add(one, other, out=result))


def _links(world: Comm, device: torch.device, shard: int) -> tuple[float, float]:
    """Return the seconds of an empty message, and bytes per second of large ones."""
    if world.world_size == 1:
        return 0.0, float("inf")

    def gather(numel: int, count: int) -> float:
        fulls = [torch.ones(numel * world.world_size, device=device) for _ in range(count)]

        def work() -> None:
            for pending in [world.all_gather(full, "speeds") for full in fulls]:
                pending.wait()

        return _seconds(world, device, work, max(_REPEATS // count, 2)) / count

    least, most = gather(1, _IN_FLIGHT), gather(shard, 1)
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


class _Block(nn.Module):
    """Small operations on a small tensor: nothing but calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        """Call operations."""
        for _ in range(self.calls):
            x = x * self.weight
        return x


def _calls(world: Comm, device: torch.device) -> dict[str, float]:
    """Return the seconds to call an operation, to have a block run again, and to decide what of it does."""

    def step_s(policy: Literal["full", "selective"] | None, calls: int) -> float:
        model = nn.Sequential(*(_Block(calls) for _ in range(_BLOCKS))).to(device)
        if policy is not None:
            apply_recompute(model, RecomputeConfig(policy=policy, block_classes=("_Block",)))
        x = torch.ones(4, device=device, requires_grad=True)
        return _seconds(world, device, lambda: model(x).sum().backward(), 2) / _BLOCKS

    plain, full, selective = step_s(None, _CALLS), step_s("full", _CALLS), step_s("selective", _CALLS)
    operation = plain / (4 * _CALLS)  # backward has two products and a sum for each of forward's
    of_one = step_s("selective", 1) - step_s("full", 1)
    policy = max((selective - full - of_one) / (2 * (_CALLS - 1)), 0.0)  # in forward, and when it runs again
    return {
        "operation": operation,
        "block": max(full - plain - _CALLS * operation, 0.0),
        "policy": policy,
        "context": max(of_one - 2 * policy, 0.0),
    }


class _SmallUpdate:
    """A job of the stream whose computation takes no time."""

    def __init__(self) -> None:
        self._tensors = tuple(torch.ones(4) for _ in range(4))

    def read(self) -> None:
        """Do nothing."""

    def update(self) -> None:
        """Call the operation that a job of an update calls."""
        param, grad, first, second = self._tensors
        moments = (Moment(first, None, signed=True), Moment(second, None, signed=False))
        adamw_(param, *moments, grad, lr=0.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)

    write = read


def _handovers(world: Comm) -> float:
    """Return what it costs that a thread works off small updates while another one trains.

    The two share the interpreter, and all ranks the cores.
    """
    stream, x, jobs = Stream(threaded=True), torch.ones(4, requires_grad=True), [_SmallUpdate()]
    blocks = [_Block(_FEW_CALLS) for _ in range(_BLOCKS)]

    def train(count: int) -> None:
        tickets: list[Ticket] = []
        for block in blocks:
            block(x).sum().backward()
            tickets += [stream.submit(jobs) for _ in range(count)]
            if len(tickets) > _UPDATES:
                tickets.pop(0).wait()
        for ticket in tickets:
            ticket.wait()

    host = torch.device("cpu")
    try:
        with_updates, without = (_seconds(world, host, partial(train, count)) for count in (1, 0))
    finally:
        stream.close()
    return max(with_updates - without, 0.0) / _BLOCKS
