"""Surround the user's steps (training, validation, test, prediction) and the backward pass with the strategy's work.

The one invariant: ranks that wait for each other in a step are at the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ls_strategy.distributed.lockstep import STOP, Lockstep
from ls_strategy.lightning._private import around_batches, defer_signals, raise_sigterm
from ls_strategy.lightning.loop.call import StepCall
from ls_strategy.zero_stages import POLICIES

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.engine import Engine
    from ls_strategy.lightning.engine_setup import EngineSetup
    from ls_strategy.lightning.loop.plain import LoopParts, StepLoop


class Steps:
    """Runs the steps of a strategy's module."""

    def __init__(self, parts: LoopParts, loop: StepLoop, engine_setup: EngineSetup) -> None:
        """Run nothing yet. ``engine_setup`` follows changes of the optimizers before a step."""
        self.accumulating = False
        """Whether the next backward leaves gradients to a later one (``accumulate_grad_batches``)."""
        self.stops_alone = False
        """Whether a signal ended an evaluation on this rank only."""
        self._run, self._parts = parts.run, parts
        self._loop, self._engine_setup = loop, engine_setup
        self._meets_in_evaluation = False

    @property
    def _lockstep(self) -> Lockstep:
        lockstep = self._run.lockstep
        assert lockstep is not None
        return lockstep

    @property
    def _engine(self) -> Engine:
        return self._run.engine or self._run.require_engine()

    @property
    def _module(self) -> pl.LightningModule:
        return self._run.module or self._run.require_module()

    def begin_run(self, trainer: pl.Trainer) -> None:
        """Compare the batches of all ranks, and handle signals on all ranks at the same batch. Collective."""
        run, lockstep, parallel = self._run, self._lockstep, self._run.parallel
        lockstep.reset(turns=self._parts.uneven.joins)
        self.stops_alone = False
        if POLICIES[run.config.stage].parameters:
            # A gathered inference tensor could not take part in autograd later.
            for each in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                each.inference_mode = False
        # Otherwise ranks may evaluate different numbers of batches, as under DDP.
        self._meets_in_evaluation = (
            POLICIES[run.config.stage].parameters
            or parallel.config.expert > 1
            or (parallel.shards and run.data_parallel_size == 1)
        )
        loop = self._loop
        loop.begin_run(trainer, together=self._meets_in_evaluation)

        def end() -> None:
            loop.end_pass()
            lockstep.end()

        around_batches(trainer, lockstep.begin, end, evaluation=self._meets_in_evaluation, fetcher=loop.fetcher)
        defer_signals(trainer, lockstep.ask, lockstep.agree)

    def train(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``training_step``, in a pipeline together with its backward."""
        # DDP broadcasts rank 0's buffers before a forward if the step before it synchronised gradients.
        synchronises = self._synchronises(self._module)
        comm = self._engine.comm
        with self._lockstep.step(), comm.naming_failures():
            try:
                self._parts.resume.restore_random_states()
                engine = self._engine_setup.follow_optimizers()
                accumulates = self.accumulating
                call = StepCall(engine, step, args, kwargs, synchronises=synchronises, accumulates=accumulates)
                return self._loop.train(call)
            except Exception as error:
                self._parts.planning.explain_memory(error)
                raise

    def evaluate(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a validation, test or prediction step."""
        engine, lockstep, together = self._engine, self._lockstep, self._meets_in_evaluation
        asked = lockstep.agree() if together else lockstep.asked
        if asked == STOP:  # after SIGTERM, on all ranks together if they wait for each other
            self.stops_alone = not together
            raise_sigterm(self._module.trainer)
        lockstep.ask(asked)  # any other request waits for the next training batch
        with lockstep.step() if together else nullcontext(), engine.comm.naming_failures():
            return self._loop.evaluate(StepCall(engine, step, args, kwargs, together=together))

    def end_fit(self) -> None:
        """Stop as before a batch if SIGTERM came to any rank since. Collective."""
        if self._lockstep.asked_of_any() == STOP:
            raise_sigterm(self._module.trainer)

    def around_backward(self, module: pl.LightningModule) -> AbstractContextManager[bool]:
        """Surround the backward that `Strategy.backward` runs between its hooks; yield whether it is still to run."""
        options = {"synchronises": self._synchronises(module), "accumulates": self.accumulating}
        return self._loop.around_backward(self._engine, **options)

    def _synchronises(self, module: pl.LightningModule) -> bool:
        return module.automatic_optimization and not self.accumulating
