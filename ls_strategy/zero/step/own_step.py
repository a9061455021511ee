"""A call of the optimizer's own ``step``: what its parameter groups hold before, while and after it computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from ls_strategy.tiers.stream import Stream
from ls_strategy.zero.step.update import Update

if TYPE_CHECKING:
    from ls_strategy.zero.step.optimizer import ShardedOptimizer


class OwnStep:
    """One call of the optimizer's own ``step``: the groups hold runs while it computes.

    ::

        with sharded.own_step(...) as step:
            optimizer.step()                the user's pre-hooks see the groups as usual
                step.begin()                called by the engine's hook, the last pre-hook
                ...                         torch's code, on the runs
                step.end()                  called by the engine's hook, the first post-hook

    Leaving the ``with`` block ends the step too, after an error or if an optimizer skips its hooks.
    """

    def __init__(
        self,
        sharded: ShardedOptimizer,
        used: list[bool],
        *,
        clip: Tensor | None,
        shown: bool,
        submit: Callable[[list[Update]], None],
        stream: Stream | None = None,
    ) -> None:
        """Record the arguments, which `ShardedOptimizer.own_step` documents."""
        self.sharded = sharded
        self._used = used
        self._clip = clip
        self._shown = shown
        self._submit = submit
        self._stream = stream
        self._while_stepping = ExitStack()
        self._depth = 0
        """Calls of ``step`` that are running: torch runs the hooks for each class that overrides it."""

    def begin(self, used: list[bool] | None = None) -> None:
        """Let the groups hold the runs that the optimizer steps, and submit the fused updates.

        Args:
            used: the parameters to step, if the user's pre-hooks may have changed them.
        """
        self._depth += 1
        sharded, used = self.sharded, self._used if used is None else used
        if self._shown:
            sharded.take_edits(used)
        sharded.compose(used, shown=self._shown, fused=self._begin_fused, stream=self._stream)
        self._while_stepping.enter_context(sharded.showing_runs())

    def nests(self) -> bool:
        """Return whether a running ``step`` has called this one, as a subclass does, and if so only count the call."""
        if self._depth == 0:
            return False
        self._depth += 1
        return True

    def _begin_fused(self) -> None:
        updates = self.sharded.fused_updates(self._clip)
        if updates:
            self._submit(updates)

    def end(self) -> None:
        """Restore the groups, and send whole tensors back to their shards. Collective if there are any."""
        self._depth -= 1
        if self._depth > 0:
            return
        self._while_stepping.close()
        self.sharded.end_whole()

    def __enter__(self) -> OwnStep:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step."""
        self._while_stepping.__exit__(kind, error, trace)
        if kind is None:
            self.sharded.end_whole()
