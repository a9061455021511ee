"""A signal to one of two ranks ends the run on both, at one step, with a checkpoint; the next run goes on from it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from ls_strategy.errors import ConfigError
from ls_strategy.extras.callbacks.preemption import Preempted, PreemptionHandler
from tests.dist.ranks import Net, assert_close, on_ranks, samples, trainer_of, weights
from tests.marks import slow

pytestmark = [pytest.mark.wide, pytest.mark.dist]

STEPS = 8


class Resumable:
    """Batches of this rank, and where in them a checkpoint was taken."""

    def __init__(self, rank: int, world_size: int, num_batches: int = STEPS) -> None:
        x, y = samples(num_batches * 8)
        mine = slice(rank, None, world_size)
        # One rank alone has twice as many of the same size.
        self.batches = list(zip(x[mine].split(4), y[mine].split(4), strict=True))
        self.next = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.next %= len(self.batches)  # Lightning counts, and never asks for more than there are
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class At(Callback):
    """Does something at the end of one training step, or of one validation batch, on one rank."""

    def __init__(self, rank: int, step: int, do: Callable[[], None], *, validation: bool = False) -> None:
        self.rank, self.step, self.do, self.validation = rank, step, do, validation

    def _perhaps(self, trainer: pl.Trainer) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            self.do()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.validation:
            self._perhaps(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.validation:
            self._perhaps(trainer)


def send(number: int, times: int = 1) -> Callable[[], None]:
    def do() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return do


def run(
    strategy: Any, folder: Path, rank: int, world_size: int, *callbacks: Callback, **options: Any
) -> tuple[pl.Trainer, Net, int | None]:
    """Train for `STEPS` steps in one epoch; also the exit status if the run was told to end."""
    module, data = Net(), Resumable(rank, world_size)
    options = {"max_epochs": 1, "default_root_dir": folder, "use_distributed_sampler": False, **options}
    trainer = trainer_of(strategy, callbacks=list(callbacks), **options)
    status = None
    try:
        trainer.fit(module, data, DataLoader(list(data.batches), batch_size=None))
    except Preempted as end:
        status = int(end.code or 0)
    if dist.is_initialized():
        dist.barrier()  # rank 0 removes files
    return trainer, module, status


def handler(**options: Any) -> PreemptionHandler:
    return PreemptionHandler(**{"check_every_s": 0, **options})


def saved(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.glob("preemption/*/*"))


@pytest.mark.parametrize("strategy", ["ddp", slow(0), slow(2), 3])
@on_ranks(2)
def test_the_run_ends_on_all_ranks_and_goes_on_to_the_same_weights(rank, world_size, tmp_path, strategy):
    _, whole, _ = run(strategy, tmp_path / "whole", rank, world_size)
    expected = weights(whole)
    before = signal.getsignal(signal.SIGTERM)
    trainer, _, status = run(strategy, tmp_path, rank, world_size, handler(), At(1, 3, send(signal.SIGTERM)))
    assert (trainer.global_step, status) == (3, 128 + signal.SIGTERM)
    assert saved(tmp_path) == ["preemption/local/step=3.ckpt"]
    assert signal.getsignal(signal.SIGTERM) is before

    trainer, module, status = run(strategy, tmp_path, rank, world_size, handler())
    assert (trainer.global_step, status, len(module.losses)) == (STEPS, None, STEPS - 3)
    assert_close(weights(module), expected, "weights", 0 if strategy != 3 else 1e-7)
    assert saved(tmp_path) == [], "finished outside SLURM: nothing to resume from"
    assert signal.getsignal(signal.SIGTERM) is before


@on_ranks(2)
def test_the_previous_checkpoint_goes_when_the_next_one_is_there(rank, world_size, tmp_path):
    for step in (2, 5):
        run("ddp", tmp_path, rank, world_size, handler(), At(0, step, send(signal.SIGUSR1, times=2)))
        assert saved(tmp_path) == [f"preemption/local/step={step}.ckpt"]


@on_ranks(2)
def test_training_stops_though_min_epochs_and_min_steps_are_not_reached(rank, world_size, tmp_path):
    trainer, _, status = run(
        2,
        tmp_path,
        rank,
        world_size,
        handler(),
        At(1, 2, send(signal.SIGUSR1)),
        min_epochs=3,
        max_epochs=3,
        min_steps=20,
    )
    assert (trainer.global_step, status) == (2, 128 + signal.SIGUSR1)


@on_ranks(2)
def test_a_signal_in_validation_waits_for_one_more_step(rank, world_size, tmp_path):
    watch = At(1, 4, send(signal.SIGUSR1), validation=True)
    # The interval between agreements alone would let the run finish.
    trainer, _, status = run(
        2, tmp_path, rank, world_size, handler(check_every_s=1000), watch, val_check_interval=4, num_sanity_val_steps=0
    )
    assert (trainer.global_step, status) == (5, 128 + signal.SIGUSR1)
    trainer, module, _ = run(2, tmp_path, rank, world_size, handler())
    assert len(module.losses) == 3


@pytest.mark.parametrize("strategy", [slow("ddp"), 2])
@on_ranks(2)
def test_sigterm_after_the_last_agreement_is_not_lost(rank, world_size, tmp_path, strategy):
    """The training is complete, and the next run goes on with what comes after it."""
    late = At(1, STEPS, send(signal.SIGTERM))
    trainer, module, status = run(strategy, tmp_path, rank, world_size, handler(check_every_s=1000), late)
    assert (trainer.global_step, status) == (STEPS, 128 + signal.SIGTERM)
    expected = weights(module)
    trainer, module, status = run(strategy, tmp_path, rank, world_size, handler())
    assert (trainer.global_step, status, len(module.losses)) == (STEPS, None, 0)
    assert_close(weights(module), expected, "weights", 0)
    warning = At(1, STEPS, send(signal.SIGUSR1))  # of the end of the job: there is time for what comes after the fit
    trainer, _, status = run(strategy, tmp_path / "b", rank, world_size, handler(check_every_s=1000), warning)
    assert (trainer.global_step, status) == (STEPS, None)


@pytest.mark.parametrize("strategy", [slow("ddp"), 2])
@on_ranks(2)
def test_the_last_step_of_an_epoch(rank, world_size, tmp_path, strategy):
    """Two epochs of eight steps: the run that follows starts with the second."""
    _, whole, _ = run(strategy, tmp_path / "whole", rank, world_size, max_epochs=2)
    assert len(whole.losses) == 2 * STEPS
    expected = weights(whole)
    stop = At(0, STEPS, send(signal.SIGUSR1))
    trainer, _, _ = run(strategy, tmp_path, rank, world_size, handler(), stop, max_epochs=2)
    assert trainer.global_step == STEPS
    trainer, module, _ = run(strategy, tmp_path, rank, world_size, handler(), max_epochs=2)
    assert (trainer.global_step, len(module.losses), trainer.current_epoch) == (2 * STEPS, STEPS, 2)
    assert_close(weights(module), expected, "weights", 0)


@on_ranks(2)
def test_gradient_accumulation_stops_between_optimizer_steps(rank, world_size, tmp_path):
    class AtBatch(Callback):
        def on_train_batch_start(self, trainer, module, batch, i):
            if i == 2 and rank == 0:
                os.kill(os.getpid(), signal.SIGUSR1)

    options = {"accumulate_grad_batches": 2}
    _, whole, _ = run(2, tmp_path / "whole", rank, world_size, **options)
    expected = weights(whole)
    trainer, module, _ = run(2, tmp_path, rank, world_size, handler(), AtBatch(), **options)
    assert (trainer.global_step, len(module.losses)) == (2, 4)
    _, module, _ = run(2, tmp_path, rank, world_size, handler(), **options)
    assert_close(weights(module), expected, "weights", 0)


@on_ranks(2)
def test_ranks_agree_at_the_same_steps_and_lightning_broadcasts_nothing(rank, world_size, tmp_path):
    broadcasts: list[int] = []
    agreed: list[int] = []
    original = dist.broadcast

    def counted(tensor, *args, **kwargs):
        broadcasts.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    class Counting(PreemptionHandler):
        def _agree(self, trainer):
            agreed.append(trainer.global_step)
            return super()._agree(trainer)

    dist.broadcast = counted
    try:
        run("ddp", tmp_path / "a", rank, world_size, max_epochs=1, limit_val_batches=0)
        assert broadcasts.count(1) >= STEPS, "Lightning's broadcast in every step: the test sees it"
        broadcasts.clear()
        run("ddp", tmp_path / "b", rank, world_size, Counting(check_every_s=1e-9), limit_val_batches=0)
        assert broadcasts.count(1) == 0
        assert agreed == list(range(1, STEPS + 1))
        agreed.clear()
        run("ddp", tmp_path / "c", rank, world_size, Counting(check_every_s=1000), limit_val_batches=0)
        assert agreed == [1]
    finally:
        dist.broadcast = original


@on_ranks(2)
def test_lightnings_handlers_are_back_in_a_fit_without_the_callback(rank, world_size, tmp_path):
    trainer, _, _ = run("ddp", tmp_path, rank, world_size, handler())
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    assert "register_signal_handlers" not in vars(trainer._signal_connector)
    seen = []
    probe = At(rank, 1, lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    run("ddp", tmp_path / "plain", rank, world_size, probe)
    assert type(seen[0]).__name__ == "_HandlersCompose"


# --- SLURM, imitated -------------------------------------------------------------------------------------------------


def slurm(
    folder: Path, rank: int, *, state: str = "RUNNING", seconds_left: float | None = None, fails: int = 0
) -> Path:
    """Commands that write down how they were called, and the variables of a job of an array. Returns the record."""
    binaries = folder / "bin"
    record = folder / "calls"
    if rank == 0:
        binaries.mkdir()
        for name, body in {"scontrol": f"exit {fails}", "squeue": f"echo {state}"}.items():
            (binaries / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {record}\n{body}\n')
            (binaries / name).chmod(0o755)
    os.environ["PATH"] = f"{binaries}:{os.environ['PATH']}"
    os.environ.update(SLURM_JOB_ID="77", SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="3", SLURM_JOB_NAME="train")
    if seconds_left is not None:
        os.environ["SLURM_JOB_END_TIME"] = str(int(time.time() + seconds_left))
    return record


def requeues(record: Path) -> list[str]:
    return [line for line in record.read_text().splitlines() if line.startswith("scontrol")] if record.exists() else []


@on_ranks(2)
def test_rank_0_requeues_the_task_of_the_array_once_and_the_status_is_0(rank, world_size, tmp_path):
    record = slurm(tmp_path, rank)
    trainer, _, status = run(2, tmp_path, rank, world_size, handler(), At(1, 3, send(signal.SIGUSR1)))
    assert (trainer.global_step, status) == (3, 0)
    assert requeues(record) == ["scontrol requeue 70_3"]
    assert saved(tmp_path) == ["preemption/70_3/step=3.ckpt"]
    os.environ["SLURM_RESTART_COUNT"] = "1"
    trainer, _, status = run(2, tmp_path, rank, world_size, handler())
    assert (trainer.global_step, status) == (STEPS, None)
    assert saved(tmp_path) == ["preemption/70_3/step=3.ckpt"], "the job might be requeued by hand"


@on_ranks(2)
def test_a_signal_before_the_ranks_have_met_is_not_lost(rank, world_size, tmp_path):
    """While a rank waits for the others, SLURM's signal would end the process, and nobody would requeue the job."""
    record = slurm(tmp_path, rank)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    made = handler()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "nothing to save: SIGTERM ends the process"
    if rank == 1:
        send(signal.SIGUSR1)()
    trainer, _, status = run(2, tmp_path, rank, world_size, made)
    assert (trainer.global_step, status) == (1, 0)
    assert requeues(record) == ["scontrol requeue 70_3"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, "what follows is not ended by it"


@on_ranks(2)
def test_another_jobs_checkpoint_of_the_same_number_is_left_alone(rank, world_size, tmp_path):
    slurm(tmp_path, rank)
    os.environ["SLURM_JOB_START_TIME"] = str(int(time.time()) + 1000)
    (tmp_path / "preemption" / "70_3").mkdir(parents=True, exist_ok=True)
    _, _, status = run(2, tmp_path, rank, world_size, handler(), At(1, 3, send(signal.SIGUSR1)))
    assert status == 0
    assert saved(tmp_path) == ["preemption/70_3-1/step=3.ckpt"]


@pytest.mark.parametrize(("state", "expected"), [("RUNNING", 1), ("COMPLETING", 0)])
@on_ranks(2)
def test_sigterm_requeues_a_running_job_and_not_a_cancelled_one(rank, world_size, tmp_path, state, expected):
    record = slurm(tmp_path, rank, state=state)
    _, _, status = run("ddp", tmp_path, rank, world_size, handler(), At(0, 2, send(signal.SIGTERM)))
    assert len(requeues(record)) == expected
    assert status == (0 if expected else 143)
    assert saved(tmp_path) == ["preemption/70_3/step=2.ckpt"]


@on_ranks(2)
def test_a_requeue_that_slurm_refuses_ends_with_the_signals_status(rank, world_size, tmp_path):
    record = slurm(tmp_path, rank, fails=1)
    _, _, status = run("ddp", tmp_path, rank, world_size, handler(), At(0, 2, send(signal.SIGUSR1)))
    assert len(requeues(record)) == 1
    assert status == 128 + signal.SIGUSR1


@on_ranks(2)
def test_the_end_of_the_job_stops_the_run_without_a_signal(rank, world_size, tmp_path):
    record = slurm(tmp_path, rank, seconds_left=-1)
    trainer, _, status = run(2, tmp_path, rank, world_size, handler(minutes_before_end=5))
    assert (trainer.global_step, status) == (1, 0)
    assert len(requeues(record)) == 1
    # Three quarters of the time are for training, however long before the end it is to stop.
    os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 1000)
    trainer, _, status = run(2, tmp_path / "long", rank, world_size, handler(minutes_before_end=1e9))
    assert (trainer.global_step, status) == (STEPS, None)


@pytest.mark.parametrize("progress", [False, True])
@on_ranks(2)
def test_a_failed_save_requeues_only_where_another_checkpoint_shows_progress(rank, world_size, tmp_path, progress):
    record = slurm(tmp_path, rank)
    keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)

    def break_saving(trainer: pl.Trainer) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError("no space left on device")

        trainer.strategy.save_checkpoint = fail  # type: ignore[method-assign]

    class Break(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                break_saving(trainer)
                os.kill(os.getpid(), signal.SIGUSR1)

    callbacks = [handler(), Break(), *([keep] if progress else [])]
    with pytest.raises(OSError, match="no space left"):
        run("ddp", tmp_path, rank, world_size, *callbacks, enable_checkpointing=progress)
    dist.barrier()
    assert len(requeues(record)) == int(progress)


# --- resume ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_resume_takes_the_newest_of_all_folders_and_the_users_path_first(rank, world_size, tmp_path):
    def keep() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}")

    run(2, tmp_path, rank, world_size, handler(), At(0, 2, send(signal.SIGUSR1)))
    trainer, _, _ = run(2, tmp_path, rank, world_size, handler(), keep(), enable_checkpointing=True, max_steps=4)
    assert trainer.global_step == 4
    trainer, module, _ = run(2, tmp_path, rank, world_size, handler(), keep(), enable_checkpointing=True)
    assert len(module.losses) == STEPS - 4, "from ModelCheckpoint's step 4"
    _, module, _ = run(2, tmp_path, rank, world_size, handler(resume=False), keep(), enable_checkpointing=True)
    assert len(module.losses) == STEPS
    trainer = trainer_of(
        2, callbacks=[handler(), keep()], max_epochs=1, use_distributed_sampler=False, enable_checkpointing=True
    )
    module = Net()
    trainer.fit(module, Resumable(rank, world_size), ckpt_path=str(tmp_path / "kept" / "step=3.ckpt"))
    assert len(module.losses) == STEPS - 3


@on_ranks(1)
def test_one_process_without_a_process_group(rank, world_size, tmp_path):
    trainer, _, status = run(
        "auto", tmp_path, rank, world_size, handler(), At(0, 3, send(signal.SIGTERM)), devices=1, max_steps=5
    )
    assert (trainer.global_step, status) == (3, 143)
    trainer, module, _ = run("auto", tmp_path, rank, world_size, handler(), devices=1)
    assert len(module.losses) == 2 * STEPS - 3


@pytest.mark.parametrize("options", [{"signals": ["SIGTERN"]}, {"check_every_s": -1}, {"minutes_before_end": -1}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError):
        PreemptionHandler(**options)


def test_a_tensor_can_hold_any_signal_and_rank():
    packed = torch.tensor([signal.SIGTERM << 32 | 100_000, signal.SIGUSR1 << 32 | 200_000]).max().item()
    assert (packed >> 32, packed & (2**32 - 1)) == (signal.SIGTERM, 100_000)


def test_lightning_knows_the_exception():
    assert issubclass(Preempted, SIGTERMException)
    assert issubclass(Preempted, SystemExit)
