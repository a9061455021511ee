"""Divided models in fp64, where rounding stays below 1e-13 and cannot hide a mistake."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Outcome, Run, train, unequal
from tests.dist.test_parity_precision import EXPERTS, KINDS, TWICE, Unfused
from tests.dist.trusted import once
from tests.marks import slow

pytestmark = [pytest.mark.wide, pytest.mark.dist, pytest.mark.timeout(300)]

LIMITS = {"losses": 1e-13, "norms": 1e-13, "weights": 1e-13}
SETTINGS = [
    {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    for accumulate, clip in itertools.product((1, 2), (None, 0.3))
]


class Double(Unfused):
    """Does not take the loss of fp32 logits."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def run_of(base: Run, setting: dict[str, Any], **more: Any) -> Run:
    options = None if base.options is None else {**base.options, **more}
    return replace(base, options=options, steps=8, batch=8, trainer={"precision": "64-true", **setting})


def train_each(rank: int, world_size: int, runs: list[Run]) -> list[Outcome]:
    outcomes = [train(rank, world_size, run, Double) for run in runs]
    for outcome in outcomes:
        outcome.notes.clear()
    return outcomes


def compare(world_size: int, base: Run, stages: tuple[int, ...]) -> None:
    whole = Run(experts=EXPERTS if base.experts is not None else None)
    expected = once(train_each, 1, [run_of(whole, setting) for setting in SETTINGS], timeout_s=100)[0]
    problems = []
    for stage in stages:
        runs = [run_of(base, setting, stage=stage) for setting in SETTINGS]
        found = spawn(train_each, world_size, runs, init_process_group=False, timeout_s=150)[0]
        for one, run, outcome in zip(expected, runs, found, strict=True):
            problems += unequal(one, [run], [outcome], **LIMITS)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_whole_model(world_size: int) -> None:
    compare(world_size, Run({}), (0, 1, 2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_divided_once(kind: str) -> None:
    compare(2, KINDS[kind], (3,))
    if kind in {"ulysses", "ring"}:  # elsewhere there is one replica, and nothing to shard
        compare(2, KINDS[kind], (1,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas(kind: str) -> None:
    compare(4, KINDS[kind], (1, 2, 3))


@pytest.mark.parametrize("kind", [slow(kind) if kind != "megatron, ring" else kind for kind in TWICE])
def test_a_model_divided_twice(kind: str) -> None:
    compare(4, TWICE[kind], (1, 2, 3))
