"""Gradients of parameters that require one but are in no optimizer: averaged over ranks, as under DDP.

No step needs them, so they are neither sharded nor sent in backward. ``p.grad`` stays on its rank until user code reads
it, and is averaged then, together with all others of its flat buffer. Local gradients may accumulate on an average and
be averaged again: the result is the average of the sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy._torch import current_backward_pass
from ls_strategy.distributed.comm import Comm
from ls_strategy.precision import at_least_fp32
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import grad_of, set_grad
from ls_strategy.zero.user_code.sharded_gradient import ShardedGradient, as_plain


class Unstepped:
    """Provides ``p.grad`` of buffers that no optimizer updates."""

    def __init__(self, flats: list[FlatBuffer], comm: Comm, is_local: Callable[[], bool]) -> None:
        """Provide the gradients of those ``flats`` that no optimizer updates, averaged over ``comm``.

        ``is_local`` says whether the gradients of the last backward stay on their rank.
        """
        self._comm = comm
        self._is_local = is_local
        self._averaged: set[int] = set()
        left = [flat for flat in flats if not flat.has_optimizer and comm.world_size > 1]
        self.provides = bool(left)
        """Whether there are such buffers. If so, call `outdate` when a backward pass begins."""
        for flat in left:
            flat.show_by(gradients=self)

    def outdate(self) -> None:
        """Require a new average, because a backward pass changes the gradients. Not collective."""
        self._averaged.clear()

    def read(self, flat: FlatBuffer, index: int) -> Tensor | None:
        """Return ``p.grad``. Collective the first time after a backward."""
        param = flat.params[index]
        if param.requires_grad and not self._is_local() and current_backward_pass() < 0:
            self._average(flat)
        return grad_of(param)

    def write(self, flat: FlatBuffer, index: int, value: Tensor | None) -> None:
        """Set ``p.grad``. Collective the first time after a backward."""
        if value is not None:
            self.read(flat, index)
            if type(value) is ShardedGradient:
                value = as_plain(value).clone()
        set_grad(flat.params[index], value)

    def _average(self, flat: FlatBuffer) -> None:
        if id(flat) in self._averaged:
            return
        self._averaged.add(id(flat))
        held = torch.tensor([grad_of(p) is not None for p in flat.params], dtype=torch.uint8)
        used = [i for i, each in enumerate(self._comm.agree(held).tolist()) if each]
        if not used:
            return
        grads = [grad_of(flat.params[i]) for i in used]
        wide = at_least_fp32(flat.dtype)
        parts = [
            torch.zeros(flat.params[i].numel(), dtype=wide, device=flat.full.device)
            if g is None
            else g.detach().to(wide)
            for i, g in zip(used, grads, strict=True)
        ]
        total = torch.cat([part.reshape(-1) for part in parts])
        self._comm.traffic.count("all_reduce", total)
        with self._comm.blocking("all_reduce", flat.name):
            dist.all_reduce(total, group=self._comm.group)
        total /= self._comm.world_size
        for i, grad, mean in zip(used, grads, total.split([p.numel() for p in parts]), strict=True):
            param = flat.params[i]
            if grad is None:
                set_grad(param, mean.to(param.dtype).view(param.shape))
            else:
                grad.detach().copy_(mean.view(grad.shape))
