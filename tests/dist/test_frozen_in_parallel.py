"""Frozen parameters in an optimizer, and unfrozen later, where a rank has a part of the model."""

from __future__ import annotations

from typing import Any

import pytest

from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Module, Outcome, Run, plain, train_all, unequal

pytestmark = [pytest.mark.wide, pytest.mark.dist]

EXPERTS = {"k": 2, "drop_tokens": False, "balance_loss": 0.0, "second_expert_sampling": False}
PIPELINE = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
SHARDED: dict[str, Run] = {
    "tensor": Run({"stage": 3, "parallel.tensor.size": 2}, steps=6),
    "tensor, stage 1, offload": Run({"stage": 1, "parallel.tensor.size": 2, "offload.optimizer": "cpu"}, steps=6),
    "pipeline": Run({"stage": 3, **PIPELINE}, steps=6),
    "pipeline, stage 1": Run({"stage": 1, **PIPELINE}, steps=6),
    "expert": Run({"stage": 2, "parallel.expert": 2}, experts=EXPERTS, steps=6),
}


class Frozen(Module):
    """The matrices are frozen for three steps; one of them is the head's and the embedding's."""

    def configure_model(self) -> None:
        super().configure_model()
        self.freeze_matrices(True)

    def freeze_matrices(self, frozen: bool) -> None:
        for p in self.model.parameters():
            if p.dim() > 1:
                p.requires_grad_(not frozen)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3:
            self.freeze_matrices(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy):
            self.outcome.notes.setdefault("bytes", []).append(strategy.memory_bytes())


@pytest.fixture(scope="module")
def found() -> dict[str, list[Outcome]]:
    """Return the outcomes of both ranks by run."""
    ranks = spawn(train_all, 2, list(SHARDED.values()), Frozen, init_process_group=False, timeout_s=170)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(SHARDED)}


@pytest.mark.parametrize("name", SHARDED)
def test_train_once_unfrozen(found: dict[str, list[Outcome]], name: str) -> None:
    assert not unequal(plain(SHARDED[name], Frozen), [SHARDED[name]], found[name][:1])


@pytest.mark.parametrize("name", SHARDED)
def test_have_no_states_before(found: dict[str, list[Outcome]], name: str) -> None:
    for rank in found[name]:
        noted = [(each["gradients"], each["optimizer"]) for each in rank.notes["bytes"]]
        before, after = noted[2], noted[3]
        assert noted[0] == before
        assert 0 < 8 * before[1] < after[1]
        assert 8 * before[0] <= after[0]
