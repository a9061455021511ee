"""Choose the fastest strategy that fits a module before training; all ranks choose the same."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import (
    Forecast,
    Forecaster,
    Run,
    assumptions,
    next_lighter_in_memory,
    reason,
    table,
)
from ls_strategy.extras.planner.hardware import Hardware, found_here
from ls_strategy.extras.planner.learned import Better, Lesson, is_on, load, machine_of, taught, workload_of
from ls_strategy.extras.planner.simulated import simulated
from ls_strategy.extras.planner.sizes import show_bytes
from ls_strategy.extras.planner.speeds import SAME, Speeds, quickest
from ls_strategy.extras.planner.step import training_step
from ls_strategy.precision import PrecisionPolicy

CLEARLY = 0.03  # a candidate that saves a smaller share of a step is not worth a change
SAME_AS_MEASURED = 0.02  # `SAME` where a run of the same model has corrected the speeds


@dataclass(frozen=True)
class Question:
    """One module and run to plan for."""

    module: nn.Module  # a module with a ``training_step``, on any device
    optimizers: Sequence[Optimizer]
    precision: PrecisionPolicy
    batch: Any
    run: Run

    @contextmanager
    def forecaster(self) -> Generator[Forecaster, None, None]:
        """Yield a `Forecaster`, with the module's tensors replaced by fake tensors until the exit. Not collective."""
        options = self.run.config.precision
        with simulated(self.module, self.precision, options.fp32_modules, torch.device("cpu"), options) as fakes:
            optimizers = [fakes.optimizer(o) for o in self.optimizers]
            yield Forecaster(
                self.module,
                optimizers,
                fakes=fakes,
                precision=self.precision,
                step=training_step(self.module, optimizers),
                batch=self.batch,
                run=self.run,
            )

    def forecasts(self, hardware: Hardware) -> list[Forecast]:
        """Return the forecast of every candidate. The module is restored on return. Not collective.

        Raises:
            PlanError: the step cannot be traced.
        """
        with self.forecaster() as forecaster:
            return forecaster.all(hardware)


@dataclass(frozen=True)
class Choice:
    """The chosen strategy."""

    candidate: Candidate
    words: str
    forecasts: tuple[Forecast, ...]
    lesson: Lesson  # the speeds by which it was chosen

    @property
    def step_s(self) -> float:
        """Predicted seconds of an optimizer step."""
        seconds = next(f.seconds for f in self.forecasts if f.candidate == self.candidate)
        assert seconds is not None
        return seconds[0]


def choose(
    ask: Callable[[], Question], world: Comm, hardware: Hardware, speeds: Speeds, machine: str | None = None
) -> Choice:
    """Return the strategy that is fastest of those that fit, as far as speeds tell. Collective over ``world``.

    ``ask`` returns what to plan for, and is called on rank 0 only, which alone reads what was measured before: the
    others get its answer.

    Args:
        ask: see above.
        world: the ranks.
        hardware: from `smallest`.
        speeds: from `micro_speeds.measure`.
        machine: from `learned.machine_of`; None: earlier runs do not count.

    Raises:
        PlanError: on every rank: nothing fits, or the step cannot be traced.
    """
    answer: Choice | str | None = None
    if world.rank == 0:
        try:
            question = ask()
            forecasts = question.forecasts(hardware)
            runs = [] if machine is None else load(machine)
            lesson = taught(speeds, runs, _workload(question.module, forecasts))
            answer = _decide(forecasts, hardware, lesson)
        except Exception as error:  # the other ranks wait for the answer
            answer = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    answer = world.exchange_objects(answer)[0]
    if isinstance(answer, Choice):
        return answer
    raise PlanError(f'strategy="zero_auto": {answer} Name a strategy to skip planning.')


def _workload(module: nn.Module, forecasts: Sequence[Forecast]) -> str:
    return workload_of(module, sum(p.numel() for p in module.parameters()), forecasts[0].work)


def lesson_here(module: nn.Module, forecasts: Sequence[Forecast], hardware: Hardware, precision: str) -> Lesson | None:
    """Return the speeds that runs on this machine have taught; None if there were none with as many ranks."""
    device = torch.device(hardware.device)
    here = torch.accelerator.current_accelerator()
    if not is_on() or (device.type != "cpu" and (here is None or here.type != device.type)):
        return None
    runs = load(machine_of(device, hardware.ranks, hardware.ranks_per_node, precision))
    return taught(None, runs, _workload(module, forecasts)) if runs else None


def timed_by(forecasts: Sequence[Forecast], speeds: Speeds) -> list[Forecast]:
    """Return the forecasts with the seconds that they take at some speeds."""
    return [replace(f, seconds=(speeds.seconds(f.work),) * 2) for f in forecasts]


def _decide(forecasts: list[Forecast], hardware: Hardware, lesson: Lesson) -> Choice:
    speeds = lesson.speeds
    timed = timed_by(forecasts, speeds)
    chosen = quickest(timed, speeds, SAME_AS_MEASURED if lesson.own else SAME)
    words = table(timed, hardware, chosen, "<- chosen")
    if chosen is None:
        raise PlanError(f"{reason(forecasts)}\n{words}\n")
    why = "\n".join([_why(timed, chosen), *lesson.lines(), *assumptions(timed)])
    return Choice(chosen.candidate, f"{words}\n{why}", tuple(timed), lesson)


def _why(timed: Sequence[Forecast], chosen: Forecast) -> str:
    """Explain the choice in one sentence or two."""
    assert chosen.seconds is not None
    why = f"{chosen.candidate.name}: {chosen.seconds[0]:.3g} s per step, by speeds that were measured now."
    lighter = timed[: list(timed).index(chosen)]
    if not lighter:
        return f"{why} None is clearly faster."
    last = lighter[-1]
    assert last.seconds is not None
    return f"{why} {last.candidate.name} " + (
        f"would take {last.seconds[0]:.3g} s." if last.fits else f"needs {'; '.join(last.lacks)}."
    )


def better_than(candidate: Candidate, forecasts: Sequence[Forecast], speeds: Speeds) -> Better | None:
    """Return what would have been clearly faster than ``candidate``, of what fits in memory; None if nothing."""
    running = next(f for f in forecasts if f.candidate == candidate)
    best = quickest(forecasts, speeds, 0.0)
    if best is None or speeds.seconds(best.work) > (1 - CLEARLY) * speeds.seconds(running.work):
        return None
    return Better(best.candidate.name, speeds.seconds(best.work), yaml_of(best.candidate))


def yaml_of(candidate: Candidate) -> str:
    """Return what a LightningCLI takes as ``trainer.strategy``, on one line."""
    arguments = candidate.arguments()
    if arguments == {"stage": candidate.stage}:
        return candidate.strategy
    # JSON is YAML.
    return json.dumps({"class_path": "ls_strategy.ZeROStrategy", "init_args": arguments})


def smallest(world: Comm, device: torch.device, nvme_path: str = "") -> Hardware:
    """Return the hardware that every rank has at least. Collective."""
    hosts = world.exchange_objects(socket.gethostname())
    per_node = max(hosts.count(host) for host in hosts)
    here = found_here(device, ranks=world.world_size, ranks_per_node=per_node, nvme_path=nvme_path)
    everyones: list[Hardware] = world.exchange_objects(here)

    def least(name: str) -> int | None:
        known = [value for value in (getattr(each, name) for each in everyones) if value is not None]
        return min(known) if known else None

    return replace(
        here, device_memory=least("device_memory"), host_memory=least("host_memory"), drive=least("drive")
    )  # fmt: skip


def explain(question: Question, hardware: Hardware, running: Candidate) -> Callable[[], str]:
    """Return a description for `out_of_memory.raise_explained`: the next candidate that needs less, and the table."""

    def describe() -> str:
        forecasts = question.forecasts(hardware)
        mine = next((f for f in forecasts if f.candidate == running), None)
        device = mine.peak.device if mine is not None else min(f.peak.device for f in forecasts)
        better = next_lighter_in_memory(forecasts, device)
        now = f"{running.name} needs {show_bytes(device)} on each device. " if mine is not None else ""
        if better is None:
            advice = "No other strategy needs less. Use a smaller batch (and accumulate_grad_batches), or more ranks."
        else:
            arguments = ", ".join(f"{k}={v!r}" for k, v in better.candidate.arguments().items())
            advice = (
                f"{better.candidate.name} needs {show_bytes(better.peak.device)}: "
                f"ZeROStrategy({arguments}), or a smaller batch with accumulate_grad_batches."
            )
        return f"{now}{advice}\n{table(forecasts, hardware)}"

    return describe


def candidate_of(config: ZeROConfig) -> Candidate:
    """Return the candidate that equals a configuration."""
    optimizer, parameters = config.offload.tier_of("optimizer"), config.offload.tier_of("parameters")
    return Candidate(config.stage, optimizer, parameters, config.activations.recompute, config.activations.stored)
