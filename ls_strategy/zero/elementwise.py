"""Whether an optimizer may be handed cut parameters: found out by trying, for any class."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy._compat import forget_step_hooks
from ls_strategy.errors import PlanError


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer updates every element by itself: tried out on a whole matrix and on its two halves.

    Flat shards cut parameters anywhere; an optimizer that looks at a whole matrix (Muon, LAMB, Adafactor) would train
    differently on every world size.

    Raises:
        PlanError: the optimizer does not step even a whole matrix without being handed a closure (LBFGS).
    """
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(8, 6, generator=generator)
    grads = [torch.randn(8, 6, generator=generator) for _ in range(3)]
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        try:
            (whole,) = _probe(optimizer, settings, [value], [[g] for g in grads])
        except TypeError as error:
            raise PlanError(
                f"{name}.step() cannot run on gradients alone ({error}). ZeROStrategy averages gradients once per "
                "step; use a first-order optimizer (AdamW, SGD, ...)."
            ) from error
        try:
            halves = _probe(optimizer, settings, _halves(value), [_halves(g) for g in grads])
        except Exception:
            return False
        if not torch.allclose(whole.flatten(), torch.cat(halves), rtol=1e-5, atol=1e-7):
            return False
    return True


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot step cut parameters.

    Raises:
        PlanError: with the cure.
    """
    if not is_elementwise(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} is not element-wise: it treats a matrix differently from its two halves, and "
            "ZeRO shards cut parameters. Use an element-wise optimizer (AdamW, SGD, Lion, ...), or stage 0, where "
            "parameters are not cut."
        )


def _halves(value: Tensor) -> list[Tensor]:
    flat = value.flatten()
    return [flat[:19], flat[19:]]


def _probe(
    optimizer: Optimizer, settings: dict[str, Any], values: list[Tensor], grads: list[list[Tensor]]
) -> list[Tensor]:
    """Run a copy of the optimizer on ``values`` for ``len(grads)`` steps; the original is not touched."""
    params = [v.clone().requires_grad_() for v in values]
    settings = {k: (v.detach().cpu() if isinstance(v, Tensor) else v) for k, v in settings.items()}
    if "lr" in settings:
        settings["lr"] = 1e-2  # a warm-up may start at 0, and then nothing would move
    fresh = type(optimizer).__new__(type(optimizer))
    fresh.__dict__.update(optimizer.__dict__)
    forget_step_hooks(fresh)
    fresh.state = defaultdict(dict)
    fresh.param_groups = [{**settings, "params": params}]
    early = next((s for s in optimizer.state.values() if s), {})
    for p in params:
        for k, v in early.items():  # state made by the constructor, as Adagrad's accumulators
            if isinstance(v, Tensor) and k != "step" and v.numel():
                fresh.state[p][k] = torch.full_like(p, float(v.flatten()[0]))
            else:
                fresh.state[p][k] = copy.deepcopy(v)
    for step_grads in grads:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.clone()
        type(optimizer).step(fresh)
    return [p.detach() for p in params]
