"""Full weights and gradients where a rank has a part of the model: as a plain Trainer has them, under their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Module, Outcome, Run, plain, train_all

pytestmark = [pytest.mark.wide, pytest.mark.dist]

EXPERTS = {"k": 2, "drop_tokens": False, "balance_loss": 0.0, "second_expert_sampling": False}
SHARDED: dict[str, Run] = {
    "tensor": Run({"stage": 3, "parallel.tensor.size": 2}, steps=2),
    "tensor, stage 1": Run({"stage": 1, "parallel.tensor.size": 2}, steps=2),
    "pipeline": Run({"stage": 3, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}, steps=2),
    "expert": Run({"stage": 3, "parallel.expert": 2}, experts=EXPERTS, steps=2),
}


class Looks(Module):
    """Halves the first block, and notes gradients, norms and weights by name."""

    def note(self, what: str, values: dict[str, Tensor]) -> None:
        copies = {name: value.detach().float().clone() for name, value in values.items()}
        self.outcome.notes.setdefault(what, []).append(copies)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy):
            self.note("norms", strategy.grad_norms())
            self.note("gradients", dict(strategy.full_gradients()))
            return
        grads = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.note("norms", {name: grad.norm() for name, grad in grads.items()})
        self.note("gradients", grads)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        strategy: Any = self.trainer.strategy
        block = self.model.blocks[0]
        if not isinstance(strategy, ZeROStrategy):
            with torch.no_grad():
                for p in block.parameters():
                    p.mul_(0.5)
            self.note("weights", self.model.state_dict())
            return
        with strategy.gathered_parameters([block, *block.parameters()], modify=True), torch.no_grad():
            for p in block.parameters():
                if not p.is_meta:  # another pipeline stage has it
                    p.mul_(0.5)
        self.note("weights", dict(strategy.full_weights(self.model)))


@pytest.fixture(scope="module")
def found() -> dict[str, list[Outcome]]:
    """Return the outcomes of both ranks by run."""
    ranks = spawn(train_all, 2, list(SHARDED.values()), Looks, init_process_group=False, timeout_s=170)
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(SHARDED)}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("what", ["norms", "weights"])
def test_every_rank_has_all(found: dict[str, list[Outcome]], name: str, what: str) -> None:
    for outcome in found[name]:
        for ours, theirs in zip(outcome.notes[what], plain(SHARDED[name], Looks).notes[what], strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("name", SHARDED)
def test_gradients_are_joined_and_in_a_pipeline_those_of_the_stage(found: dict[str, list[Outcome]], name: str) -> None:
    first, second = (outcome.notes["gradients"] for outcome in found[name])
    for ours, others, theirs in zip(first, second, plain(SHARDED[name], Looks).notes["gradients"], strict=True):
        if name == "pipeline":
            assert ours.keys().isdisjoint(others.keys() - {"model.head.weight", "model.token_embedding.weight"})
        else:
            assert ours.keys() == others.keys()
        assert_close({**ours, **others}, theirs)
