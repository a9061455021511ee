"""The seam at which the parameters of an optimizer are stepped.

====================  ==================================================  ============================================
updater               takes                                               states while it steps
====================  ==================================================  ============================================
`OwnerUpdater`        parameters that need to be stepped as full tensors  at the rank that owns the tensor, full
`FusedUpdater`        buffers and groups that have a fused update         in the flat store, on any tier
`TorchUpdater`        everything else, by the optimizer's own ``step``    views of the store in ``optimizer.state``
====================  ==================================================  ============================================

An updater has the states of its parameters from `Updater.prepare` on, until `Updater.collect` moves them to
`OptimizerStates`, where checkpoints find them and the next `prepare` takes them from. Another one is a class like these
and an entry in `UPDATERS`::

    takes(number)           once: is it to step this parameter?
    prepare(runs)           the set of parameters to step has changed: here are the runs of those that it takes
    begin(step, others)     at the optimizer's step: begin the updates, and let the others begin theirs
    stepping()              around the optimizer's own ``step``
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.tiers.stream import Stream
from ls_strategy.zero.step.optimizer_state import OptimizerStates
from ls_strategy.zero.step.runs import Run

if TYPE_CHECKING:
    from ls_strategy.zero.step.update import Update


@dataclass(frozen=True)
class StepArguments:
    """What one call of ``optimizer.step`` is to do."""

    used: Sequence[bool]
    """One flag per parameter of the optimizer's buffers, in their order: whether any rank has a gradient of it."""

    clip: Tensor | None = None
    """Factor for the gradients that was not applied yet, ``()`` fp32; None: there is none."""

    shown: bool = True
    """Whether the gradients were bound to the pieces, so that changes there count."""

    submit: Callable[[list[Update]], None] | None = None
    """Receives fused updates, in order of the buffers. None: they run at once, on the calling thread."""

    stream: Stream | None = None
    """May still work on the master weights afterwards. None: they are complete when the step is over."""


class Updater(ABC):
    """Steps some parameters of one optimizer, on this rank's range of them."""

    in_runs: ClassVar[bool] = True
    """Whether it steps runs of adjacent parameters. If not, `prepare` gets none, and `begin` finds its own."""

    @abstractmethod
    def takes(self, number: int) -> bool:
        """Return whether it steps a parameter, given by its number in `OptimizerStates`. The same on all ranks."""

    def prepare(self, runs: Sequence[Run]) -> None:
        """Take these runs, with the states that their parameters have in `OptimizerStates`. Not collective."""
        del runs

    @abstractmethod
    def begin(self, step: StepArguments, dropped: frozenset[int], others: Callable[[], None]) -> None:
        """Begin the updates of a step, and call ``others`` once, which begins those of the updaters behind this one.

        Collective, if it sends. ``dropped``: numbers of used parameters that are not stepped.
        """
        # Collective, if it sends. ``dropped``: numbers of used parameters that are not stepped.

    def stepping(self) -> AbstractContextManager[None]:
        """Wrap the optimizer's own ``step``: let it see what it has to step, and end the updates behind it.

        Collective, if it sends. After an exception nothing is sent.
        """
        return nullcontext()

    @abstractmethod
    def collect(self) -> None:
        """Move the states to `OptimizerStates`. Collective, if it sends."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the states in memory that are in no store."""

    def agree(self, dropped: frozenset[int]) -> frozenset[int]:
        """Return the parameters that are dropped on all ranks, given those dropped on this one. Collective."""
        return dropped


UPDATERS: list[Callable[[Optimizer, OptimizerStates], Updater]] = []
"""Make the updaters of other packages for an optimizer. They are asked first, in this order.

When such an updater begins, ``run.flat.averages.tensor()`` has the gradients, clipped and without a loss scale. It
calls ``run.flat.before_change()``, for saves in flight, and changes the master weights, ``run.flat.master``, and states
in place. A parameter whose masters are not in memory is refused to it.
"""
