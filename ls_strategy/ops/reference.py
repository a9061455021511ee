"""The optimizer updates in plain torch. Kernels are tested against them bit for bit.

All arithmetic is fp32, and every operation is rounded separately: no `addcmul`, `lerp` or ``alpha=``, which a back end
may contract into fused multiply-adds. Updates run chunk by chunk, so that intermediate results stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ls_strategy.ops.moments import UPDATE_CHUNK, Moment, root
from ls_strategy.ops.portions import portion

Scalars = dict[str, float]
"""Numbers of an update, rounded to fp32, and its flags."""

Rule = Callable[[Tensor, Tensor, list[Tensor], Scalars], None]
"""``rule(param, grad, moments, scalars)`` updates one chunk in place, all fp32. It may overwrite all tensors."""


def run(  # noqa: PLR0913
    rule: Rule,
    param: Tensor,
    moments: list[Moment],
    grad: Tensor,
    scalars: Scalars,
    *,
    clip: Tensor | None,
    out: Tensor | None,
    seed: int,
    offset: int,
) -> None:
    """Run one update; arguments as in `ls_strategy.ops.update`, with the rule's ``scalars``.

    ``scalars["unscale"]`` includes the sign of ``maximize``: a change of sign is exact.
    """
    at_a_time = portion(param.device, UPDATE_CHUNK)
    for start in range(0, param.numel(), at_a_time):
        stop = min(start + at_a_time, param.numel())
        p = param[start:stop]
        g = grad[start:stop].to(torch.float32, copy=True).mul_(scalars["unscale"])
        if clip is not None:
            g.mul_(clip)
        parts = [m.narrow(start, stop) for m in moments]
        values = [m.codes if m.codes.dtype == torch.float32 else m.dequantize() for m in parts]
        rule(p, g, values, scalars)
        for part, value in zip(parts, values, strict=True):
            if value is not part.codes:
                part.store_(value, seed=seed, offset=offset + start)
        if out is not None:
            out[start:stop].copy_(p)


def adamw(p: Tensor, g: Tensor, moments: list[Tensor], s: Scalars) -> None:
    """Update by AdamW, or Adam with L2 regularization: Loshchilov & Hutter, arXiv:1711.05101, algorithm 2."""
    m, v = moments
    p.mul_(s["decay"])
    if s["l2"]:
        g.add_(p * s["l2"])
    # torch's lerp: start from the nearer end.
    if s["weight1"] < 0.5:
        m.add_((g - m).mul_(s["weight1"]))
    else:
        torch.sub(g, (g - m).mul_(s["rest1"]), out=m)
    v.mul_(s["beta2"]).add_((g * s["weight2"]).mul_(g))
    # Divide by a tensor, since CUDA divides by a number by multiplying with its reciprocal.
    denominator = root(v).div_(torch.full((), s["root2"], dtype=torch.float32, device=p.device)).add_(s["eps"])
    p.add_((m * s["rate"]).div_(denominator))


def lion(p: Tensor, g: Tensor, moments: list[Tensor], s: Scalars) -> None:
    """Update by Lion: Chen et al., arXiv:2302.06675, algorithm 2."""
    (m,) = moments
    p.mul_(s["decay"])
    direction = (m * s["beta1"]).add_(g * s["weight1"])
    p.add_(direction.sign_().mul_(s["rate"]))
    m.mul_(s["beta2"]).add_(g * s["weight2"])


def sgd(p: Tensor, g: Tensor, moments: list[Tensor], s: Scalars) -> None:
    """Update by SGD with momentum as torch does; ``first``: the buffer starts as the gradient."""
    if s["l2"]:
        g.add_(p * s["l2"])
    if moments:
        (b,) = moments
        if s["first"]:
            b.copy_(g)
        else:
            b.mul_(s["momentum"]).add_(g * s["weight"])
        g = g.add_(b * s["momentum"]) if s["nesterov"] else b
    p.add_(g * s["rate"])


def adagrad(p: Tensor, g: Tensor, moments: list[Tensor], s: Scalars) -> None:
    """Update by Adagrad as torch does: Duchi, Hazan & Singer, JMLR 12 (2011)."""
    (v,) = moments
    if s["l2"]:
        g.add_(p * s["l2"])
    v.add_(g * g)
    p.add_((g * s["rate"]).div_(root(v).add_(s["eps"])))


RULES: dict[str, Rule] = {"adamw_": adamw, "lion_": lion, "sgd_": sgd, "adagrad_": adagrad}
"""Rule by name of the update."""
