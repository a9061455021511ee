"""The phase of one optimizer's gradients between backward and step, and its legal transitions.

::

    transition            from                      to              when
    reopen, start_over    any                       ACCUMULATING    a backward, `zero_grad`, or a change by others
    averaged              ACCUMULATING, STEPPED     AVERAGED        before clipping and step, or when they are read
    clipped               AVERAGED, CLIPPED         CLIPPED         clipping by norm or value
    stepped               AVERAGED, CLIPPED         STEPPED         the optimizer has stepped, or skipped its step

`OptimizerStep` changes its phase only in these methods. Any other transition is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from ls_strategy.errors import StateError
from ls_strategy.zero.flat.units import Flat
from ls_strategy.zero.step.optimizer import ShardedOptimizer


class Phase(Enum):
    """The phase of an optimizer's gradients since the last backward."""

    ACCUMULATING = "accumulating"
    """Backward passes may still add to them, or there are none; they are not completely averaged."""
    AVERAGED = "averaged"
    """They are averaged on every rank, checked for overflow, and visible to user code."""
    CLIPPED = "clipped"
    """They were clipped after averaging."""
    STEPPED = "stepped"
    """The optimizer has stepped, or skipped its step after an overflow."""


@dataclass(eq=False)
class OptimizerStep:
    """One optimizer, and the state of its gradients between backward and step."""

    sharded: ShardedOptimizer
    flats: list[Flat]
    kinds: list[int] = field(default_factory=list)
    """`Flat.optimizer_index` of its flats: its own number, and that of each set of optimizers that it shares with."""
    hooks: tuple[Any, ...] = ()
    """Handles of the engine's hooks before and after the optimizer's own ``step``."""
    used: list[bool] = field(default_factory=list)
    """Which of its parameters have a gradient on any rank."""
    phase: Phase = Phase.ACCUMULATING
    overflow: bool = False
    norm: Tensor | None = None
    """Global norm before clipping, if it is known."""
    norm_stands: bool = False
    """Whether ``norm`` stays valid because the gradients were clipped after it was computed."""
    clip: Tensor | None = None
    """Factor that the fused update applies to the gradients; None if it was applied in place, or is 1."""
    folded: bool = False
    """Whether the fused update applies loss scale and ``clip``, so that the averages do not include them."""

    @property
    def is_averaged(self) -> bool:
        """Return whether the gradients are complete, clipped or not, and not yet stepped."""
        return self.phase in (Phase.AVERAGED, Phase.CLIPPED)

    def reopen(self) -> None:
        """Record that more gradients follow, or that others have changed them."""
        self.phase = Phase.ACCUMULATING
        self.norm = None

    def start_over(self) -> None:
        """Record that the gradients were dropped, or set to zero."""
        self.reopen()
        self.folded = False
        self.clip = None

    def averaged(self, *, overflow: bool) -> None:
        """Record that the gradients are complete."""
        self._move(Phase.AVERAGED, Phase.ACCUMULATING, Phase.STEPPED)
        self.overflow = overflow
        self.norm_stands = False

    def clipped(self) -> None:
        """Record that the gradients were clipped."""
        self._move(Phase.CLIPPED, Phase.AVERAGED, Phase.CLIPPED)
        self.norm_stands = True

    def stepped(self) -> None:
        """Record that the step is over."""
        self._move(Phase.STEPPED, Phase.AVERAGED, Phase.CLIPPED)

    def _move(self, to: Phase, *allowed: Phase) -> None:
        if self.phase not in allowed:
            raise StateError(
                f"Got {self.phase.value} gradients of {type(self.sharded.optimizer).__name__}, but only "
                f"{' or '.join(each.value for each in allowed)} gradients can become {to.value}. Call finish() before "
                "clipping and step()."
            )
        self.phase = to


def no_gradients() -> StateError:
    """Return the error for reading gradients where there are none."""
    return StateError("there is no gradient to read. Call this between backward and zero_grad().")
