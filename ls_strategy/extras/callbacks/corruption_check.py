"""`CorruptionCheck`: find a rank that computes or stores wrong values, and repeat the step without them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy.checked import at_least, checked
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras._lightning import call_hook
from ls_strategy.extras.callbacks.corruption_digest import GradientWatch, StoredWeights, when_written
from ls_strategy.extras.callbacks.corruption_examine import Examination, Finding
from ls_strategy.extras.callbacks.corruption_repeat import RecordedStep
from ls_strategy.extras.callbacks.corruption_replay import Replay, StepsAgainError
from ls_strategy.extras.callbacks.during_fit import DuringFit, zero_strategy
from ls_strategy.extras.callbacks.rewind import HostCopies, refuse_own_states
from ls_strategy.extras.callbacks.spike_guard import SpikeGuard
from ls_strategy.host.pytorch import Callback, is_overridden, pl, rank_zero_warn
from ls_strategy.lightning._private import unwrap_optimizer
from ls_strategy.lightning.loop.call import StepCall
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.transient import Method

MOST_FAILURES = 2  # failures of one rank that end the run
_MOST_NAMES = 3  # buffers that a message names


class CorruptionCheck(DuringFit):
    """Runs every N-th step twice, and compares the bits before the optimizer uses them.

    ::

        after the step before    digests of the weights; copies of shards that no other rank has
        forward, backward        digests of the gradients that each rank sends, and of the averages that it gets
        before the step          all of it again from the same bits, with virtual ranks on another rank
            equal                the step runs
            something differs    a third run decides which rank was wrong; the step uses values that two runs agree on

    A rank that fails twice ends the run, on all ranks, with an error that names it and its host. With
    `ElasticTraining` and virtual ranks, the run goes on without its node.

    What is found, if it happens in a step that is checked: flipped bits and wrong results in forward and backward, in
    gradients, in their exchange and in averages, in weights, and in optimizer states that are in memory. With
    ``every=1`` such a run ends with the bits of an undisturbed one. So does one with ``every=N``, if what has happened
    in the steps between still shows at the next check, as in replicas of weights that differ, or in a rank that keeps
    computing wrong values. All ranks then go back to a copy in host memory from after the check before, and run the
    steps since again with the same batches, now checking each. The last step of an epoch, and of ``max_steps``, is
    checked, too.

    Batches must be the same when they are used again, and operations must repeat their bits. Those that do not are
    reported once, with the parameters in whose gradients they show, which are then left out.
    """

    @checked(every=at_least(1))
    def __init__(self, every: int = 100) -> None:
        """Set the option.

        Args:
            every: optimizer steps from one check to the next. A check costs a step's forward and backward. In host
                memory is a copy of the rank's optimizer states; with more than 1, of all that the rank trains, and the
                batches of so many steps.

        Raises:
            ConfigError: the value is out of its range.
        """
        self.every = every
        self.found = 0  # checks of this run that have found something
        self.failures: dict[int, int] = {}  # how often each rank was wrong
        # Called on all ranks when `failures` have grown. Returns whether the run goes on without ranks that were wrong
        # twice: then they do not end it. Set during a fit.
        self.on_failure: Callable[[], bool] | None = None
        self._ignored: set[int] = set()  # buffers whose gradients do not repeat
        self._engine: Engine | None = None  # the engine of `_ignored`
        self._step: RecordedStep | None = None
        self._watch: GradientWatch | None = None
        self._stored: StoredWeights | None = None
        self._stored_at = -1
        self._copies: HostCopies | None = None  # of optimizer states. Later ones take their memory.
        self._new: dict[int, Tensor] = {}  # digests of what this rank has written in the last step
        self._sending: Callable[[], None] | None = None  # ends the subscription to new weights
        self._buffers = 0
        self._early = False  # what the engine's ``early_step`` was
        self._edits = False  # whether user code may change gradients after a backward
        self._undo: Method | None = None
        self._replay: Replay | None = None  # runs the steps between two checks again
        self._passed = False  # whether the running step was checked, and is right
        self._counted = -1  # the step after which steps were counted last
        self._warned = False

    # fit -------------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be repeated, before anything is sharded; and come before other callbacks.

        Raises:
            PlanError: with the cure.
        """
        if stage != "fit":
            return
        _check(pl_module, zero_strategy(trainer, self))
        if self.every > 1:
            _refuse_two_copies(trainer, self.every)
        trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take part in the fit loop. Collective."""
        strategy = zero_strategy(trainer, self)
        self.release()
        self.found = 0
        self.failures.clear()
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        own = __name__.partition(".")[0]
        self._edits = is_overridden("on_after_backward", pl_module, parent=pl.LightningModule) or any(
            is_overridden("on_after_backward", c, parent=Callback) and not type(c).__module__.startswith(own)
            for c in callbacks
        )
        self._undo = Method(strategy.loop, "train", lambda method, call: self._before_step(trainer, method, call))
        if self.every > 1 and self._can_replay(strategy):
            self._replay = Replay(trainer, strategy, self, lambda: self._begin_again(trainer))
        self._passed, self._counted = False, trainer.global_step
        self._store(trainer)

    def _can_replay(self, strategy: ZeROStrategy) -> bool:
        """Return whether the steps between two checks can run again; if not, say so."""
        given, why = f"CorruptionCheck(every={self.every})", ""
        try:
            refuse_own_states(given, strategy)
        except PlanError as error:
            why = str(error)
        if strategy.islands[1] > 1:
            why = f"Got {given} with DiLoCo, whose outer states could not go back."
        if why:
            rank_zero_warn(f"{why} Steps between two checks do not run again if a check finds something.")
        return not why

    @override
    def release(self) -> None:
        self._end_step()
        if self._undo is not None:
            self._undo.remove()
        self._end_sending()
        self._undo = self.on_failure = None
        if self._replay is not None:
            self._replay.end()
            self._replay = None
        self._drop_stored()
        self._copies = None

    @override
    def verdict(self, trainer: pl.Trainer) -> str:
        whose = ", ".join(f"{count} times rank {rank}" for rank, count in sorted(self.failures.items()))
        return f"{self.found} checks have found wrong values ({whose or 'no rank is known'})" if self.found else ""

    def _end_sending(self) -> None:
        if self._sending is not None:
            self._sending()
            self._sending = None

    def _end_step(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch.engine.early_step = self._early
        self._watch = self._step = None

    def _drop_stored(self) -> None:
        if self._stored is not None:
            self._stored.end()
        self._stored, self._stored_at, self._new = None, -1, {}

    # a step ----------------------------------------------------------------------------------------------------------

    def _due(self, trainer: pl.Trainer, *, running: bool) -> bool:
        """Return whether the running step is checked, or that after this one."""
        step = trainer.global_step + 1
        if step % self.every == 0 or step == trainer.max_steps:
            return True
        if self._replay is None:
            return False
        if self._replay.runs_again if running else self._replay.follows_again:
            return True
        batches, per_step = trainer.fit_loop.epoch_loop.batch_progress, trainer.accumulate_grad_batches
        begun = (batches.current.ready - running) // per_step * per_step
        # A loader without a length says that a batch is the last one when it is fetched.
        ends = running and per_step == 1 and batches.is_last_batch
        return ends or begun + per_step >= trainer.num_training_batches > begun

    def _store(self, trainer: pl.Trainer) -> None:
        """Take the weights after a step if the next one is checked. Collective."""
        if self._due(trainer, running=False) and self._stored_at != trainer.global_step:
            new, before, engine = self._new, self._copies, zero_strategy(trainer, self).require_engine()
            self._drop_stored()
            # With a replay, its copy has the states, too.
            earlier = () if before is None else before.tensors
            self._copies = None if self._replay is not None else HostCopies(engine.device, earlier)
            self._stored = StoredWeights(engine, new, self._copies)
            self._stored_at = trainer.global_step
        self._new = {}

    def _begin_again(self, trainer: pl.Trainer) -> None:
        """Begin with the first step that runs again. Collective."""
        self._drop_stored()
        self._passed, self._counted = False, trainer.global_step
        self._store(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let the batch run again from the random states of now."""
        if self._replay is not None:
            self._replay.note_start()

    def _before_step(self, trainer: pl.Trainer, method: Method, call: StepCall) -> Any:
        """Record a micro-batch of a step that is checked, and run it."""
        if self._step is not None or self._due(trainer, running=True):
            if self._step is None:
                self._early, call.engine.early_step = call.engine.early_step, False
                self._watch = GradientWatch(call.engine)
                strategy, module = zero_strategy(trainer, self), trainer.lightning_module
                self._step = RecordedStep(strategy, module, call.engine, method.original, self._stored)
            self._step.add(call)
        output = method.original(call)
        if self._step is not None:
            self._step.note_forward()
        return output

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take digests of what the backward has left, before other hooks may change it."""
        if self._step is not None and self._watch is not None:
            self._buffers = self._step.buffers()
            self._watch.note_held()
            self._step.note_backward()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Run the step again, and compare. Collective.

        Raises:
            StateError: a rank was wrong for the second time, or nothing says what is right.
        """
        step = self._step
        engine = zero_strategy(trainer, self).require_engine()
        index = engine.stepper.index_of(unwrap_optimizer(optimizer))
        if step is not None and self._watch is not None and index is not None and any(engine.optimizers[index].used):
            try:
                self._check(trainer, step, self._watch, index)
            finally:
                self._end_step()
            self._drop_stored()
        self._end_step()
        if (trainer.global_step + 2) % self.every == 0:
            self._sending = engine.events.before_publish.subscribe(partial(self._note_written, engine))

    def _note_written(self, engine: Engine) -> None:
        """Take digests of new weights before they are sent."""
        self._new = when_written(engine)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the weights after the step. Collective if the next one is checked."""
        self._end_sending()
        if self._replay is not None:
            if self._passed:
                self._replay.note_check()
            elif trainer.global_step != self._counted:
                self._replay.note_unchecked()
        self._passed, self._counted = False, trainer.global_step
        if self._step is None:
            self._store(trainer)

    # what was found --------------------------------------------------------------------------------------------------

    def _check(self, trainer: pl.Trainer, step: RecordedStep, watch: GradientWatch, index: int) -> None:
        if self._engine is not step.engine:
            self._engine = step.engine
            self._ignored.clear()
        guards = [c for c in trainer.callbacks if isinstance(c, SpikeGuard)]  # type: ignore[attr-defined]
        is_of_now = self._stored is not None and self._stored.engine is step.engine
        stored = self._stored if is_of_now and self._stored_at == trainer.global_step else None
        if step.has_written_weights(stored):
            self._warn_of_writes(trainer)
            return
        again = partial(call_hook, trainer, "on_after_backward") if self._edits else watch.note_held
        examination = Examination(step, watch, stored, index, self._ignored, after_backward=again)
        finding = examination.run(self._buffers, before_each=lambda: [guard.forget_losses() for guard in guards])
        if finding:
            self._report(trainer, step.engine, finding)
        self._passed = True

    def _warn_of_writes(self, trainer: pl.Trainer) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"CorruptionCheck: weights were written to between the first forward and the optimizer of step "
                f"{trainer.global_step}, so the step would not repeat. Such steps are not checked. Write to weights in "
                "on_train_batch_end, after the last batch of a step."
            )

    def _report(self, trainer: pl.Trainer, engine: Engine, finding: Finding) -> None:
        """Log what was found, and count it. Collective.

        Raises:
            StateError: with the rank.
            StepsAgainError: the steps since the last check run again.
        """
        names = [*(f"the buffer of {flat.name}" for flat in engine.flats), "the module's buffers"]
        names += [f"the states of {type(each.sharded.optimizer).__name__}" for each in engine.optimizers]
        step = trainer.global_step
        if finding.not_repeatable:
            _warn_of_repetition(step, _listed(finding.not_repeatable, names))
        self._count(trainer, finding)
        if not finding.culprits and not finding.unknown:
            return
        whose = {rank: f"rank {rank} on {host}" for rank, host in enumerate(finding.hosts)}
        texts = [
            f"{whose[rank]} had wrong {what} in {_listed(buffers, names)}"
            for what, found in (("values", finding.weights), ("gradients", finding.gradients))
            for rank, buffers in sorted(found.items())
        ]
        goes_back = self._replay is not None and self._replay.can_go_back()
        if finding.unknown:
            who = " or ".join(whose[rank] for rank in sorted(finding.unknown))
            unknown = f"{who} has wrong values in {_listed(finding.unknown_buffers, names)}"
            if not goes_back:
                raise StateError(
                    f"CorruptionCheck: before step {step}, {unknown}, and no good copy is known. Start the run "
                    "again without it, from a checkpoint of before the last check that found nothing."
                )
            if not finding.unknown.issubset(finding.culprits):
                texts.append(unknown)
        leaves = self.on_failure is not None and self.on_failure()
        again = [rank for rank in finding.culprits if self.failures[rank] >= MOST_FAILURES]
        if again and not leaves:
            raise StateError(
                f"CorruptionCheck: before step {step}, {'; '.join(texts)}. {whose[again[0]]} was wrong for the second "
                "time in this run, so its device or host is likely to be damaged. Start the run again without it, from "
                "its last checkpoint."
            )
        if goes_back:
            assert self._replay is not None
            rank_zero_warn(
                f"CorruptionCheck: before step {step}, {'; '.join(texts)}. All ranks go back to step "
                f"{self._replay.step}, after the last check that found nothing, and run the steps since again with the "
                "same batches."
            )
            raise StepsAgainError
        rank_zero_warn(
            f"CorruptionCheck: before step {step}, {'; '.join(texts)}. The step uses right values on all ranks."
        )

    def _count(self, trainer: pl.Trainer, finding: Finding) -> None:
        """Count the ranks that were wrong, for the loggers, too."""
        for rank in finding.culprits:
            self.failures[rank] = self.failures.get(rank, 0) + 1
        if finding.culprits or finding.unknown:
            self.found += 1
            metrics = {"zero_corruption/found": float(self.found)}
            metrics |= {f"zero_corruption/rank_{rank}": float(count) for rank, count in self.failures.items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)


def _warn_of_repetition(step: int, buffers: str) -> None:
    rank_zero_warn(
        f"CorruptionCheck: forward and backward do not repeat their bits before step {step}, on several ranks at once "
        f"or in three runs of one rank, for gradients in {buffers}. These are left out of later checks. "
        "An operation in or behind them adds in another order each time: torch.use_deterministic_algorithms(True, "
        "warn_only=True) names it. Or training_step uses an iterator, or an object of user code that counts: then this "
        "step's values are others than without CorruptionCheck, so leave it out."
    )


def _listed(buffers: set[int], names: list[str]) -> str:
    first = [names[i] for i in sorted(buffers)][:_MOST_NAMES]
    return ", ".join(first) + (f" and {len(buffers) - len(first)} more" if len(buffers) > len(first) else "")


def _check(module: pl.LightningModule, strategy: ZeROStrategy) -> None:
    """Refuse what cannot be repeated."""
    if not module.automatic_optimization:
        raise PlanError(
            "Got CorruptionCheck with automatic_optimization=False, but then nothing says which batches a step belongs "
            "to, and training_step would step twice. Set automatic_optimization=True, or leave CorruptionCheck out."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise PlanError(
            "Got CorruptionCheck with training_step(dataloader_iter), which takes its batches itself, so they cannot "
            "be used again. Take the batch as an argument, or leave CorruptionCheck out."
        )
    if strategy.uneven.joins:
        raise PlanError(
            "Got CorruptionCheck with uneven='join', whose finished ranks repeat batches that do not count. Leave one "
            "of the two out."
        )
    if strategy.config.offload.delay_after is not None:
        raise PlanError(
            f"Got CorruptionCheck with offload.delay_after={strategy.config.offload.delay_after}, but a late update "
            "would change the weights between the two runs. Leave one of the two out."
        )
    kinds = [kind for kind in ("tensor", "pipeline", "context", "expert") if _size(strategy, kind) > 1]
    if kinds:
        raise PlanError(
            f"Got CorruptionCheck with parallel.{kinds[0]}={_size(strategy, kinds[0])}, but it compares ranks that "
            "hold the full model. Leave one of the two out."
        )


def _refuse_two_copies(trainer: pl.Trainer, every: int) -> None:
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, SpikeGuard) and each.rewind_steps is not None:
            raise PlanError(
                f"Got CorruptionCheck(every={every}) with SpikeGuard(rewind_steps={each.rewind_steps}), but each of "
                "them goes back to copies of its own. Set every=1, or leave rewind_steps out."
            )


def _size(strategy: ZeROStrategy, kind: str) -> int:
    given: Any = getattr(strategy.config.parallel, kind)
    return getattr(given, "size", given)
