"""Optimizers that need a full tensor in the middle of their step alone: what comes before and after is element-wise.

::

    gradient, states  ──direction──>  | a | b |  ─┐ gather        ┌─ scatter ─>  | a | b |  ──apply──>  masters
                                      | a | b |  ─┴─> a ──update──┘
                                                      at one rank, without states

Of Muon, the momentum is element-wise and its states stay in shards; the owner orthogonalizes. Only the direction goes
to the owner, and the update comes back, in the dtype in which the owner computes. So nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.optimizers.muon import Muon
from ls_strategy.optimizers.newton_schulz import orthogonalized

Group = dict[str, Any]


@dataclass(frozen=True)
class SplitStep:
    """The three parts of a step. Tensors of the first and the last one are ranges of a parameter, 1-d.

    With offload these two run on a background thread, one call at a time, without autograd. They may read the settings
    of the group, as they are at the step, but not its parameters.
    """

    dtype: Callable[[Group], torch.dtype]
    """Returns the dtype of what is sent, in both directions."""

    direction: Callable[[Group, Tensor, dict[str, Any]], Tensor]
    """Returns what the owner needs of a range, from its gradient and its states, which it creates and changes."""

    update: Callable[[Group, Tensor], Tensor]
    """Returns the update of a full tensor from the direction, both in its shape."""

    apply: Callable[[Group, Tensor, Tensor, tuple[int, ...]], None]
    """Changes a range of a parameter by its range of the update; gets the shape of the parameter too."""

    states: tuple[str, ...] = ()
    """Names of states that begin at zero and are changed in place: these can be on NVMe. Others are in memory."""


def split_step_of(optimizer: Optimizer) -> SplitStep | None:
    """Return the parts of an optimizer's step; None: its step has to be called on full tensors.

    A class may have an attribute ``split_step``, a `SplitStep`. Subclasses do not inherit it: they may do more.
    """
    declared = vars(type(optimizer)).get("split_step")
    if isinstance(declared, SplitStep):
        return declared
    if type(optimizer) is Muon:
        return _OURS
    known = type(optimizer) is getattr(torch.optim, "Muon", None)
    return _TORCHS if known and all(g["adjust_lr_fn"] in _FACTORS for g in optimizer.param_groups) else None


def streamed_states(optimizer: Optimizer) -> dict[str, bool]:
    """Return the states that the step of tensors in full needs and that can be on NVMe; True: they may be negative."""
    step = split_step_of(optimizer)
    return {} if step is None else dict.fromkeys(step.states, True)


_MOMENTUM = ("momentum_buffer",)
_OURS = SplitStep(Muon.iteration_dtype, Muon.direction, Muon.full_update, Muon.apply_update, _MOMENTUM)

_FACTORS = {
    None: "original", "original": "original", "match_rms_adamw": "match_rms_adamw", "spectral_unclamped": "spectral",
}  # fmt: skip
"""Torch's names of how the rate depends on the shape, and ours."""


def _torchs_update(group: Group, direction: Tensor) -> Tensor:
    coefficients = tuple(group["ns_coefficients"])
    return orthogonalized(direction, steps=group["ns_steps"], coefficients=coefficients, eps=group["eps"])


def _apply_torchs(group: Group, param: Tensor, update: Tensor, shape: tuple[int, ...]) -> None:
    Muon.apply_update({**group, "adjust_lr": _FACTORS[group["adjust_lr_fn"]]}, param, update, shape)


_TORCHS = SplitStep(lambda _: torch.bfloat16, Muon.direction, _torchs_update, _apply_torchs, _MOMENTUM)
