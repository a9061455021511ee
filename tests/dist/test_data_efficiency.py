"""Shortened sequences and dropped tokens on several ranks: every stage the same bits, resumed in mid-schedule."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ls_strategy import PlanError, RandomTokenDropping, SequenceCurriculum
from ls_strategy.extras.data_efficiency import token_dropping
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Module, Outcome, Run, train, train_all, unequal
from tests.dist.trusted import once

pytestmark = pytest.mark.wide

STEPS = 10
SHAPE = {"num_layers": 4}
DROPOUT = SHAPE | {"dropout": 0.1}
PLACE = "ls_strategy.extras.data_efficiency.token_dropping.draw_kept"


def curriculum(unit: Any = "steps") -> SequenceCurriculum:
    """8 tokens of 16 at first, 12, and 16 from step 6 on; or after as many tokens."""
    return SequenceCurriculum([8, 16], [6 if unit == "steps" else 240], unit=unit, multiple_of=4)


def dropping() -> RandomTokenDropping:
    """4 tokens at first, and all from step 8 on."""
    return RandomTokenDropping(kept=[4, 16], until=[8], multiple_of=4)


def run(*callbacks: Any, shape: Any = SHAPE, resume: Any = None, save: Any = None, **options: Any) -> Run:
    trainer = {"callbacks": list(callbacks)}
    return Run(options or None, shape, steps=STEPS, trainer=trainer, resume=resume, save=save)


def every_second(rows: int, tokens: int, kept: int, device: torch.device, place: int) -> Tensor:
    """In the place of random ones: the same tokens, however ranks divide batches, sequences and layers."""
    return torch.arange(0, tokens, tokens // kept, device=device)[:kept].expand(rows, kept).contiguous()


def train_all_alike(rank: int, world_size: int, runs: list[Run]) -> list[Outcome]:
    with mock.patch(PLACE, every_second):
        return train_all(rank, world_size, runs)


def alone(*runs: Run) -> list[Outcome]:
    return once(train_all_alike, 1, list(runs))[0]


def equal_bits(a: Outcome, b: Outcome) -> bool:
    return a.losses == b.losses and all(torch.equal(v, b.weights[k]) for k, v in a.weights.items())


def test_every_stage_has_the_same_bits():
    """With dropout, so that random numbers that go astray show; lengths and kept tokens change on the way."""
    runs = [run(curriculum("tokens"), dropping(), shape=DROPOUT, stage=stage) for stage in (1, 2, 3)]
    found = spawn(train_all, 2, runs, init_process_group=False)[0]
    assert all(equal_bits(found[0], other) for other in found[1:])


def test_the_numbers_are_those_of_one_process():
    """The same tokens dropped everywhere: as on one process, with the layers or the batch divided."""
    trusted, whole = alone(run(curriculum(), halves()), run())
    assert unequal(trusted, [run()], [whole])  # they do change something
    runs = [run(curriculum(), halves(), stage=2), run(curriculum(), halves(), stage=3, **{"parallel.tensor.size": 2})]
    assert not unequal(trusted, runs, spawn(train_all_alike, 2, runs, init_process_group=False)[0])


def halves() -> RandomTokenDropping:
    """Numbers that every length of `curriculum` is a multiple of, or that are above it."""
    return RandomTokenDropping(kept=[4, 16], until=[7], schedule="discrete")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1, "parallel.context": 2},
        {"stage": 1, "parallel.pipeline.size": 2},
        {"stage": 2, "parallel.pipeline.size": 2, "parallel.pipeline.schedule": "interleaved_1f1b"},
        {"stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"},
    ],
    ids=str,
)
def test_divided_otherwise(options):
    trusted = alone(run(curriculum(), halves()))[0]
    ours = run(curriculum(), halves(), **options)
    assert not unequal(trusted, [ours], spawn(train_all_alike, 2, [ours], init_process_group=False)[0])


def test_lengths_with_tokens_divided_between_layers():
    ours = run(curriculum(), stage=1, **{"parallel.tensor.size": 2}, **{"parallel.tensor.sequence_parallel": True})
    assert not unequal(alone(run(curriculum()))[0], [ours], spawn(train_all, 2, [ours], init_process_group=False)[0])


def test_lengths_by_tokens_are_those_of_ddp():
    """Tokens of all ranks are counted under any strategy."""
    trusted, ours = run(curriculum("tokens")), run(curriculum("tokens"), stage=3)
    found = spawn(train_all, 2, [trusted, ours], init_process_group=False)[0]
    assert not unequal(found[0], [ours], found[1:])


def test_with_experts():
    experts = {"k": 2, "drop_tokens": False, "balance_loss": 0.0, "second_expert_sampling": False}
    trusted, ours = (
        replace(run(curriculum(), halves(), **options), experts=experts)
        for options in ({}, {"stage": 2, "parallel.expert": 2})
    )
    expected = alone(trusted)[0]
    assert not unequal(expected, [ours], spawn(train_all_alike, 2, [ours], init_process_group=False)[0])


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_bits(stage, tmp_path):
    path = str(tmp_path / "saved.ckpt")
    make = lambda **more: run(curriculum("tokens"), dropping(), shape=DROPOUT, stage=stage, **more)  # noqa: E731
    whole = spawn(train_all, 2, [make(save=(4, path))], init_process_group=False)[0][0]
    resumed = spawn(train_all, 2, [make(resume=path)], init_process_group=False)[0][0]
    assert len(resumed.losses) == STEPS - 4
    assert resumed.losses == whole.losses[4:]
    assert all(torch.equal(v, resumed.weights[k]) for k, v in whole.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"parallel.pipeline.size": 2}, {"parallel.context": 2}], ids=str)
def test_recomputation_changes_no_bit(more):
    kinds = [{}, {"activations.checkpointing": "full"}, {"activations.checkpointing": "selective"}]
    runs = [run(curriculum(), dropping(), shape=DROPOUT, stage=2, **kind, **more) for kind in kinds]
    found = spawn(train_all, 2, runs, init_process_group=False, timeout_s=120)[0]
    assert all(equal_bits(found[0], other) for other in found[1:])


def drawn(rank: int, world_size: int, options: dict[str, Any]) -> list[Any]:
    """What was kept in the first steps."""
    plain, kept = token_dropping.draw_kept, []

    def note(*args: Any) -> Tensor:
        kept.append(plain(*args))
        return kept[-1]

    with mock.patch(PLACE, note):
        train(rank, world_size, run(dropping(), **options))
    return [index.tolist() for index in kept]


def test_replicas_drop_other_tokens_and_ranks_of_one_the_same():
    first, second = spawn(drawn, 2, {"stage": 1}, init_process_group=False)
    assert len(first) == len(second) == 2 * 7  # two blocks, seven steps
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert first[0] != first[1]  # blocks do not keep the same ones, either
    first, second = spawn(drawn, 2, {"stage": 1, "parallel.tensor.size": 2}, init_process_group=False)
    assert first == second


def refused(rank: int, world_size: int) -> list[str]:
    said = []
    for callback, options in (
        (SequenceCurriculum([6, 16], [6], multiple_of=5), {"parallel.context": 2}),
        (SequenceCurriculum([2, 16], [6], multiple_of=2), {"parallel.context": 2}),
        (RandomTokenDropping([5, 16], [6], multiple_of=5), {"parallel.context": 2}),
        (dropping(), {"parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}),
    ):
        try:
            train(rank, world_size, run(callback, stage=1, **options), Module)
        except PlanError as error:
            said.append(str(error))
    return said


def test_what_does_not_go_together_is_refused_on_all_ranks():
    first, second = spawn(refused, 2, init_process_group=False)
    assert first == second
    for said, words in zip(
        first,
        [
            "sequences of 15 tokens",
            "sequences of 2 tokens, but parallel.context=2",
            "keeps 5 tokens",
            "parallel.tensor.sequence_parallel",
        ],
        strict=True,
    ):
        assert words in said


@pytest.mark.slow
def test_the_recipe_with_both(tmp_path: Path) -> None:
    """From the command line, at stage 3, resumed."""
    pytest.importorskip("jsonargparse")
    pytest.importorskip("tensorboard")
    root = Path(__file__).parents[2]
    configs = [root / "recipes/gpt/configs" / f"{name}.yaml" for name in ("base", "zero3", "curriculum", "random_ltd")]
    options = [
        "--model.config.width=64", "--model.sample.max_new_tokens=4", "--data.batch_size=4", "--data.val_crops=8",
        "--data.corpus.max_bytes=300000", f"--data.corpus.cache_dir={tmp_path / 'cache'}",
        f"--trainer.logger.init_args.save_dir={tmp_path}", "--trainer.val_check_interval=4",
        "--trainer.log_every_n_steps=1", "--model.optim.total_steps=8",
    ]  # fmt: skip
    names = ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"}

    def fit(*more: str) -> str:
        command = [sys.executable, "-m", "recipes.gpt", "fit", *(f"--config={c}" for c in configs), *options, *more]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=170, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout + done.stderr

    output = fit("--trainer.max_steps=4")
    assert "curriculum/length is 64 from step 1 on" in output
    assert "RandomTokenDropping: 2 blocks, from model.blocks.1 to model.blocks.2" in output
    fit("--trainer.max_steps=8", f"--ckpt_path={tmp_path}/gpt/version_0/checkpoints/last.ckpt")
