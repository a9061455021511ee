"""`PreemptionHandler`: saves and ends a run when the cluster takes its machine back, and resumes it afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from torch import Tensor
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy.checked import at_least, checked
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.distributed.launch import slurm_job
from ls_strategy.errors import CheckpointError, ConfigError
from ls_strategy.extras._lightning import (
    Unnamed,
    checkpoint_folder,
    choose_checkpoint,
    give_signals_back,
    overwrite_saved_config,
    take_signals_over,
)
from ls_strategy.extras.callbacks.continued import Continued, newest_readable
from ls_strategy.host.pytorch import Callback, ModelCheckpoint, SIGTERMException, pl, rank_zero_info, rank_zero_warn
from ls_strategy.lightning._private import deliver_sigterm
from ls_strategy.lightning.strategy import ZeROStrategy

_MAX_STEPS_BETWEEN_CHECKS = 100  # limits the delay if steps become slow after their number was chosen
_RANK_BITS = 32


class Preempted(SIGTERMException):
    """Ends the process after the save: with status 0 if SLURM will run the job again, else 128 + the signal."""


class PreemptionHandler(Callback):
    """Saves a checkpoint and ends the run on a signal or before a SLURM job's time is over, and resumes from it.

    ::

        signal on any rank        only sets a flag; in a SLURM job as soon as this object is created
        end of an optimizer step  every few seconds all ranks agree (CPU group) whether any of them has to stop
        stop                      all ranks save, rank 0 requeues the job, `Preempted` ends the process
        next start                the newest checkpoint is found and restored

    Training stops regardless of ``min_epochs`` and ``min_steps``. ``trainer.fit`` does not return: `Preempted`, a
    ``SystemExit``, passes through it, so that a half-trained model is not tested or published.

    A signal during validation takes effect one step after it. Let the signal, and ``minutes_before_end``, come earlier
    by more than a validation and a save take. If the last step of an epoch is saved, the next run starts with the next
    epoch, as from every checkpoint taken at the end of a step.

    The job is requeued at the end of its time and on every signal but SIGTERM, which SLURM sends for many reasons.
    After SIGTERM it is requeued only while SLURM counts it as running, so not after ``scancel``. A fit with this
    callback disables Lightning's handlers for SIGTERM and SLURM, and their broadcast in every step.

    Works with every strategy. Resuming in the middle of an epoch needs a data loader with ``state_dict``; Lightning
    warns without one.
    """

    @checked(check_every_s=at_least(0), minutes_before_end=at_least(0))
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        check_every_s: float = 5.0,
        minutes_before_end: float = 5.0,
        requeue: bool = True,
        resume: bool = True,
    ) -> None:
        """Set the options; none is required.

        Args:
            dirpath: folder of the checkpoint, shared by all nodes. Default: ``preemption/<job id>`` in the Trainer's
                ``default_root_dir``, with ``_<task>`` in arrays, and with ``-1`` if an older job had that number;
                outside SLURM ``preemption/local``, which is emptied when training ends normally.
            signals: names of the signals that stop the run.
            check_every_s: seconds between agreements of the ranks, rounded to optimizer steps, at least 1 and at most
                100 of them. 0 agrees after every step.
            minutes_before_end: stop this many minutes before the end of a SLURM job, but never in the first three
                quarters of its time; 0 stops only on signals.
            requeue: under SLURM, put the job back into the queue after the save.
            resume: start from the newest checkpoint in ``dirpath`` and the folders of every ``ModelCheckpoint``,
                unless ``trainer.fit`` got a ``ckpt_path``. Files that ``torch.load(weights_only=True)`` cannot read are
                skipped with a warning, whatever ``trainer.fit`` got as ``weights_only``.

        Raises:
            ConfigError: a signal is unknown, or a time is negative.
        """
        self.dirpath = dirpath
        self.signals = _parse_signals(signals)
        self.check_every_s = check_every_s
        self.minutes_before_end = minutes_before_end
        self.requeue = requeue
        self.resume = resume
        self._received = 0
        self._old_handlers: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._group_of: Any = None
        self._folder = ""
        self._older: list[str] = []
        self._resumed_from: str | None = None
        self._stop_at: float | None = None
        self._last_step = 0
        self._steps = 0
        self._next_check = 1
        self._since = 0.0
        if slurm_job.job_id(os.environ) is not None and threading.current_thread() is threading.main_thread():
            # Ranks may wait for each other for minutes, and an unhandled signal would end the process. SIGTERM may end
            # it: there is nothing to save yet.
            self._install(number for number in self.signals if number != signal.SIGTERM)

    # start -----------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Install the signal handlers, and look for a checkpoint to resume from. Collective."""
        if stage != "fit":
            return
        if not self._old_handlers:  # otherwise a signal may have arrived since the handler was installed
            self._received = 0
        self._stop_at = None
        # Last, so that the checkpoint has what other callbacks do at the end of a step. A new list, because Lightning
        # iterates over the old one now.
        trainer.callbacks = [c for c in trainer.callbacks if c is not self] + [self]  # type: ignore[attr-defined]
        take_signals_over(trainer, lambda: self._give_back(trainer))
        if threading.current_thread() is threading.main_thread():
            self._install(self.signals)
        else:
            rank_zero_warn(
                "PreemptionHandler: Python handles signals in the main thread only, and fit runs in another."
            )
        self._make_group(trainer)
        self._folder = trainer.strategy.broadcast(self._choose_folder(trainer))
        fresh = trainer.global_step == 0 and not trainer.fast_dev_run  # type: ignore[attr-defined]
        mine: Any = None
        if trainer.is_global_zero:
            search = self.resume and fresh
            found = newest_readable([self._folder, *_checkpoint_folders(trainer)]) if search else Continued()
            mine = ([path for path in _saved_in(self._folder) if str(CheckpointPath(path)) not in found.skipped], found)
        self._older, found = trainer.strategy.broadcast(mine)
        self._resumed_from = found.path
        if self._resumed_from is not None or slurm_job.restarts(os.environ):
            overwrite_saved_config(trainer)
        self._report_found(found)
        if self._resumed_from is not None or found.skipped:
            choose_checkpoint(trainer, lambda given: given or _continue_from(found))

    def _report_found(self, found: Continued) -> None:
        if found.skipped:
            rank_zero_warn(
                f"PreemptionHandler: training does not resume from newer checkpoints that cannot be read. {found}. If "
                "you trust one, give it as ckpt_path, with weights_only=False if it needs that; or remove it."
            )
        if found.path is not None:
            rank_zero_info(
                f"PreemptionHandler: {found.path} is the newest checkpoint; training resumes from it unless ckpt_path "
                "names another. With resume=False, or without the file, it starts from scratch."
            )

    def _choose_folder(self, trainer: pl.Trainer) -> str:
        if self.dirpath is not None:
            return os.fspath(self.dirpath)
        parent, name = os.path.join(trainer.default_root_dir, "preemption"), slurm_job.job_id(os.environ)  # noqa: PTH118
        return os.path.join(parent, slurm_job.own_folder(parent, name, os.environ) if name else "local")  # noqa: PTH118

    def _make_group(self, trainer: pl.Trainer) -> None:
        """Create a gloo group for the agreement. ZeROStrategy has one, whose connections close when a rank fails."""
        if isinstance(trainer.strategy, ZeROStrategy) or trainer.world_size == 1:
            return
        if self._group_of is not dist.group.WORLD:
            group = dist.new_group(backend=dev.host_backend())
            assert isinstance(group, dist.ProcessGroup)
            self._group, self._group_of = group, dist.group.WORLD

    def _install(self, signals: Iterable[int]) -> None:
        for number in signals:
            before = signal.getsignal(number)
            if before != self._on_signal:
                signal.signal(number, self._on_signal)
                self._old_handlers[number] = before

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = max(self._received, number)  # a signal may arrive anywhere: nothing else is safe here

    def _give_back(self, trainer: pl.Trainer) -> None:
        """Restore the previous handlers; called at the end of the Trainer's teardown, after an error too.

        A signal by which SLURM announces the end of the job would end the process by default, while it tests or exports
        what it has trained, and the job would count as failed: it is ignored then.
        """
        give_signals_back(trainer)
        in_job = slurm_job.job_id(os.environ) is not None
        for number, handler in self._old_handlers.items():
            before = handler if handler is not None else signal.SIG_DFL
            announced = in_job and before == signal.SIG_DFL and number != signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if announced else before)
        self._old_handlers.clear()
        if self._received == signal.SIGTERM and not trainer.interrupted:
            deliver_sigterm()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and read the end time of the job."""
        self._last_step = trainer.global_step
        self._steps = 0
        self._next_check = 1
        self._since = time.perf_counter()
        if not trainer.is_global_zero or not self.minutes_before_end:
            return
        end, now = slurm_job.end_time(os.environ), time.time()
        if end is not None:
            self._stop_at = end - min(self.minutes_before_end * 60, max(end - now, 0.0) / 4)
            rank_zero_info(
                f"PreemptionHandler: SLURM ends the job in {(end - now) / 60:.1f} minutes; "
                f"training stops in {(self._stop_at - now) / 60:.1f}."
            )

    # steps -----------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Agree when it is time; save and end the process if any rank has to stop. Collective."""
        if trainer.global_step == self._last_step:
            return  # gradients are being accumulated
        self._last_step = trainer.global_step
        self._steps += 1
        if self._steps < self._next_check:
            return
        stop, out_of_time = self._agree(trainer)
        if stop or out_of_time:
            self._stop(trainer, *_parts(stop))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and end the process if SIGTERM came to any rank after the last agreement. Collective.

        Other signals announce the end of the job's time, which may suffice for what comes after the training.
        """
        received = int(self._max(trainer, torch.tensor([self._mine(trainer)])))
        if received >> _RANK_BITS == signal.SIGTERM:
            self._stop(trainer, *_parts(received))

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Agree at the next step: validation may have been long."""
        self._next_check = 0

    def _agree(self, trainer: pl.Trainer) -> tuple[int, bool]:
        """Return what any rank received, as ``signal << 32 | rank``, and whether the job's time is over. Collective.

        The number of steps to the next agreement comes from the slowest rank's time, so it is equal on all ranks.
        """
        now = time.perf_counter()
        step_us = int(1e6 * (now - self._since) / self._steps)
        late = self._stop_at is not None and time.time() >= self._stop_at
        values = self._max(trainer, torch.tensor([self._mine(trainer), int(late), step_us], dtype=torch.int64))
        received, out_of_time, step_us = (int(v) for v in values.tolist())
        due = int(self.check_every_s * 1e6 / max(step_us, 1))
        self._next_check = min(max(due, 1), _MAX_STEPS_BETWEEN_CHECKS)
        self._steps = 0
        self._since = time.perf_counter()
        return received, bool(out_of_time)

    def _mine(self, trainer: pl.Trainer) -> int:
        """Return what this rank has received, such that the maximum over ranks is one of them."""
        return self._received << _RANK_BITS | trainer.global_rank if self._received else 0

    def _max(self, trainer: pl.Trainer, values: Tensor) -> Tensor:
        if isinstance(trainer.strategy, ZeROStrategy):
            return trainer.strategy.require_engine().mesh.world.agree(values)
        if trainer.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    # stop ------------------------------------------------------------------------------------------------------------

    def _stop(self, trainer: pl.Trainer, number: int, rank: int) -> None:
        why = f"rank {rank} received {signal.Signals(number).name}" if number else "the time of the SLURM job ends"
        path = os.path.join(self._folder, f"step={trainer.global_step}.ckpt")  # noqa: PTH118 - may be a URL
        rank_zero_info(f"PreemptionHandler: {why}. Saving {path} after step {trainer.global_step}.")
        try:
            trainer.save_checkpoint(path, weights_only=False)
            if isinstance(trainer.strategy, ZeROStrategy):
                trainer.strategy.wait_for_saves()
                if trainer.strategy.save_failed:
                    raise CheckpointError(f"{path} was not saved: see the warning above.")
        except Exception as error:
            self._after_failed_save(trainer, number, error)
            raise
        for older in self._older:
            if older != path:
                trainer.strategy.remove_checkpoint(older)
        requeued = self._requeue(trainer, number) if trainer.is_global_zero else False
        # Rank 0's answer on all ranks; and no rank exits while another one still needs it.
        status = 0 if self._max(trainer, torch.tensor([int(requeued)])).item() else 128 + (number or signal.SIGTERM)
        again = "SLURM runs the job again" if status == 0 else "start it again to continue"
        rank_zero_info(f"PreemptionHandler: saved {path}. The process ends with status {status}; {again}.")
        raise Preempted(status)

    def _requeue(self, trainer: pl.Trainer, number: int) -> bool:
        """Return whether the job was put back into the queue, if that is wanted. Rank 0 only."""
        if not self.requeue or slurm_job.job_id(os.environ) is None:
            return False
        if number == signal.SIGTERM and not slurm_job.is_running(os.environ):
            rank_zero_info("PreemptionHandler: SLURM is already ending the job (scancel?), so it is not requeued.")
            return False
        problem = slurm_job.requeue(os.environ)
        if problem is not None:
            rank_zero_warn(f"PreemptionHandler: the job could not be requeued: {problem}")
        return problem is None

    def _after_failed_save(self, trainer: pl.Trainer, number: int, error: Exception) -> None:
        """Requeue only if this run has saved another checkpoint: otherwise the next run would fail here too."""
        if not trainer.is_global_zero:
            return
        other = newest_readable([self._folder, *_checkpoint_folders(trainer)]).path
        if other is None or other == self._resumed_from:
            next_step = "Nothing newer than the start of this run is on the disk, so the job is not requeued."
        else:
            next_step = f"{other} is the newest checkpoint."
            if self._requeue(trainer, number):
                next_step += " The job is requeued and continues from there."
        rank_zero_warn(f"PreemptionHandler: the checkpoint could not be saved: {error}\n{next_step}")

    # end -------------------------------------------------------------------------------------------------------------

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Outside SLURM, remove the checkpoint after a complete training: the next run must not resume from it."""
        if self.dirpath is None and slurm_job.job_id(os.environ) is None:
            for older in self._older:
                trainer.strategy.remove_checkpoint(older)
            self._older = []


def _parts(received: int) -> tuple[int, int]:
    return received >> _RANK_BITS, received & ((1 << _RANK_BITS) - 1)


def _parse_signals(names: Sequence[str]) -> list[int]:
    try:
        return [signal.Signals[name].value for name in names]
    except KeyError as error:
        raise ConfigError(
            f"Got PreemptionHandler(signals={list(names)!r}), but {error} is not a signal of this system. "
            'Set names such as "SIGTERM", "SIGUSR1" and "SIGUSR2".'
        ) from None


def _continue_from(found: Continued) -> Unnamed:
    """Return the path to resume from, where the user gave none.

    Raises:
        CheckpointError: there are checkpoints, but none can be read.
    """
    if found.path is None:
        raise CheckpointError(
            f"PreemptionHandler found no checkpoint that can be resumed from, though there are some. {found}. Give the "
            "one that you trust as ckpt_path, remove them, or set resume=False to start from scratch."
        )
    return Unnamed(found.path)


def _checkpoint_folders(trainer: pl.Trainer) -> list[str]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [checkpoint_folder(c, trainer) for c in callbacks if isinstance(c, ModelCheckpoint)]


def _saved_in(folder: str) -> list[str]:
    """Return the checkpoints that this callback saved in ``folder`` earlier."""
    fs, path = url_to_fs(folder)
    if not fs.isdir(path):
        return []
    names = sorted(Path(entry).name for entry in fs.ls(path, detail=False))
    return [os.path.join(folder, n) for n in names if n.startswith("step=") and n.endswith(".ckpt")]  # noqa: PTH118
