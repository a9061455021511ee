"""Tensor, sequence, pipeline and expert parallelism together with what saves, stores in fewer bits, averages and stops.

`train` looks at what every rank has after each of these runs: parts fit together, and copies are equal bit for bit.
"""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.extras.callbacks import ShardedEMA
from ls_strategy.extras.callbacks.preemption import Preempted, PreemptionHandler
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Module, Outcome, Run, assert_as_plain, attention_plan, start, train
from tests.dist.ranks import saved
from tests.marks import slow

pytestmark = [pytest.mark.wide, pytest.mark.dist]

STEPS, HALF = 6, 3
EXPERTS = {"num_experts": 4, "k": 2, "drop_tokens": False, "balance_loss": 0.0, "second_expert_sampling": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"stage": 1, "parallel.tensor.size": 2, "offload.optimizer": "cpu"},
    "sequence": {"stage": 3, "parallel.context": 2},
    "pipeline": {"stage": 2, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2},
    "experts": {"stage": 2, "parallel.expert": 2},
}
FOUR: dict[str, dict[str, Any]] = {
    "tensor": {"stage": 3, "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True},
    "sequence, tensor": {"stage": 2, "parallel.context": 2, "parallel.tensor.size": 2},
    "pipeline": {
        "stage": 1,
        "parallel.pipeline.size": 2,
        "parallel.pipeline.micro_batches": 2,
        "offload.optimizer": "cpu",
    },
    "pipeline, tensor": {
        "stage": 1,
        "parallel.pipeline.size": 2,
        "parallel.tensor.size": 2,
        "parallel.pipeline.micro_batches": 2,
    },
    "experts": {"stage": 3, "parallel.expert": 2},
    "experts, tensor": {
        "stage": 1,
        "parallel.expert": 2,
        "parallel.tensor.size": 2,
        "parallel.tensor.plan": attention_plan(),
    },
}
WORLDS = [(2, LAYOUTS), pytest.param(4, FOUR, marks=pytest.mark.slow)]


ALL_EXPERTS = {**EXPERTS, "num_experts": 2}
"""Every token goes to every expert: rounding cannot send one elsewhere, which moves weights by more than it does."""


def run_of(options: dict[str, Any] | None, **more: Any) -> Run:
    experts = EXPERTS if options and "parallel.expert" in options else None
    return Run(options, {"num_layers": 4}, more.pop("experts", experts), steps=STEPS, **more)


def assert_goes_on(whole: Outcome, rest: Outcome) -> None:
    """Bit for bit."""
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert len(rest.losses) == STEPS - HALF
    assert all(torch.equal(v, rest.weights[k]) for k, v in whole.weights.items())


@pytest.mark.parametrize(("world_size", "layouts"), WORLDS)
def test_saves_in_the_background(world_size: int, layouts: dict[str, Any], tmp_path: Path) -> None:
    """The run goes on as if nothing was saved; from the checkpoint another goes on to the same bits."""
    paths = [str(tmp_path / f"{i}.ckpt") for i in range(len(layouts))]
    runs = [
        run_of({**o, "checkpoint.background": True}, save=(HALF, p))
        for o, p in zip(layouts.values(), paths, strict=True)
    ]
    wholes = assert_as_plain(world_size, runs)
    resumed = [run_of(o, resume=p) for o, p in zip(layouts.values(), paths, strict=True)]
    for whole, rest in zip(wholes, start(world_size, resumed), strict=True):
        assert_goes_on(whole, rest)


@cache
def in_one_process(moments: str, *, experts: bool) -> tuple[Outcome, Outcome]:
    """With exact moments, and with these."""
    formats = ("fp32", moments)
    runs = [run_of({"stage": 1, "precision.moments": f}, experts=ALL_EXPERTS if experts else None) for f in formats]
    exact, rounded = start(1, runs)
    return exact, rounded


def distance(one: Outcome, other: Outcome) -> float:
    return sum(float((v - other.weights[k]).square().sum()) for k, v in one.weights.items()) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize(("world_size", "layouts"), WORLDS)
def test_moments_in_fewer_bits(world_size: int, layouts: dict[str, Any], moments: str) -> None:
    """As far from fp32 as one process with such moments, and no farther than twice that."""
    experts = [ALL_EXPERTS if "parallel.expert" in options else None for options in layouts.values()]
    runs = [
        run_of({**o, "precision.moments": moments}, experts=e) for o, e in zip(layouts.values(), experts, strict=True)
    ]
    for run, outcome in zip(runs, start(world_size, runs), strict=True):
        exact, rounded = in_one_process(moments, experts=run.experts is not None)
        assert 0 < distance(exact, outcome) <= 2 * distance(exact, rounded), run


class Averaged(Module):
    """Saves the weights' average after the last step, in a folder and in a file."""

    def configure_callbacks(self) -> Any:
        return [ShardedEMA(decay=0.5)]


@pytest.mark.parametrize("save_as", ["sharded", slow("file")])
@pytest.mark.parametrize(("world_size", "layouts"), WORLDS)
def test_averages_of_weights(world_size: int, layouts: dict[str, Any], save_as: str, tmp_path: Path) -> None:
    """Complete, and those of one process."""

    def average(ranks: int, name: str, options: dict[str, Any], *, experts: bool) -> dict[str, Tensor]:
        path = tmp_path / f"{name}.ckpt"
        run = run_of(
            {**options, "checkpoint.format": save_as}, experts=EXPERTS if experts else None, save=(STEPS, str(path))
        )
        start(ranks, [run], Averaged)
        checkpoint = saved(path) if save_as == "sharded" else torch.load(path, weights_only=False)
        return checkpoint["ema_state_dict"]

    expected = {e: average(1, f"one{e}", {"stage": 1}, experts=e) for e in (False, True)}
    for name, options in layouts.items():
        if save_as == "file" and "parallel.pipeline.size" in options:
            continue  # refused
        experts = "parallel.expert" in options
        found = average(world_size, name, options, experts=experts)
        assert found.keys() == expected[experts].keys(), name
        for key, value in expected[experts].items():
            assert (found[key] - value).abs().max() <= 4e-6 * value.abs().max(), (name, key)


class Stopped(Module):
    """The last rank gets a signal in the step before half of them are done, if there is no checkpoint to go on from."""

    def configure_callbacks(self) -> Any:
        return [PreemptionHandler(dirpath=self.run.trainer["default_root_dir"], check_every_s=0)]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        first = len(self.outcome.losses) == self.trainer.global_step
        if first and self.trainer.global_step == HALF - 1 and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_and_go_on(rank: int, world_size: int, runs: list[Run]) -> list[tuple[Outcome, Outcome]]:
    """The run without a signal, and what came after one."""
    found = []
    for run in runs:
        whole = train(rank, world_size, Run(**{**vars(run), "trainer": {}}))
        with pytest.raises(Preempted):
            train(rank, world_size, run, Stopped)
        found.append((whole, train(rank, world_size, run, Stopped)))
    return found


@pytest.mark.parametrize(("world_size", "layouts"), WORLDS)
def test_a_signal_ends_the_run_and_the_next_goes_on(world_size: int, layouts: dict[str, Any], tmp_path: Path) -> None:
    """To the same bits as the run that nothing has stopped."""
    runs = [
        run_of(options, trainer={"default_root_dir": str(tmp_path / str(i))})
        for i, options in enumerate(layouts.values())
    ]
    for whole, rest in spawn(stop_and_go_on, world_size, runs, init_process_group=False, timeout_s=150)[0]:
        assert_goes_on(whole, rest)
