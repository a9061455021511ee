"""Optimizer updates of a flat buffer, in one pass over memory each.

Common arguments:
    param: ``(n,)`` fp32, contiguous, or `SplitMaster`; updated in place.
    moments (``exp_avg``, ...): ``n`` elements each; updated in place. The update uses the new moments before they are
        rounded for storage.
    grad: ``(n,)``, contiguous, fp32, bf16 or fp16; read-only.
    unscale: factor for the gradient, the inverse of the loss scale or of the number of micro-batches.
    clip: another factor, applied separately. A tensor ``()`` fp32 is read on its device, without synchronization.
    out: ``(n,)`` bf16, fp16 or fp32: receives a copy of the new parameters, rounded to nearest.
    seed, offset: of the stochastic rounding of moments, see `Moment.store_`. ``offset`` is the position of the first
        element, so that updating a buffer in chunks gives the same bits as updating it at once.

Scalars are computed in double precision and rounded to fp32 once. All other arithmetic is fp32, and every operation is
rounded separately. `reference` defines the result bit for bit.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from ls_strategy.ops import native, reference
from ls_strategy.ops.moments import UPDATE_CHUNK, Moment
from ls_strategy.ops.portions import portion
from ls_strategy.ops.reference import Scalars
from ls_strategy.ops.split_master import SplitMaster

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def adamw_(  # noqa: PLR0913
    param: Tensor | SplitMaster,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    maximize: bool = False,
    unscale: float = 1.0,
    clip: Tensor | float | None = None,
    out: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Update by AdamW, or by Adam with L2 regularization if not ``decoupled``. ``step`` counts from 1."""
    scalars = {
        "unscale": -unscale if maximize else unscale,
        "decay": 1 - lr * weight_decay if decoupled else 1.0,
        "l2": 0.0 if decoupled else weight_decay,
        "weight1": 1 - beta1,
        "rest1": 1 - _fp32(1 - beta1),
        "beta2": beta2,
        "weight2": 1 - beta2,
        "root2": math.sqrt(1 - beta2**step),
        "eps": eps,
        "rate": -lr / (1 - beta1**step),
    }
    _update("adamw_", param, [exp_avg, exp_avg_sq], grad, scalars, clip, out, seed, offset)


def lion_(  # noqa: PLR0913
    param: Tensor | SplitMaster,
    exp_avg: Moment,
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    unscale: float = 1.0,
    clip: Tensor | float | None = None,
    out: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Update by Lion with decoupled weight decay."""
    scalars = {
        "unscale": unscale,
        "decay": 1 - lr * weight_decay,
        "beta1": beta1,
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "rate": -lr,
    }
    _update("lion_", param, [exp_avg], grad, scalars, clip, out, seed, offset)


def sgd_(  # noqa: PLR0913
    param: Tensor | SplitMaster,
    momentum_buffer: Moment | None,
    grad: Tensor,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
    unscale: float = 1.0,
    clip: Tensor | float | None = None,
    out: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Update by SGD. At the ``first`` step, the gradient replaces the content of the momentum buffer."""
    scalars = {
        "unscale": -unscale if maximize else unscale,
        "l2": weight_decay,
        "momentum": momentum,
        "weight": 1 - dampening,
        "rate": -lr,
        "nesterov": nesterov,
        "first": first,
    }
    moments = [] if momentum_buffer is None else [momentum_buffer]
    _update("sgd_", param, moments, grad, scalars, clip, out, seed, offset)


def adagrad_(  # noqa: PLR0913
    param: Tensor | SplitMaster,
    sum_: Moment,
    grad: Tensor,
    *,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    step: int,
    unscale: float = 1.0,
    clip: Tensor | float | None = None,
    out: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """Update by Adagrad. ``sum_`` is a second moment, ``step`` counts from 1."""
    scalars = {
        "unscale": -unscale if maximize else unscale,
        "l2": weight_decay,
        "eps": eps,
        "rate": -lr / (1 + (step - 1) * lr_decay),
    }
    _update("adagrad_", param, [sum_], grad, scalars, clip, out, seed, offset)


def _update(  # noqa: PLR0913, PLR0917
    name: str,
    param: Tensor | SplitMaster,
    moments: list[Moment],
    grad: Tensor,
    scalars: Scalars,
    clip: Tensor | float | None,
    out: Tensor | None,
    seed: int,
    offset: int,
) -> None:
    one_format = len({m.codes.dtype for m in moments}) <= 1
    compiled = one_format and native.available(param.device.type)
    if isinstance(param, SplitMaster) and (param.device.type != "cpu" or not compiled):  # GPUs have no kernel
        _update_joined(name, param, moments, grad, scalars, clip, seed, offset)
        return
    _check(param, moments, grad, out)
    scalars = {key: value if isinstance(value, bool) else _fp32(value) for key, value in scalars.items()}
    if clip is not None and not isinstance(clip, Tensor):
        clip = torch.full((), clip, dtype=torch.float32, device=param.device)
    rest: dict[str, Any] = {"clip": clip, "out": out, "seed": seed, "offset": offset}
    with torch.no_grad():
        if not compiled:
            assert isinstance(param, Tensor)
            reference.run(reference.RULES[name], param, moments, grad, scalars, **rest)
            return
        if isinstance(param, SplitMaster):
            param, rest = param.high, {**rest, "out": None, "low": param.low, "ties": param.ties}
        run_compiled(name, param, moments, grad, scalars, **rest)


def run_compiled(name: str, param: Tensor, moments: list[Moment], grad: Tensor, scalars: Scalars, **rest: Any) -> None:
    """Run an update's compiled kernel. ``scalars`` and ``rest`` have the names in `schemas`."""
    stored = [t for m in moments for t in (m.codes, m.scales)] or [None, None]
    getattr(torch.ops.ls_strategy, name)(param, *stored, grad, **scalars, **rest)


def _update_joined(  # noqa: PLR0913, PLR0917
    name: str,
    param: SplitMaster,
    moments: list[Moment],
    grad: Tensor,
    scalars: Scalars,
    clip: Tensor | float | None,
    seed: int,
    offset: int,
) -> None:
    """Update split masters as fp32 numbers, a portion at a time."""
    at_a_time = portion(grad.device, UPDATE_CHUNK)
    for start in range(0, param.numel(), at_a_time):
        stop = min(start + at_a_time, param.numel())
        part = param[start:stop]
        joined, of_part = part.join(), [m.narrow(start, stop) for m in moments]
        _update(name, joined, of_part, grad[start:stop], scalars, clip, None, seed, offset + start)
        part.store_(joined)


def _check(param: Tensor | SplitMaster, moments: list[Moment], grad: Tensor, out: Tensor | None) -> None:
    """Refuse tensors that a kernel, which reads raw memory, would read wrongly."""
    split = isinstance(param, SplitMaster)
    weights = param.high if isinstance(param, SplitMaster) else param
    more = [t for t in (param.low if isinstance(param, SplitMaster) else None, out) if t is not None]
    tensors = [weights, grad, *(m.codes for m in moments), *more]
    if any(t.shape != weights.shape or t.dim() != 1 or not t.is_contiguous() for t in tensors):
        raise ValueError(
            f"Got tensors of shapes {[tuple(t.shape) for t in tensors]}, but all must be (n,) and contiguous."
        )
    if any(t.device != weights.device for t in tensors):
        raise ValueError(f"Got tensors on {[str(t.device) for t in tensors]}, but all must be on one device.")
    expected = torch.bfloat16 if split else torch.float32
    if weights.dtype != expected or any(t.dtype not in _GRAD_DTYPES for t in (grad, grad if out is None else out)):
        raise TypeError(
            f"Got param of {weights.dtype} and grad of {grad.dtype}, but param must be fp32 (split: bf16), and grad "
            "and out fp32, bf16 or fp16."
        )


def _fp32(value: float) -> float:
    """Return the nearest fp32 number."""
    return struct.unpack("f", struct.pack("f", value))[0]
