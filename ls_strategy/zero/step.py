"""From averaged gradients to new weights: overflow, norm, clip. Every decision is the same on every rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.comm import Comm
from ls_strategy.zero.units import Flat


def unscale_(flats: list[Flat], scale: float) -> None:
    """Divide averaged gradients by the loss scale, in place."""
    if scale != 1.0:
        for flat in flats:
            flat.stepped_grads().mul_(1.0 / scale)


def any_overflow(flats: list[Flat], comm: Comm) -> bool:
    """Whether any rank's averaged gradients hold an infinity or a NaN. Collective, one byte."""
    here = False
    for flat in flats:
        grads = flat.owned_grads()
        # A sum over finite values may overflow too, so a suspicious sum is looked at element by element.
        if not math.isfinite(grads.sum().item()) and not bool(grads.isfinite().all()):
            here = True
            break
    return bool(comm.agree(torch.tensor([here], dtype=torch.uint8)).item())


def global_norm(flats: list[Flat], comm: Comm, norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients of ``flats`` together, each element counted once: ``()`` fp32. Collective.

    Every rank sums over its own shard, whatever the stage is, so the result is the same bit for bit in all of them.
    """
    device = flats[0].full.device if flats else torch.device("cpu")
    parts = [torch.linalg.vector_norm(f.owned_grads(), norm_type) for f in flats]
    local = torch.stack(parts) if parts else torch.zeros(1, device=device)
    if math.isinf(norm_type):
        total = local.max().reshape(1)
        return _reduce(total, comm, dist.ReduceOp.MAX).squeeze(0).float()
    total = local.double().pow(norm_type).sum().reshape(1)
    return _reduce(total, comm, dist.ReduceOp.SUM).pow(1.0 / norm_type).squeeze(0).float()


def _reduce(value: Tensor, comm: Comm, op: dist.ReduceOp.RedOpType) -> Tensor:
    if comm.world_size == 1:
        return value
    if comm.native:  # on the device: the host does not wait
        comm.traffic.count("control", value)
        dist.all_reduce(value, op=op, group=comm.group)
        return value
    return comm.agree(value, op)


def clip_norm_(flats: list[Flat], comm: Comm, max_norm: float) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; returns the norm before. Collective.

    The formula is ``torch.nn.utils.clip_grad_norm_``'s, so that results agree with it.
    """
    norm = global_norm(flats, comm)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if norm.device.type == "cpu" and factor.item() == 1.0:
        return norm
    for flat in flats:
        flat.stepped_grads().mul_(factor)
    return norm


def clip_value_(flats: list[Flat], limit: float) -> None:
    """Clamp every averaged gradient element to ``[-limit, limit]``."""
    for flat in flats:
        flat.stepped_grads().clamp_(-limit, limit)
