"""Measure the speeds of the ranks while all of them work, when a fit begins.

What is timed repeats a piece of work until it takes longer than some turns of a process on a core. Where ranks share
cores, shorter work would not show it: a rank starts its clock when its turn begins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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

_SIDE = {True: 4096, False: 384}  # rows of the square matrices that are multiplied, on an accelerator and on the host
_SHARD = {True: 4 << 20, False: 1 << 18}  # elements of every rank's shard in the gather that is timed
_STEPPED = {True: 16 << 20, False: 1 << 21}  # elements of the update that is timed: more than caches hold
_TRIES = 4  # times that each is measured; the shortest counts
_TURNS_S = 0.02
"""Seconds that a measurement takes at least: the host's scheduler gives a process a few milliseconds at a time."""

_IN_FLIGHT = 8  # messages that are in flight at once, as reductions are
_LARGE_IN_FLIGHT = 2

_ADAMW_BYTES = 28
"""Per element that AdamW updates: weight and two moments are read and written, the gradient is read; fp32."""

_BLOCKS, _CALLS = 8, 16
"""Blocks that are recomputed, and operations of each: many, as a decision about one takes little of a step's time."""

_FEW_CALLS = 8  # the same of blocks during which updates run
_UPDATES = 2  # updates in flight while backward runs, as `UpdateSchedule` has it


def measure(world: Comm, device: torch.device, dtype: torch.dtype) -> Speeds:
    """Measure, and return what all ranks reach. Collective; the same on all ranks.

    Args:
        world: the ranks.
        device: of the model.
        dtype: of the forward's products.
    """
    own = dev.is_accelerator(device)
    update = _updates(world, device, _STEPPED[own])
    return Speeds(
        flops=_flops(world, device, dtype, _SIDE[own]),
        **_links(world, device, _SHARD[own]),
        update=update,
        host_update=_updates(world, torch.device("cpu"), _STEPPED[False]) if own else update,
        bus=_bus(world, device, _SHARD[own]) if own else float("inf"),
        overlaps=own,
        touch=_touch(world, device, _STEPPED[own]),
        **_calls(world, device),
        handover=_handovers(world),
    )


def _seconds(world: Comm, device: torch.device, *works: Callable[[], object]) -> list[float]:
    """Return the time of each work that all ranks begin together, until the last one is done. Collective.

    What disturbs an attempt only makes it longer, so the shortest counts. Where ranks share a core, another one is last
    in every attempt, and each of them is quick in most. Works take turns, as their differences count.
    """

    def once(work: Callable[[], object], repeats: int) -> float:
        dev.synchronize(device)
        world.agree(torch.zeros(1, dtype=torch.uint8))
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        dev.synchronize(device)
        return (time.perf_counter() - started) / repeats

    def slowest(times: Sequence[float]) -> list[float]:
        return [max(each) for each in zip(*world.exchange_objects(times), strict=True)]

    for work in works:
        once(work, 1)  # builds kernels and connections
    repeats = [math.ceil(_TURNS_S / seconds) for seconds in slowest([once(work, 1) for work in works])]
    tries = [slowest([once(work, n) for work, n in zip(works, repeats, strict=True)]) for _ in range(_TRIES)]
    return [min(each) for each in zip(*tries, strict=True)]


def _flops(world: Comm, device: torch.device, dtype: torch.dtype, side: int) -> float:
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _seconds(world, device, lambda: matrix @ matrix)[0]


def _touch(world: Comm, device: torch.device, numel: int) -> float:
    one, other, result = (torch.ones(numel, device=device) for _ in range(3))
    return 12 * numel / _seconds(world, device, lambda: torch.add(one, other, out=result))[0]


def _links(world: Comm, device: torch.device, shard: int) -> dict[str, float]:
    """Return the seconds of an empty message, and of waiting for it, and bytes per second of large ones."""
    if world.world_size == 1:
        return {"message": 0.0, "wait": 0.0, "link": float("inf")}

    def gathers(numel: int, count: int) -> Callable[[], None]:
        fulls = [torch.ones(numel * world.world_size, device=device) for _ in range(count)]

        def work() -> None:
            for pending in [world.all_gather(full, "speeds") for full in fulls]:
                pending.wait()

        return work

    counts = _IN_FLIGHT, 1, _LARGE_IN_FLIGHT
    works = (gathers(numel, count) for numel, count in zip((1, 1, shard), counts, strict=True))
    together, alone, large = (s / n for s, n in zip(_seconds(world, device, *works), counts, strict=True))
    link = 4 * shard * (world.world_size - 1) / max(large - together, 1e-9)
    return {"message": together, "wait": max(alone - together, 0.0), "link": link}


def _updates(world: Comm, device: torch.device, numel: int) -> float:
    param, grad, first, second = (torch.ones(numel, device=device) for _ in range(4))
    moments = (Moment(first, None, signed=True), Moment(second, None, signed=False))

    def update() -> None:
        adamw_(param, *moments, grad, lr=0.0, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)

    return _ADAMW_BYTES * numel / _seconds(world, device, update)[0]


def _bus(world: Comm, device: torch.device, numel: int) -> float:
    away = torch.ones(numel, device=device)
    here = torch.zeros(numel, pin_memory=True)

    def both_ways() -> None:
        here.copy_(away, non_blocking=True)
        away.copy_(here, non_blocking=True)

    return 8 * numel / _seconds(world, device, both_ways)[0]


class _Block(nn.Module):
    """Small operations on a small tensor: nothing but calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = x * self.weight
        return x


def _calls(world: Comm, device: torch.device) -> dict[str, float]:
    """Return the seconds to call an operation, to have a block run again, and to decide what of it does."""

    def step(policy: Literal["full", "selective"] | None, calls: int) -> Callable[[], None]:
        model = nn.Sequential(*(_Block(calls) for _ in range(_BLOCKS))).to(device)
        if policy is not None:
            apply_recompute(model, RecomputeConfig(policy=policy, block_classes=("_Block",)))
        x = torch.ones(4, device=device, requires_grad=True)
        return lambda: model(x).sum().backward()

    steps = step(None, _CALLS), step("full", _CALLS), step("selective", _CALLS), step("selective", 1), step("full", 1)
    plain, full, selective, of_one, full_of_one = (each / _BLOCKS for each in _seconds(world, device, *steps))
    operation = plain / (4 * _CALLS)  # backward has two products and a sum for each of forward's
    of_one -= full_of_one
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
        with_updates, without = _seconds(world, host, *(partial(train, count) for count in (1, 0)))
    finally:
        stream.close()
    return max(with_updates - without, 0.0) / _BLOCKS
