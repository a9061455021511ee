"""What a step does on one rank, in numbers that a speed turns into seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Work(NamedTuple):
    """What operations do, counted as torch dispatches them."""

    flops: int = 0  # in products of matrices, convolutions and attention
    touched: int = 0  # bytes of tensors that they read or write, except those that only make a view
    operations: int = 0  # all of them, those that only make a view, too

    def more(self, other: Work) -> Work:
        """Return this and ``other`` together."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def less(self, other: Work) -> Work:
        """Return what this is more than ``other``."""
        return Work(*(a - b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> Work:
        """Return this, done ``count`` times."""
        return Work(*(count * each for each in self))


@dataclass(frozen=True)
class StepWork:
    """What one rank does in one optimizer step."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)  # with recomputation
    blocks: int = 0  # blocks whose forward runs again
    contexts: int = 0  # of these, blocks with a policy for each of their operations
    policed: int = 0  # their operations, in forward and where it runs again
    copied: int = 0  # bytes that offload reads and writes on the host, where device and host are one
    handovers: int = 0  # pieces of work that offload gives to a background thread
    sent: int = 0  # bytes to other ranks
    messages: int = 0  # collectives of parameters and gradients
    # Of these, collectives that a pass waits for one by one, so that no rank gets ahead of the others meanwhile.
    waits: int = 0
    bus: int = 0  # bytes between device and host
    stepped: int = 0  # bytes that element-wise updates read and write
    step_flops: int = 0  # operations of the optimizer's step on full matrices
    steps_on_host: bool = False  # whether the states are offloaded
    gathers: bool = False  # whether forward and backward gather parameters (stage 3)
