"""The gradients of all optimizers between backward and `zero_grad`, for readers that are not the update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.step.stepper import Stepper, no_gradients


@dataclass(frozen=True)
class CurrentGradients:
    """The averaged gradients of one flat buffer."""

    flat: FlatBuffer
    used: list[bool]
    """Which parameters have a gradient on any rank."""

    clip: Tensor | None
    """Factor that the update will apply."""

    def factor_on(self, device: torch.device) -> Tensor:
        """Return the factor that makes the averages what the optimizer gets, ``()`` fp64."""
        factor = torch.tensor(self.flat.averages.unscale, dtype=torch.float64, device=device)
        return factor if self.clip is None else factor * self.clip.to(device)


def current_gradients(stepper: Stepper) -> list[CurrentGradients]:
    """Average what was not sent yet, and return the gradients as the optimizers would get them now. Collective.

    Raises:
        StateError: there are none, or an update that began in backward has taken them.
    """
    found: dict[int, CurrentGradients] = {}
    for index in range(len(stepper.optimizers)):
        state = stepper.as_they_are(index)
        used = iter(state.used)
        for flat in state.flats:
            row = [next(used) for _ in flat.params]
            clip = state.clip if state.folded and flat.averages.folds_factors else None
            found.setdefault(id(flat), CurrentGradients(flat, row, clip))
    if not any(any(each.used) for each in found.values()):
        raise no_gradients()
    for each in found.values():
        each.flat.averages.require_here()
    return list(found.values())
