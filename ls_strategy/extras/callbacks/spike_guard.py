"""`SpikeGuard`: a step whose loss or gradient norm is far above those before it is left out, on all ranks.

With ``rewind_steps``, so are the steps before it, back to the last copy.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy.checked import above, at_least, checked
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras._lightning import accumulates, around_left_out_steps, before_batches, uncount_for_loggers
from ls_strategy.extras.callbacks.before_step import BeforeStep
from ls_strategy.extras.callbacks.during_fit import DuringFit, zero_strategy
from ls_strategy.extras.callbacks.rewind import Copy, refuse_own_states, refuse_rewind, report_copy
from ls_strategy.host.pytorch import pl, rank_zero_warn
from ls_strategy.lightning._private import unwrap_optimizer
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.transient import Method

_SIGMA = 1.4826  # the standard deviation of a normal distribution in units of its median absolute deviation
_LEAST_DEVIATION = 0.01
"""The least deviation as a share of the level, so that a window of nearly equal values does not refuse the next one."""

_LEVEL = 0.95
"""Share of the window that lies below the level. The median would refuse a rare kind of batch with a higher loss."""

_MOST_LOG = 690.0  # of a limit that fits into fp64


class SpikeWindow:
    """The latest values of a number. The one invariant: a value that was refused is not in it."""

    def __init__(self, length: int, deviations: float) -> None:
        """``length``: of the window; ``deviations``: how many the limit lies above the level."""
        self._length, self._deviations = length, deviations
        self._values: deque[float] = deque(maxlen=length)

    def limit(self) -> float:
        """Return the limit of the next value; infinite until the window is half full."""
        if 2 * len(self._values) < self._length:
            return math.inf
        return limit_of(self._values, self._deviations)

    def refuses(self, value: float) -> bool:
        """Return whether a value is above the limit or not finite."""
        return not math.isfinite(value) or value > self.limit()

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append(value)

    def state(self) -> list[float]:
        """Return the values."""
        return list(self._values)

    def restore(self, values: Iterable[float]) -> None:
        """Continue with the result of `state`, also that of a longer window."""
        self._values.clear()
        self._values.extend(values)


def limit_of(values: Iterable[float], deviations: float) -> float:
    """Return the limit: the level of the values and so many robust deviations above it.

    The level is the 95th percentile, the deviation 1.4826 times the median absolute deviation. Of positive values it is
    also computed from their logarithms, as gradient norms are skewed, and the larger limit counts.
    """
    found = sorted(values)
    limit = _above(found, deviations, least=_LEAST_DEVIATION)
    if found[0] > 0:
        skewed = _above([math.log(value) for value in found], deviations)
        limit = max(limit, math.exp(skewed) if skewed < _MOST_LOG else math.inf)
    return limit


def _above(found: Sequence[float], deviations: float, least: float = 0.0) -> float:
    """Return the limit of sorted values, whose deviation is at least a share ``least`` of their level."""
    center, level = median(found), found[math.ceil(_LEVEL * len(found)) - 1]
    deviation = _SIGMA * median(abs(value - center) for value in found)
    if not deviation:  # more than half of them are equal, which says nothing about the others
        deviation = found[-1] - center
    deviation = max(deviation, least * abs(level))
    return level + deviations * deviation if deviation or not least else math.inf


_BEGINNING: Mapping[str, Any] = {
    "windows": {}, "skipped": 0, "undone": 0, "in_row": 0, "returned_to": -1, "epoch": (-1, 0), "owed": False
}  # fmt: skip
"""The state of a run that has not begun."""


class SpikeGuard(DuringFit):
    """Leaves out an optimizer step if its loss or gradient norm is not finite, or far above those before it.

    ::

        training_step            the loss of every micro-batch is noted
        backward                 as ever
        before the step          all ranks agree on the mean loss; the gradient norm is global already
            inside the window    the step runs, and both numbers join the window
            above it             no rank steps, and all goes on as if the data did not have these batches

    A number is above its window if it exceeds the 95th percentile of the last ``window`` accepted ones by
    ``deviations`` robust standard deviations (1.4826 times the median absolute deviation). Until the window is half
    full, only numbers that are not finite are.

    A step that is left out leaves no trace in parameters, optimizer states, step counts, loss scale, buffers and random
    numbers. It does not count in ``trainer.global_step``, ``max_steps`` and schedulers with ``interval="step"``, so the
    run ends with the bits of a run whose data never had its batches. It does count where Lightning counts batches:
    epochs, ``val_check_interval``, the progress bar. What ``training_step`` has logged stays. With accumulation, one
    bad micro-batch leaves out all of its step.

    With fp16, gradients that overflow although the loss is inside its window are left to the loss scale. A step that is
    left out does not change it.

    With ``rewind_steps=k``, training goes back instead, to a copy in host memory that is taken every k steps and at the
    begin of an epoch. All batches since are left out in the same sense: weights, optimizer states, loss scale,
    schedulers, ``trainer.global_step`` and states of callbacks are those of the copy, and training goes on with the
    next batch. Checkpoints that were saved since are kept, and the log names them. A run that resumes has no copy of
    before its checkpoint.

    Every such step is a line in the log, and values under ``zero_spikes/`` in the loggers. The window is part of
    checkpoints, so a run that resumes decides as one that was not interrupted.
    """

    @checked(window=at_least(8), deviations=above(0), max_skips=at_least(1), rewind_steps=at_least(1))
    def __init__(
        self, window: int = 128, deviations: float = 6.0, max_skips: int = 10, rewind_steps: int | None = None
    ) -> None:
        """Set the options; none is required.

        Args:
            window: accepted steps that the next one is compared with.
            deviations: robust standard deviations from the level of the window to its limit.
            max_skips: the most steps in a row that are left out, or returns to the same copy. One more is an error.
            rewind_steps: go back to a copy that is taken every so many steps, and leave out all batches since. None:
                leave out the batches of the spike alone.

        Raises:
            ConfigError: a value is out of its range.
        """
        self.max_skips = max_skips
        self.rewind_steps = rewind_steps
        self.skipped = 0  # steps that the run has left out because of their own loss or gradients
        self.undone = 0  # steps before these that the run has gone back over
        self._copy: Copy | None = None
        # Of the copy: the windows, the batches of the epoch, and how many of these were left out.
        self._at_copy: tuple[dict[str, list[float]], int, int] = {}, 0, 0
        self._returned_to = -1  # the step to which training has gone back last, if no copy was taken since
        self._reported_bytes = 0
        self._windows = {name: SpikeWindow(window, deviations) for name in ("loss", "grad_norm")}
        self._in_row = 0
        self._left_out = False  # whether the step of the current batch is left out
        self._owed = False  # whether the loop is still to count that batch for the loggers, or has when the run resumes
        self._batches = 0  # batches since the last step
        self._epoch = (-1, 0)  # an epoch, and how many of its batches were left out
        # Losses since the last step, by the number of the rank or of the virtual rank.
        self._noted: dict[int, list[Tensor]] = {}
        self._before: BeforeStep | None = None
        # Whether random states are restored between the next fetch and its batch, because the run resumes.
        self._takes_again = False
        self._undo: list[Callable[[], None]] = []
        self._loaded = False  # whether the next fit continues from a checkpoint

    # fit -------------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot be guarded, before anything is sharded.

        Raises:
            PlanError: with the cure.
        """
        if stage == "fit":
            _check(pl_module, zero_strategy(trainer, self))
            if self.rewind_steps is not None:
                refuse_rewind(self._given, zero_strategy(trainer, self))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = zero_strategy(trainer, self)
        self.release()
        if trainer.global_step == 0 and not self._loaded:  # the first fit, or that of another model
            self._restore(_BEGINNING)
        if self.rewind_steps is not None:
            refuse_own_states(self._given, strategy)
        self._left_out, self._loaded, self._batches = False, False, 0
        self._noted.clear()
        self._before = BeforeStep(strategy, pl_module)
        self._takes_again = strategy.virtual is not None
        self._undo = [
            before_batches(trainer, lambda: self._before_batch(trainer)),
            around_left_out_steps(
                trainer,
                lambda: self._left_out,
                lambda: self._left_out_of(trainer.current_epoch),
                lambda last: self._done(trainer, last),
            ),
        ]
        if strategy.config.parallel.pp.size == 1:
            method = Method(pl_module, "training_step", lambda step, *args, **kwargs: self._step(step, args, kwargs))
            self._undo.append(method.remove)

    @override
    def release(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._before = self._copy = None

    @override
    def verdict(self, trainer: pl.Trainer) -> str:
        if not self.skipped:
            return ""
        back = f", and gone back over {self.undone} more" if self.undone else ""
        return f"the run has left out {self.skipped} steps{back}; {trainer.global_step} have run"

    @property
    def _given(self) -> str:
        return f"SpikeGuard(rewind_steps={self.rewind_steps})"

    # batches ---------------------------------------------------------------------------------------------------------

    def _before_batch(self, trainer: pl.Trainer) -> None:
        """Take the states before a step, before its first batch is fetched."""
        if self._owed:  # the checkpoint that the run has resumed from was saved in the middle of such a batch
            self._owed = False
            uncount_for_loggers(trainer)
        if accumulates(trainer):
            return
        assert self._before is not None
        self._takes_again = self._takes_again or zero_strategy(trainer, self).resume.pending
        self._before.take()
        if self.rewind_steps is not None:
            self._take_copy(trainer, self.rewind_steps)

    def _take_copy(self, trainer: pl.Trainer, every: int) -> None:
        """Take a copy if one is due. Collective then.

        Training does not go back over the end of an epoch, after which hooks and schedulers have run.
        """
        step, taken = trainer.global_step, self._copy
        usable = taken is not None and taken.fits and taken.epoch == trainer.current_epoch
        if usable and (step == taken.step or step % every):  # type: ignore[union-attr]
            return
        self._copy = Copy(trainer, zero_strategy(trainer, self), self, batches=False, earlier=taken)
        if step != self._returned_to and self._returned_to >= 0:
            self._returned_to, self._in_row = -1, 0
        windows = {name: window.state() for name, window in self._windows.items()}
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        self._at_copy = windows, ready, self._left_out_of(trainer.current_epoch)
        self._reported_bytes = report_copy("SpikeGuard", self._copy, self._reported_bytes)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._takes_again and self._before is not None:
            self._takes_again = False
            self._before.take()
            if self._copy is not None and self._copy.step == trainer.global_step:
                self._copy.before.take()

    def _step(self, step: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = step.original(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        trainer: pl.Trainer = step.owner.trainer
        if isinstance(loss, Tensor) and trainer.training:  # ``validation_step`` may call it, too
            strategy = zero_strategy(trainer, self)
            virtual = strategy.virtual
            self._note(strategy.global_rank if virtual is None else virtual.random.current, loss)
        return output

    def forget_losses(self) -> None:
        """Forget the losses since the last step: its batches are about to run again."""
        self._noted.clear()

    def _note(self, rank: int | None, loss: Tensor) -> None:
        if rank is not None and rank >= 0:
            self._noted.setdefault(rank, []).append(loss.detach())

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Let no update begin in the backward that follows, as its step may be left out."""
        strategy = zero_strategy(trainer, self)
        engine = strategy.require_engine()
        engine.early_step = False
        if strategy.config.parallel.pp.size > 1:  # ``training_step`` has run for micro-batches, on the last stage
            scale = 1.0 if engine.scaler is None else engine.scaler.scale
            self._note(strategy.global_rank, loss * trainer.accumulate_grad_batches / scale)

    # decision --------------------------------------------------------------------------------------------------------

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Decide whether the step runs, in the same way on all ranks. Collective.

        Raises:
            StateError: too many steps in a row are left out.
        """
        strategy = zero_strategy(trainer, self)
        stepper = strategy.require_engine().stepper
        index = stepper.index_of(unwrap_optimizer(optimizer))
        if index is None:  # without optimizers, Lightning has a placeholder
            return
        losses = self._agree(strategy)
        found = {"loss": sum(losses.values()) / len(losses)} if losses else {}
        overflow = stepper.optimizers[index].overflow
        with contextlib.suppress(StateError):  # there are no gradients, on any rank
            found |= {} if overflow else {"grad_norm": stepper.grad_norm(index).item()}
        batches, self._batches = self._batches, 0
        if any(self._windows[name].refuses(value) for name, value in found.items()):
            self._refuse(trainer, found, losses)
            stepper.leave_out(index)
            epoch = trainer.current_epoch
            self._epoch = (epoch, self._left_out_of(epoch) + batches)
            self._left_out = True
        elif not overflow:
            self._in_row = self._in_row if self._returned_to >= 0 else 0
            for name, value in found.items():
                self._windows[name].add(value)

    def _agree(self, strategy: ZeROStrategy) -> dict[int, float]:
        """Return the loss of every rank, or virtual rank, that has one: the mean over its micro-batches. Collective."""
        virtual = strategy.virtual
        table = torch.zeros(strategy.world_size if virtual is None else virtual.count, 2, dtype=torch.float64)
        noted, self._noted = self._noted, {}
        if virtual is None or strategy.parallel.first_rank == strategy.global_rank:
            for rank, losses in noted.items():
                table[rank] = torch.stack(
                    [torch.stack(losses).double().mean().cpu(), torch.ones((), dtype=torch.float64)]
                )
        # Every number is that of one rank, and zeros: the sum is exact, and the same in any order.
        strategy.require_engine().mesh.world.agree(table, dist.ReduceOp.SUM)
        return {rank: loss for rank, (loss, has_one) in enumerate(table.tolist()) if has_one}

    def _refuse(self, trainer: pl.Trainer, found: dict[str, float], losses: dict[int, float]) -> None:
        """Count and report a step that is left out, unless it is one too many."""
        self._in_row += 1
        text = " and ".join(
            f"{name} {value:.4g} (limit {self._windows[name].limit():.4g})" for name, value in found.items()
        )
        if len(losses) > 1:
            worst = max(losses, key=lambda rank: math.inf if math.isnan(losses[rank]) else losses[rank])
            kind = "rank" if zero_strategy(trainer, self).virtual is None else "virtual rank"
            text += f"; the largest loss is {losses[worst]:.4g} on {kind} {worst}"
        step, back = trainer.global_step, self._goes_back_to
        what = "leave out one more step in a row" if back is None else f"go back to step {back} once more"
        if self._in_row > self.max_skips:
            raise StateError(
                f"Got max_skips={self.max_skips}, but SpikeGuard would {what}, before step {step}: {text}. If the "
                "weights are damaged, resume from an earlier checkpoint with a lower learning rate. If the data has "
                "changed and these values are right, set SpikeGuard(deviations=...) higher."
            )
        self.skipped += 1
        self.undone += 0 if back is None else step - back
        does = (
            "leave out a step" if back in (None, step) else f"go back to step {back}, and leave out the batches since,"
        )
        rank_zero_warn(
            f"SpikeGuard: all ranks {does} after step {step}: {text}. The run has left out {self.skipped}"
            + (f", and gone back over {self.undone} more." if self.undone else ".")
        )
        numbers = {**found, "skipped_steps": float(self.skipped)}
        if self.rewind_steps is not None:
            numbers["undone_steps"] = float(self.undone)
        values = {f"zero_spikes/{name}": number for name, number in numbers.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

    @property
    def _goes_back_to(self) -> int | None:
        """Return the step to which a spike sends training back now; None: only its own step is left out."""
        return self._copy.step if self._copy is not None and self._copy.fits else None

    def _left_out_of(self, epoch: int) -> int:
        """Return how many batches of an epoch were left out."""
        return self._epoch[1] if self._epoch[0] == epoch else 0

    def _done(self, trainer: pl.Trainer, last: bool) -> None:
        """Put the states before the step back, or those of the copy; forget the step when its batch is over."""
        if last:
            self._left_out = self._owed = False
            return
        self._owed = True
        if self._goes_back_to is not None:
            self._go_back(trainer)
        elif self._before is not None:
            self._before.put_back()

    def _go_back(self, trainer: pl.Trainer) -> None:
        """Go back to the copy. Collective."""
        assert self._copy is not None
        saved = self._copy.put_back()
        windows, ready, left_out = self._at_copy
        for name, values in windows.items():
            self._windows[name].restore(values)
        since = trainer.fit_loop.epoch_loop.batch_progress.current.ready - ready
        self._epoch = (trainer.current_epoch, left_out + since)
        self._returned_to = self._copy.step
        if saved:
            rank_zero_warn(
                f"SpikeGuard: checkpoints of steps that were undone are kept: {', '.join(saved)}. Resume from others."
            )

    # checkpoints -----------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "windows": {name: window.state() for name, window in self._windows.items()},
            "skipped": self.skipped,
            "undone": self.undone,
            "returned_to": self._returned_to,
            "in_row": self._in_row,
            "epoch": list(self._epoch),
            "owed": self._owed,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = True
        self._restore(state_dict)

    def copy_for_rewind(self, trainer: pl.Trainer) -> Callable[[bool], None]:
        """Return a function that puts back the windows and counts of now, if another callback has gone back."""
        state = copy.deepcopy(self.state_dict())

        def put_back(_: bool) -> None:
            self._restore(state)
            self._left_out, self._batches = False, 0
            self._noted.clear()

        return put_back

    def _restore(self, state: Mapping[str, Any]) -> None:
        state = {**_BEGINNING, **state}  # of an earlier version
        for name, window in self._windows.items():
            window.restore(state["windows"].get(name, ()))
        self.skipped, self._in_row, self._owed = state["skipped"], state["in_row"], state["owed"]
        self.undone, self._returned_to = state["undone"], state["returned_to"]
        epoch, batches = state["epoch"]
        self._epoch = (epoch, batches)


def _check(module: pl.LightningModule, strategy: ZeROStrategy) -> None:
    if not module.automatic_optimization:
        raise PlanError(
            "Got SpikeGuard with automatic_optimization=False, but then nothing says which batches a step belongs to, "
            "nor which optimizers step together. Set automatic_optimization=True, or leave SpikeGuard out and skip "
            "bad steps in training_step: all ranks have to, so compare a loss that is averaged over them."
        )
    if strategy.uneven.joins:
        raise PlanError(
            "Got SpikeGuard with uneven='join', whose finished ranks repeat batches that do not count. Leave one of "
            "the two out."
        )
    if strategy.islands[1] > 1:
        raise PlanError(
            "Got SpikeGuard with DiLoCo, but islands that leave out other steps would exchange at other times. Leave "
            "one of the two out."
        )
