"""The seam at which the steps of a run are run.

================  ================================================  ===================================================
loop              batches                                           a step
================  ================================================  ===================================================
`StepLoop`        every rank has its own                            forward, then Lightning runs backward
`JoinLoop`        ranks without a batch wait (``uneven="join"``)    the same, or one that does not count
`PipelineLoop`    ranks of a replica share theirs                   forwards and backwards of all micro-batches
`VirtualLoop`     several per rank, of virtual ranks                forward and backward of each, in rounds
================  ================================================  ===================================================

`StepLoop` is the plain one, and what the others change. Another one is a subclass and an entry in `LOOPS`
(`ls_strategy.lightning.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ls_strategy.lightning import guards
from ls_strategy.lightning.loop.call import StepCall
from ls_strategy.lightning.run_state import RunState
from ls_strategy.parallel import logits

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.engine import Engine
    from ls_strategy.lightning.checkpointing.resume import Resume
    from ls_strategy.lightning.planning import Planning
    from ls_strategy.lightning.uneven import UnevenData


@dataclass(frozen=True)
class LoopParts:
    """What a loop works with."""

    run: RunState

    planning: Planning
    """Explains why a step did not fit into memory."""

    uneven: UnevenData
    """Compares the ranks' data."""

    resume: Resume
    """Continues a run from a checkpoint."""


class StepLoop:
    """Runs the steps of one strategy: a batch of its own on every rank."""

    updates_early: ClassVar[bool] = True
    """Whether an update of offloaded states may begin while backward runs: then all gradients of a buffer are there."""

    def __init__(self, parts: LoopParts) -> None:
        self._run, self._planning = parts.run, parts.planning
        self._uneven, self._resume = parts.uneven, parts.resume

    @property
    def _module(self) -> pl.LightningModule:
        return self._run.require_module()

    # a run -----------------------------------------------------------------------------------------------------------

    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuse what cannot work with these steps, before anything is sharded."""

    def begin_run(self, trainer: pl.Trainer, *, together: bool) -> None:
        """Begin a fit or an evaluation. ``together``: ranks wait for each other in evaluations too."""

    def end_run(self) -> None:
        """End it."""

    # data ------------------------------------------------------------------------------------------------------------

    def loader(self, dataloader: Any, process: Callable[[Any], Any]) -> Any:
        """Return the loader of this rank. ``process`` is what Lightning's strategies make of one."""
        self._resume.data(dataloader)
        self._run.parallel.seed_workers(dataloader)
        return process(dataloader)

    def moving_batch(self) -> AbstractContextManager[Any]:
        """Wrap what moves a batch to the device."""
        return nullcontext()

    def fetcher(self, loop: Any, inner: Any) -> Any:
        """Return the data fetcher of a pass over batches that has begun. ``inner``: Lightning's."""
        return self._resume.reading.fetcher(loop, inner)

    def end_pass(self) -> None:
        """End the pass."""

    # steps -----------------------------------------------------------------------------------------------------------

    def train(self, call: StepCall) -> Any:
        """Run ``training_step``."""
        call.engine.begin_step(sync_buffers_after=call.synchronises)
        activations = self._run.activations
        with nullcontext() if activations.active is None else activations.around_forward(), self.around_step(call.args):
            output = call.step(*call.args, **call.kwargs)
        call.engine.end_forward()
        return self._full_outputs(output)

    def around_step(self, args: Sequence[Any]) -> AbstractContextManager[Any]:
        """Wrap the user's step on one batch."""
        del args
        return nullcontext()

    def evaluate(self, call: StepCall) -> Any:
        """Run a validation, test or prediction step."""
        call.engine.begin_step()
        with self.around_step(call.args) if call.together else nullcontext():
            return self._full_outputs(call.step(*call.args, **call.kwargs))

    def _full_outputs(self, output: Any) -> Any:
        """Return the output of a step with plain logits in place of sharded or deferred ones.

        Collective if any are sharded.
        """
        run = self._run
        shown = run.activations.defers_logits or run.parallel.replica_ranks > 1
        return logits.gather(output) if shown else output

    @contextmanager
    def around_backward(self, engine: Engine, *, synchronises: bool, accumulates: bool) -> Generator[bool, None, None]:
        """Surround the backward that Lightning runs after ``training_step``; yield whether it is still to run."""
        with self._between(engine, eager=synchronises, counts=True, accumulates=accumulates):
            yield True

    @contextmanager
    def _between(self, engine: Engine, *, eager: bool, counts: bool, accumulates: bool) -> Generator[None, None, None]:
        """Surround a backward by those of the engine, which see to it that an error in it has a cure."""
        engine.begin_backward(eager=eager, counts=counts)
        with guards.explain_released_parameters(), engine.comm.naming_failures():
            try:
                yield
            except Exception as error:
                self._planning.explain_memory(error)
                raise
        engine.end_backward(local=accumulates)

    # checkpoints -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs so that the run continues at the same batch."""
        return {}

    def load(self, trainer: pl.Trainer, saved: dict[str, Any]) -> None:
        """Continue where a checkpoint was saved, with what `state` has returned then.

        Raises:
            StateError: it cannot be continued on this number of ranks.
        """
        self._uneven.resume(trainer, saved)
