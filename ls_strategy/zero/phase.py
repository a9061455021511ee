"""How far one optimizer's gradients are on the way to its step, and which turns they may take.

::

    transition            from                      to              when
    reopen, start_over    any                       ACCUMULATING    a backward; `zero_grad`; others changed them
    averaged              ACCUMULATING, STEPPED     AVERAGED        before clipping and step, or when somebody looks
    clipped               AVERAGED, CLIPPED         CLIPPED         clipping by norm or value
    stepped               AVERAGED, CLIPPED         STEPPED         the optimizer has stepped, or skipped its step

`OptimizerStep` changes its phase in these methods alone; a transition that is not in the table is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from ls_strategy.errors import StateError
from ls_strategy.zero.optimizer import ShardedOptimizer
from ls_strategy.zero.units import Flat


class Phase(Enum):
    """What has become of an optimizer's gradients since the last backward."""

    ACCUMULATING = "accumulating"
    """Backward passes may still add to them; they are not averaged to the last, or there are none."""
    AVERAGED = "averaged"
    """They are averaged on every rank, checked for overflow, and visible where user code looks for them."""
    CLIPPED = "clipped"
    """They were clipped since."""
    STEPPED = "stepped"
    """The optimizer has stepped, or skipped its step after an overflow."""


@dataclass(eq=False)
class OptimizerStep:
    """One optimizer, and what is known of its gradients between backward and step."""

    sharded: ShardedOptimizer
    flats: list[Flat]
    kinds: list[int] = field(default_factory=list)
    """`Flat.optimizer_index` of its flats: one number for its own, and one for each set of optimizers it is in."""
    hooks: tuple[Any, ...] = ()
    """Handles of what runs before and after the optimizer's own ``step``."""
    used: list[bool] = field(default_factory=list)
    """Which of its parameters have a gradient on any rank."""
    phase: Phase = Phase.ACCUMULATING
    overflow: bool = False
    norm: Tensor | None = None
    """Global norm before clipping, where it is known."""
    norm_stands: bool = False
    """Whether ``norm`` is of before a clipping, so that nothing that was done to the gradients since changes it."""
    clip: Tensor | None = None
    """Factor that the fused update multiplies the gradients by; None where it was done in place, or is 1."""
    folded: bool = False
    """Whether loss scale and ``clip`` are left to the fused update, so that the averages are without them."""

    @property
    def is_averaged(self) -> bool:
        """Whether the gradients are complete, clipped or not, and not used up by a step."""
        return self.phase in (Phase.AVERAGED, Phase.CLIPPED)

    def reopen(self) -> None:
        """Note that what is known of the gradients is out of date: more come, or others have changed them."""
        self.phase = Phase.ACCUMULATING
        self.norm = None

    def start_over(self) -> None:
        """Note that the gradients were dropped, or set to zero."""
        self.reopen()
        self.folded = False
        self.clip = None

    def averaged(self, *, overflow: bool) -> None:
        """Note that the gradients are complete."""
        self._move(Phase.AVERAGED, Phase.ACCUMULATING, Phase.STEPPED)
        self.overflow = overflow
        self.norm_stands = False

    def clipped(self) -> None:
        """Note that the gradients were clipped."""
        self._move(Phase.CLIPPED, Phase.AVERAGED, Phase.CLIPPED)
        self.norm_stands = True

    def stepped(self) -> None:
        """Note that the step is over."""
        self._move(Phase.STEPPED, Phase.AVERAGED, Phase.CLIPPED)

    def _move(self, to: Phase, *allowed: Phase) -> None:
        if self.phase not in allowed:
            raise StateError(
                f"Got gradients of {type(self.sharded.optimizer).__name__} that are {self.phase.value}, but only those "
                f"that are {' or '.join(each.value for each in allowed)} can become {to.value}. Call finish() before "
                "clipping and step()."
            )
        self.phase = to
