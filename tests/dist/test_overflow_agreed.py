"""An overflow that only one rank of a divided model sees skips the step on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ls_strategy.config import LossScaleConfig
from ls_strategy.testing import spawn
from tests.dist import parallel_runs
from tests.dist.parallel_runs import Outcome, Run
from tests.models import scaled_fp32

pytestmark = pytest.mark.wide

OVERFLOWS = (1, 3)
STEPS = 5
SCALE = LossScaleConfig(initial_power=10, window=1000, hysteresis=1)
EXPERTS = {"num_experts": 4, "k": 2, "drop_tokens": False, "second_expert_sampling": False}
KINDS: dict[str, Run] = {
    "tensor": Run({"parallel.tensor.size": 2}),
    "megatron": Run({"parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}),
    "pipeline": Run({"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}),
    "expert": Run({"parallel.expert": 2}, experts=EXPERTS),
    "zero": Run({}),
}


class Overflowing(parallel_runs.Module):
    """A gradient of the last rank is infinite at some steps: of a matrix that the other rank has no part of."""

    def on_train_start(self) -> None:
        self.outcome.notes.update(scales=[], skipped=[])
        if self.global_rank != self.trainer.world_size - 1:
            return
        name = "experts" if self.run.experts else "attention."
        *_, matrix = (p for n, p in self.named_parameters() if name in n and p.dim() > 1 and not p.is_meta)
        matrix.register_hook(lambda grad: grad * float("inf") if self.trainer.global_step in OVERFLOWS else grad)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        self.outcome.notes["scales"].append(strategy.loss_scale)
        self.outcome.notes["skipped"].append(strategy.skipped_steps)
        masters = [m.detach().clone() for m in strategy.require_engine().trainable_masters()]
        before = self.outcome.notes.pop("masters", None)
        unchanged = before is not None and all(map(torch.equal, before, masters))
        self.outcome.notes.setdefault("unchanged", []).append(unchanged)
        self.outcome.notes["masters"] = masters
        super().on_train_batch_end(outputs, batch, batch_idx)


def train(rank: int, world_size: int, runs: list[Run]) -> list[Outcome]:
    with scaled_fp32():
        return parallel_runs.train_all(rank, world_size, runs, Overflowing)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_of_one_part_skips_the_step_of_all(stage: int) -> None:
    runs = [
        Run({**(run.options or {}), "stage": stage, "precision.loss_scale": SCALE}, experts=run.experts, steps=STEPS)
        for run in KINDS.values()
    ]
    ranks = spawn(train, 2, runs, init_process_group=False, timeout_s=150)
    for rank, outcomes in enumerate(ranks):
        for kind, outcome in zip(KINDS, outcomes, strict=True):
            what = f"{kind}, rank {rank}"
            assert outcome.notes["skipped"] == [0, 1, 1, 2, 2], what
            assert outcome.notes["scales"] == [2.0**s for s in (10, 9, 9, 8, 8)], what
            assert outcome.notes["unchanged"] == [False, True, False, True, False], what
            assert all(m.isfinite().all() for m in outcome.notes["masters"]), what
