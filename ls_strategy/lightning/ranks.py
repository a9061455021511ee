"""What ranks exchange besides the engine's states: values that are reduced, and errors.

The one invariant: no rank waits for a rank that has failed. An error either reaches every rank, or the rank that raised
it closes the connections that the others wait on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import OutOfStepError

PATIENCE_S = 3.0
"""Seconds that a failed rank waits for the failures of the others before it closes the connections."""


def reduce(value: Tensor, comm: Comm, device: torch.device, *, op: Any, group: Any, weight: float | None) -> Tensor:
    """Reduce a value over ranks in place, as DDP does, and return it. Collective.

    Args:
        value: this rank's. Means of integers are new tensors in fp32: DDP rounds them down, and with them the number
            of samples that Lightning divides logged sums by. Gradients through a mean are those of a division, but
            where the backend averages by itself, as NCCL does.
        comm: the ranks that explain waits.
        device: on which it is sent. If ``value`` is on another one, the result there is returned.
        op: ``"mean"``, another name, or an operation of ``torch.distributed``. None: the mean.
        group: None: that of ``comm``.
        weight: this rank's in averages, 0 for a rank without a batch. None: all ranks have one.
    """
    mean = op is None or op == dist.ReduceOp.AVG or str(op).lower() in ("mean", "avg")
    reduce_op: Any = dist.ReduceOp.SUM if mean else op
    if isinstance(reduce_op, str):
        reduce_op = getattr(dist.ReduceOp, reduce_op.upper())
    sent = value.detach().clone().contiguous().to(device)
    rounds_down = mean and not (sent.is_floating_point() or sent.is_complex())
    if rounds_down:
        sent = sent.float()
    if weight is not None:
        sent = _weigh(sent, weight, "mean" if mean else reduce_op)
    group = group or comm.group
    with comm.blocking("reduce", group=None if group is comm.group else group):
        dist.all_reduce(sent, op=reduce_op, group=group)
    divided = mean and torch.is_grad_enabled() and value.grad_fn is not None and dist.get_backend(group) == "gloo"
    if mean and not divided:
        sent = sent / dist.get_world_size(group)
    if rounds_down:
        return sent
    value.detach().copy_(sent)
    if divided:
        return value.div_(dist.get_world_size(group))
    return value if value.device == sent.device else sent


def ends_alone(exception: BaseException, comm: Comm, place: str) -> bool:
    """Report an error to the other ranks. Return whether they wait for this one, so that connections have to be closed.

    ``place``: where this rank has stopped; ranks at different places cannot go on together.
    """
    known = isinstance(exception, OutOfStepError)
    return known or not comm.failures.announce(exception, patience_s=PATIENCE_S, place=place)


def _weigh(value: Tensor, weight: float, op: Any) -> Tensor:
    """Return what a rank contributes to a reduction over ranks of which only some have a batch.

    Args:
        value: this rank's; of sums it contributes its value, of means ``weight`` times it.
        weight: 0 for a rank without a batch.
        op: ``mean`` or an operation of ``torch.distributed``.
    """
    if op == "mean":
        return value * weight if weight else torch.zeros_like(value)
    if weight:
        return value
    neutral = {dist.ReduceOp.SUM: 0, dist.ReduceOp.PRODUCT: 1}.get(op)
    if neutral is None:
        info = torch.finfo(value.dtype) if value.is_floating_point() else torch.iinfo(value.dtype)
        neutral = info.min if op == dist.ReduceOp.MAX else info.max
    return torch.full_like(value, neutral)
