"""How the steps of a run are run: one batch of its own per rank, or in another way (`LOOPS`)."""

from __future__ import annotations

from collections.abc import Callable

from ls_strategy.lightning.loop.join import JoinLoop
from ls_strategy.lightning.loop.pipeline import PipelineLoop
from ls_strategy.lightning.loop.plain import LoopParts, StepLoop
from ls_strategy.lightning.loop.virtual import VirtualLoop

LOOPS: list[Callable[[LoopParts], StepLoop | None]] = [VirtualLoop.of, PipelineLoop.of, JoinLoop.of]
"""Make the loop that a strategy's options ask for, or return None. The first one that does is taken."""


def loop_of(parts: LoopParts) -> StepLoop:
    """Return the loop of a strategy: `StepLoop` itself, if no other one is asked for."""
    made = (make(parts) for make in LOOPS)
    return next((loop for loop in made if loop is not None), None) or StepLoop(parts)
