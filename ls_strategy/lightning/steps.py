"""Surround the user's steps (training, validation, test, prediction) and the backward pass with the strategy's work.

The one invariant: ranks that wait for each other in a step are at the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ls_strategy.distributed.lockstep import STOP, Lockstep
from ls_strategy.lightning import guards
from ls_strategy.lightning._private import around_batches, defer_signals, raise_sigterm
from ls_strategy.zero_stages import POLICIES

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.engine import Engine
    from ls_strategy.lightning.strategy import ZeROStrategy
    from ls_strategy.lightning.virtual_ranks import VirtualRanks


class Steps:
    """Runs the steps of a strategy's module."""

    def __init__(self, strategy: ZeROStrategy) -> None:
        self.accumulating = False
        """Whether the next backward leaves gradients to a later one (``accumulate_grad_batches``)."""
        self._strategy = strategy
        self._meets_in_evaluation = False

    @property
    def _lockstep(self) -> Lockstep:
        lockstep = self._strategy._lockstep
        assert lockstep is not None
        return lockstep

    @property
    def _module(self) -> pl.LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    def begin_run(self, trainer: pl.Trainer) -> None:
        """Compare the batches of all ranks, and handle signals on all ranks at the same batch. Collective."""
        strategy, lockstep, parallel = self._strategy, self._lockstep, self._strategy.parallel
        lockstep.reset(turns=strategy.uneven.joins)
        strategy._stops_alone = False
        if strategy.virtual is not None:
            strategy.virtual.begin_run(self._module, fitting=trainer.state.fn == "fit")
        if POLICIES[strategy.config.stage].parameters:
            # A gathered inference tensor could not take part in autograd later.
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                loop.inference_mode = False
        # Otherwise ranks may evaluate different numbers of batches, as under DDP.
        self._meets_in_evaluation = (
            POLICIES[strategy.config.stage].parameters
            or parallel.config.expert > 1
            or (parallel.shards and strategy.data_parallel_size == 1)
        )
        strategy.uneven.begin_run(trainer, evaluation=self._meets_in_evaluation)

        def end() -> None:
            strategy.uneven.end_pass()
            lockstep.end()

        fetcher = strategy.uneven.fetcher
        around_batches(trainer, lockstep.begin, end, evaluation=self._meets_in_evaluation, fetcher=fetcher)
        defer_signals(trainer, lockstep.ask, lockstep.agree)

    def train(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``training_step``, in a pipeline together with its backward."""
        strategy, module = self._strategy, self._module
        # DDP broadcasts rank 0's buffers before a forward if the step before it synchronised gradients.
        synchronises = self._synchronises(module)
        comm = strategy.require_engine().comm
        with self._lockstep.step(), comm.naming_failures(), strategy.engine_setup.explaining_memory():
            strategy.resume.restore_random_states()
            engine = strategy.engine_setup.follow_optimizers()
            if strategy.virtual is not None:
                return self._train_virtual(strategy.virtual, engine, step, args, synchronises=synchronises)
            engine.begin_step(sync_buffers_after=synchronises)
            pipeline = strategy.parallel.pipeline
            with strategy.activations.around_forward(), strategy.uneven.around_step(args):
                if pipeline is not None:
                    return pipeline.train(module, engine, step, args, last=not self.accumulating)
                output = step(*args, **kwargs)
            engine.end_forward()
            return self._full_outputs(output)

    def _train_virtual(
        self,
        virtual: VirtualRanks,
        engine: Engine,
        step: Callable[..., Any],
        args: Sequence[Any],
        *,
        synchronises: bool,
    ) -> Any:
        """Run ``training_step`` for every virtual rank of this process."""

        def forward(*args: Any) -> Any:
            with self._strategy.activations.around_forward():
                return self._full_outputs(step(*args))

        return virtual.train(engine, forward, args, synchronises=synchronises)

    def evaluate(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a validation, test or prediction step."""
        strategy, module, lockstep = self._strategy, self._module, self._lockstep
        engine = strategy.require_engine()
        self._stop_if_asked(module.trainer, lockstep)
        with lockstep.step() if self._meets_in_evaluation else nullcontext(), engine.comm.naming_failures():
            if strategy.virtual is not None and strategy.virtual.applies:
                return strategy.virtual.evaluate(engine, lambda *each: self._full_outputs(step(*each)), args)
            engine.begin_step()
            if strategy.parallel.pipeline is not None:
                return strategy.parallel.pipeline.evaluate(module, step, args)
            with strategy.uneven.around_step(args) if self._meets_in_evaluation else nullcontext():
                return self._full_outputs(step(*args, **kwargs))

    def _full_outputs(self, output: Any) -> Any:
        deferred = self._strategy.activations.defers_logits
        return self._strategy.parallel.full_outputs(output, deferred=deferred)

    def _stop_if_asked(self, trainer: pl.Trainer, lockstep: Lockstep) -> None:
        """End an evaluation after SIGTERM, on all ranks together if they wait for each other."""
        asked = lockstep.agree() if self._meets_in_evaluation else lockstep.asked
        if asked == STOP:
            self._strategy._stops_alone = not self._meets_in_evaluation
            raise_sigterm(trainer)
        lockstep.ask(asked)  # any other request waits for the next training batch

    def end_fit(self) -> None:
        """Wait for all ranks, and stop as before a batch if SIGTERM came to any of them since. Collective."""
        self._strategy.barrier("ZeROStrategy.on_train_end")  # rank 0 may still remove or link checkpoints
        if self._lockstep.asked_of_any() == STOP:
            raise_sigterm(self._module.trainer)

    @contextmanager
    def around_backward(self, module: pl.LightningModule) -> Generator[bool, None, None]:
        """Surround the backward that `Strategy.backward` runs between its hooks; yield whether it is still to run."""
        strategy, engine = self._strategy, self._strategy.require_engine()
        if strategy.parallel.pipeline is not None:  # it ran in training_step
            engine.keeps_gradients = False
            yield False
            return
        virtual, counts = strategy.virtual, not strategy.runs_filler
        with nullcontext((True, counts)) if virtual is None else virtual.around_backward(engine) as (is_last, counts):
            engine.begin_backward(eager=self._synchronises(module) and is_last, counts=counts)
            explained = strategy.engine_setup.explaining_memory()
            with guards.explain_released_parameters(), engine.comm.naming_failures(), explained:
                yield True
            engine.end_backward(local=self.accumulating)
        strategy.uneven.after_backward(engine, synchronizes=self._synchronises(module))

    def _synchronises(self, module: pl.LightningModule) -> bool:
        return module.automatic_optimization and not self.accumulating
