"""What Lightning asks for when it runs a step: the argument of every loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ls_strategy.engine import Engine


@dataclass(frozen=True)
class StepCall:
    """One step that Lightning asks for."""

    engine: Engine
    """Of the module."""

    step: Callable[..., Any]
    """The user's step."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    """Its arguments."""

    synchronises: bool = False
    """Training: whether rank 0's buffers become those of all before the next step, as under DDP."""

    accumulates: bool = False
    """Training: whether gradients are left to a later backward."""

    together: bool = False
    """Evaluation: whether ranks wait for each other in it."""
