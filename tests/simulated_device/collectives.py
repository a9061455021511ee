"""Collectives on streams of their own, as NCCL's, one for each group: what they give is there after `wait` only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ls_strategy import device as dev
from ls_strategy.distributed import comm as comm_module
from ls_strategy.distributed.comm import PendingGather, PendingReduce, make_comm
from ls_strategy.distributed.mesh import MeshShape, make_mesh
from tests.gpu.communicator import through_communicator
from tests.simulated_device.programs import Stack, fit


class Work:
    """A collective in flight. To wait for it lets the current stream wait."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait for the collective."""
        dev.stream(self._event.device).wait_event(self._event)


@contextmanager
def own_streams(device: torch.device) -> Iterator[list[tuple[str, int]]]:
    """Let asynchronous collectives run in a stream of their group.

    Yields:
        The name of each, and the stream that started it.
    """
    streams: dict[Any, torch.Stream] = {}
    started: list[tuple[str, int]] = []

    def aside(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, group: Any = None, **options: Any) -> Any:
            if not async_op or any(tensor.is_cpu for tensor in tree_leaves(args)):
                return collective(*args, async_op=async_op, group=group, **options)
            own, before = streams.setdefault(group, dev.new_stream(device)), dev.stream(device)
            own.wait_stream(before)
            with dev.on(own):
                collective(*args, group=group, **options)
            started.append((collective.__name__, before.stream_id))
            return Work(dev.record(device, own))

        return call

    of_comm = ("all_gather_single", "reduce_scatter_single")
    of_torch = ("all_gather", "reduce_scatter", "all_reduce")
    with ExitStack() as stack:
        for owner, names in ((comm_module, of_comm), (dist, of_torch)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, aside(getattr(owner, name))))
        yield started


def fit_aside(
    device: torch.device,
    options: dict[str, Any],
    trainer: dict[str, Any],
    habit: str = "",
    *,
    without: str = "",
    module: Stack | None = None,
) -> dict[str, Any]:
    """Train as several ranks do, with collectives on streams of their own. Return what `fit` does, and their names.

    ``without``: leave out the wait for gathers, or for reductions.
    """
    with ExitStack() as stack:
        if without == "gathers":
            stack.enter_context(mock.patch.object(comm_module.PendingGather, "wait", _go_on))
        elif without == "reductions":
            stack.enter_context(mock.patch.object(comm_module.PendingReduce, "finish", _sum_at_once))
        started = stack.enter_context(own_streams(device))
        stack.enter_context(through_communicator())
        found = fit(device, options, trainer, habit, module=module)
        return {**found, "started": {name for name, _ in started}}


def _go_on(gather: PendingGather) -> None:
    """Do not wait."""


def _sum_at_once(reduction: PendingReduce, out: Tensor, *, accumulate: bool) -> None:
    comm_module.sum_(out, reduction.parts, 1.0, accumulate=accumulate)


def between_groups(device: torch.device, shard: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """Average the gradients of two buffers over groups of ``shard`` ranks, and compute meanwhile."""
    dev.select(device)
    world = make_comm()
    mesh = make_mesh(MeshShape.of(world.world_size, shard=shard), world)
    group = mesh.shards
    assert group is not None
    group.native = True
    numel = 64 * shard
    gradients = torch.bfloat16 if dtype is not None else torch.float32
    with own_streams(device) as started:
        fulls = [torch.full((numel,), float(world.rank + n), dtype=gradients, device=device) for n in range(2)]
        pending = [group.reduce_scatter(full, dtype, f"unit {n}") for n, full in enumerate(fulls)]
        begun = list(started)
        busy = torch.ones(8, 8, device=device)
        for _ in range(3):  # takes what memory has been freed
            busy = busy @ torch.ones(8, 8, device=device) / 8
            torch.zeros(numel, dtype=torch.float32, device=device)
        outs = [torch.zeros(numel // shard, device=device) for _ in pending]
        for each, out in zip(pending, outs, strict=True):
            each.finish(out, accumulate=False)
        averages = [sorted(set(out.cpu().tolist())) for out in outs]
    return {
        "averages": averages,
        "begun": begun,
        "model": dev.stream(device).stream_id,
        "busy": float(busy.cpu().mean()),
    }
