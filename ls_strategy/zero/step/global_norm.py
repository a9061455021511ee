"""Overflow, global norm and clipping of averaged gradients. Every decision is equal on all ranks."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.distributed.comm import Comm
from ls_strategy.ops import exact_norm as exact_norms
from ls_strategy.ops.exact_norm import value_of
from ls_strategy.zero.flat.flat_buffer import FlatBuffer


def any_overflow(sums: list[Tensor], comm: Comm) -> bool:
    """Return whether any rank's averaged gradients contain an infinity or a NaN. Collective over all ranks, one byte.

    The host waits for the device once. ``sums`` are the `Averages.sums` of this rank's flat buffers.
    """
    counts: dict[torch.device, list[Tensor]] = {}
    for _, count in sums:
        counts.setdefault(count.device, []).append(count)
    here = any([bool(torch.stack(each).sum().item()) for each in counts.values()])
    return bool(comm.agree(torch.tensor([here], dtype=torch.uint8)).item())


def global_norm(
    flats: list[FlatBuffer], comm: Comm, norm_type: float = 2.0, *, sums: list[Tensor] | None = None
) -> Tensor:
    """Return the norm of all gradients of ``flats`` together, each element counted once. Collective.

    Every rank sums over its shard in the same way at every stage and on every tier, so the results are bitwise equal.
    With virtual ranks the norm of order 2 is also the same on any number of ranks.
    Of replicas along the tensor-parallel axis, and of groups of ranks, the first one's count.

    Args:
        flats: this rank's flat buffers.
        comm: all ranks.
        norm_type: order of the norm.
        sums: the `Averages.sums` of ``flats``, if the gradients are still those.

    Returns:
        ``()``, fp32, or fp64 if some gradients are.
    """
    wide = functools.reduce(torch.promote_types, [flat.average_dtype for flat in flats], torch.float32)
    wide = wide.to_real()  # the norm of complex gradients
    device = flats[0].full.device if flats else torch.device("cpu")
    exact_norm = any(flat.plan.exact_norm for flat in flats)  # also where another rank counts all of them
    known = dict(zip(map(id, flats), sums or (), strict=False))
    flats = [flat for flat in flats if flat.counted]
    if norm_type == 2.0 and exact_norm:
        exact_sums = [flat.averages.exact_sums().to(device) for flat in flats]
        exact = torch.stack([torch.zeros(exact_norms.SIZE, dtype=torch.int64, device=device), *exact_sums]).sum(0)
        return value_of(comm.reduce_numbers(exact, dist.ReduceOp.SUM)).sqrt().to(wide)
    if norm_type == 2.0:
        found = [(flat.averages.sums() if sums is None else known[id(flat)])[0] for flat in flats]
        local = torch.zeros(1, dtype=torch.float64, device=device)
        if found:
            local = torch.stack([number.to(device, non_blocking=True) for number in found]).sum(0, keepdim=True)
        return comm.reduce_numbers(local, dist.ReduceOp.SUM).sqrt().squeeze(0).to(wide)
    parts = [torch.linalg.vector_norm(_at_hand(f), norm_type).to(device) for f in flats]
    local = torch.stack([part.to(wide) for part in parts]) if parts else torch.zeros(1, dtype=wide, device=device)
    if math.isinf(norm_type):
        total = local.max().reshape(1)
        return comm.reduce_numbers(total, dist.ReduceOp.MAX).squeeze(0).to(wide)
    total = local.double().pow(norm_type).sum().reshape(1)
    return comm.reduce_numbers(total, dist.ReduceOp.SUM).pow(1.0 / norm_type).squeeze(0).to(wide)


def _at_hand(flat: FlatBuffer) -> Tensor:
    if not flat.averages.hold_values:
        return torch.zeros(1, dtype=flat.average_dtype, device=flat.full.device)
    flat.averages.require_here()
    return flat.averages.owned().to(flat.average_dtype) * flat.averages.unscale


def clip_factor(norm: Tensor, max_norm: float) -> Tensor | None:
    """Return the factor that clips gradients of this norm, in its dtype; None if the host knows that it is 1.

    The formula is that of ``torch.nn.utils.clip_grad_norm_``.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return None if norm.device.type == "cpu" and factor.item() == 1.0 else factor


def scale_(flat: FlatBuffer, factor: Tensor) -> None:
    """Multiply averaged gradients in place."""
    flat.averages.change(lambda grads: grads.mul_(factor.to(grads.device)))
    flat.averages.note_edit()


def clip_value_(flats: list[FlatBuffer], limit: float) -> None:
    """Clamp every averaged gradient element to ``[-limit, limit]``."""
    for flat in flats:
        flat.averages.change_unscaled(lambda grads: grads.clamp_(-limit, limit))
        flat.averages.note_edit()
