"""Plan a Trainer's fit: `FitPlanner`, which `ls_strategy.extensions` has as ``planner``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ls_strategy._torch import copy_of_optimizer, tree_iter
from ls_strategy.checkpoint.random import random_states, restore_random_states
from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import LSError, PlanError
from ls_strategy.extras._lightning import training_data, trains_on_given_data
from ls_strategy.extras.planner.choice import Choice, Question, better_than, candidate_of, choose, explain, smallest
from ls_strategy.extras.planner.forecast import Run
from ls_strategy.extras.planner.hardware import Hardware, found_here
from ls_strategy.extras.planner.learned import MeasuredRun, add, compared, corrected, is_on, load, machine_of
from ls_strategy.extras.planner.micro_speeds import measure
from ls_strategy.extras.planner.step import first_batch
from ls_strategy.extras.planner.step_clock import StepClock
from ls_strategy.extras.run_file import RUN_FILE, append_line
from ls_strategy.host.pytorch import rank_zero_info, rank_zero_warn
from ls_strategy.lightning._private import is_mock_optimizer
from ls_strategy.zero.step.elementwise import refuse_wrapper

if TYPE_CHECKING:
    from ls_strategy.lightning.planning import Fit


_CPU_MESSAGES = ("can't allocate memory", "not enough memory")
"""Messages of torch's CPU allocator, which raises a plain RuntimeError."""


class OutOfMemory(LSError, RuntimeError):  # noqa: N818 - a RuntimeError, like `torch.OutOfMemoryError`
    """A step did not fit into memory. The message says what uses how much, and what uses less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES)


def raise_explained(error: BaseException, describe: Callable[[], str]) -> None:
    """Raise an error with the text of ``describe`` if ``error`` is a failed allocation. Call it where that is handled.

    Raises:
        OutOfMemory: caused by the allocator's error.
    """
    if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
        return
    try:
        explanation = describe()
    except Exception:  # the first error matters more
        raise error from None
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise OutOfMemory(f"out of memory: {first_line}\n{explanation}") from error


class FitPlanner:
    """Chooses how a strategy trains, with ``stage="auto"``, and explains steps that do not fit into memory."""

    def __init__(self) -> None:
        self._hardware: Hardware | None = None
        self._nvme_path = ""
        self._unsharded: list[Optimizer] = []
        self.planned_step_s: float | None = None  # seconds of an optimizer step, as predicted for what was chosen

    def begin(
        self, optimizers: Sequence[Optimizer], comm: Comm, device: torch.device, ranks_per_node: int, nvme_path: str
    ) -> None:
        """Record the memory that is free before the first fit, and this fit's optimizers. Not collective."""
        self._unsharded, self._nvme_path = before_sharding(optimizers), nvme_path
        if self._hardware is None:
            self._hardware = found_here(
                device, ranks=comm.world_size, ranks_per_node=ranks_per_node, nvme_path=nvme_path
            )

    def choose(self, ask: Callable[[], Fit], comm: Comm, device: torch.device) -> tuple[ZeROConfig, str]:
        """Return the fastest configuration that fits, and the reason with a table. Collective.

        Raises:
            PlanError: nothing fits, the step cannot be traced, or there is no data to plan with.
        """
        self._hardware = smallest(comm, device, self._nvme_path)
        fit = ask()
        speeds = measure(comm, device, fit.precision.autocast or fit.precision.compute)
        machine = None
        if comm.rank == 0 and is_on():
            machine = machine_of(device, comm.world_size, self._hardware.ranks_per_node, fit.precision.name)
        choice = choose(lambda: self._question(ask()), comm, self._hardware, speeds, machine)
        if machine is not None:
            fit.trainer.callbacks.append(StepClock(device, partial(_learn, fit.trainer, choice, machine)))  # type: ignore[attr-defined]
        self.planned_step_s = choice.step_s
        return choice.candidate.config(fit.config), choice.words

    def explain_memory(self, error: BaseException, ask: Callable[[], Fit]) -> None:
        """Raise an error that says what takes how much memory, and which options take less, after a failed allocation.

        Raises:
            OutOfMemory: ``error`` is one.
        """

        def describe() -> str:
            fit = ask()
            assert self._hardware is not None
            return explain(self._question(fit), self._hardware, candidate_of(fit.config))()

        raise_explained(error, describe)

    def _question(self, fit: Fit) -> Question:
        states = random_states()  # train_dataloader and datasets draw again when training begins
        try:
            return question_of_fit(fit, self._unsharded)
        finally:
            restore_random_states(states)


def _learn(trainer: Any, choice: Choice, machine: str, seconds: dict[str, float]) -> None:
    """Keep what a run has measured, and log it beside what was predicted. Rank 0 only, not collective, never raises."""
    try:
        lesson = choice.lesson
        assert lesson.now is not None
        forecast = next(f for f in choice.forecasts if f.candidate == choice.candidate)
        folder = str(getattr(trainer.logger, "log_dir", None) or "")  # the Trainer's own is collective
        run = MeasuredRun(
            time.time(), machine, lesson.workload, choice.candidate.name, forecast.work, lesson.now, seconds
        )
        speeds = corrected(lesson.now, [*load(machine), run], lesson.workload)
        better = better_than(choice.candidate, choice.forecasts, speeds)
        comparison = compared(run, lesson.speeds, better)
        rank_zero_info("\n".join(["zero_auto:", *comparison.lines()]))
        add(run)
        if folder and "://" not in folder:
            append_line(Path(folder) / RUN_FILE, "plan", **asdict(comparison))
    except Exception as error:  # the other ranks would wait for this one, and the fit has succeeded
        rank_zero_warn(f"zero_auto: the steps of this run were not kept for the next plan: {error!r}.")


def before_sharding(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Copy optimizers on the module's own parameters, which an engine removes from their groups. Skip mocks.

    Raises:
        PlanError: an optimizer wraps another one.
    """
    copies: list[Optimizer] = []
    for optimizer in optimizers:
        if is_mock_optimizer(optimizer):
            continue
        refuse_wrapper(optimizer)  # its groups may be the other's, which a copy cannot have
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        copies.append(copy_of_optimizer(optimizer, groups))
    return copies


def question_of_fit(fit: Fit, optimizers: Sequence[Optimizer]) -> Question:
    """Return what a Trainer is about to train. Not collective.

    Creates the training data loader again, and takes one batch.

    Args:
        fit: the Trainer, its module, set up, and the options that no candidate changes.
        optimizers: from `before_sharding`.

    Raises:
        PlanError: there is no training data, or none to spare for a plan.
    """
    config, trainer = fit.config, fit.trainer
    path = config.offload.nvme_path or os.environ.get("LS_STRATEGY_NVME_PATH", "")
    run = Run(
        config=replace(config, offload=replace(config.offload, nvme_path=path)),
        micro_batches=max(int(trainer.accumulate_grad_batches), 1),
        clips=bool(trainer.gradient_clip_val) or not fit.updates_early,
        recompute=config.activations.recompute,
    )
    data = training_data(trainer)
    if trains_on_given_data(trainer):
        _check_spare(data)
    return Question(fit.module, optimizers, fit.precision, first_batch(data), run)


def _check_spare(data: Any) -> None:
    """Raise if a batch that is taken now would be missing in training."""
    for loader in tree_iter(getattr(data, "iterables", data)):
        for each in (loader, getattr(loader, "dataset", None)):
            if isinstance(each, Iterator):
                raise PlanError(
                    f"Got stage='auto' with a {type(each).__name__} that gives every batch once, but a plan takes the "
                    "first one, which would be missing in training. Set the stage yourself, or give the data a new "
                    "iterator for every iter()."
                )
