"""Sequences sharded inside pipelines: the numbers are those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Outcome, Run, train_all, unequal

pytestmark = pytest.mark.dist

STEPS = 8
TWO = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2, "parallel.context": 2}
RING = {"parallel.ring": 2}


@cache
def trusted(accumulate: int = 1, **shape: Any) -> Outcome:
    run = Run(shape=shape, steps=STEPS, trainer={"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5})
    return spawn(train_all, 1, [run], init_process_group=False)[0][0]


def compare(world: int, choices: list[dict[str, Any]], accumulate: int = 1, **shape: Any) -> list[Outcome]:
    trainer = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    runs = [Run({**TWO, **choice}, shape, steps=STEPS, trainer=trainer) for choice in choices]
    found = spawn(train_all, world, runs, init_process_group=False, timeout_s=170)[0]
    assert not unequal(trusted(accumulate, **shape), runs, found)
    return found


def test_exchanged_heads_and_rings():
    compare(4, [{"stage": 2}, {"stage": 3, **RING}])
