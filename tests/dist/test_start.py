"""Training starts from rank 0's weights and buffers, whatever the other ranks have built: as under DDP.

A rank 0 that alone reads a file of pretrained weights is enough under DDP, so it is enough here.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.errors import PlanError
from tests.dist.parallel_runs import Module, Run, assert_as_plain, attention_plan, train
from tests.dist.ranks import on_ranks
from tests.marks import few_or_all

pytestmark = pytest.mark.dist

STEPS = 2
EXPERTS = {"num_experts": 4, "k": 2, "drop_tokens": False, "balance_loss": 0.0, "second_expert_sampling": False}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Different(Module):
    """Other parameters and another buffer on every rank; the loss is proportional to the buffer."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(rank())
        Module.configure_model(self)
        self.gain: Tensor
        self.register_buffer("gain", torch.tensor(1.0 + rank()))
        torch.manual_seed(100 + rank())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.gain


class DifferentOnMeta(Module):
    """Every rank would draw other numbers."""

    def configure_model(self) -> None:
        torch.manual_seed(rank())
        super().configure_model()


class OtherConstants(Module):
    """Every rank sets the norms to another number."""

    def configure_model(self) -> None:
        built = self.model is not None
        super().configure_model()
        for norm in self.model.modules() if not built else ():
            if "Norm" in type(norm).__name__:
                nn.init.constant_(norm.weight, 1.0 + 0.1 * rank())


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "tensor": {"stage": 1, "parallel.tensor.size": 2},
    "tensor, stage 3": {"stage": 3, "parallel.tensor.size": 2},
    "sequence": {"stage": 2, "parallel.context": 2},
    "sequence, stage 3": {"stage": 3, "parallel.context": 2},
    "pipeline": {"stage": 1, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2},
    "pipeline, interleaved": {
        "stage": 3, "parallel.pipeline.size": 2,
        "parallel.pipeline.micro_batches": 2, "parallel.pipeline.schedule": "zbv",
    },
    "experts": {"stage": 1, "parallel.expert": 2},
    "experts, stage 3": {"stage": 3, "parallel.expert": 2},
}  # fmt: skip
FEW = ("zero2", "tensor, stage 3", "sequence", "pipeline, interleaved", "experts")
"""Every way to divide a model, and stages 1 to 3."""

FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tensor": {"stage": 3, "parallel.tensor.size": 2},
    "pipeline": {"stage": 1, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2},
    "pipeline, tensor": {
        "stage": 1,
        "parallel.pipeline.size": 2,
        "parallel.tensor.size": 2,
        "parallel.pipeline.micro_batches": 2,
    },
    "experts": {"stage": 2, "parallel.expert": 2},
    "experts, tensor": {
        "stage": 1,
        "parallel.expert": 2,
        "parallel.tensor.size": 2,
        "parallel.tensor.plan": attention_plan(),
    },
}


def run_of(options: dict[str, Any] | None, *, experts: bool) -> Run:
    return Run(options, {"num_layers": 4}, EXPERTS if experts else None, STEPS)


def compare(world_size: int, layouts: dict[str, dict[str, Any]], kind: type[Module]) -> None:
    assert_as_plain(world_size, [run_of(o, experts="parallel.expert" in o) for o in layouts.values()], kind)


@pytest.mark.parametrize("names", few_or_all(FEW, tuple(LAYOUTS)))
def test_all_ranks_start_from_what_rank_0_has(names: tuple[str, ...]) -> None:
    """Trusted run: one process, which has rank 0's values; the same global batches."""
    compare(2, {name: LAYOUTS[name] for name in names}, DifferentOnMeta)


@pytest.mark.slow
def test_all_ranks_start_from_what_rank_0_has_built() -> None:
    """Modules that are built before the strategy sees them, with a buffer."""
    compare(2, LAYOUTS, Different)


@pytest.mark.wide
def test_constants_of_rank_0_too() -> None:
    """Of parameters that every rank of a replica holds, and fills by itself."""
    names = ("zero3", "tensor, stage 3", "sequence, stage 3", "experts, stage 3")
    compare(2, {n: LAYOUTS[n] for n in names}, OtherConstants)


@on_ranks(2)
def test_constants_that_differ_within_a_pipeline_are_refused(rank: int, world_size: int) -> None:
    """Every block is filled where it is, so there is no rank 0 that could be asked."""
    with pytest.raises(PlanError, match=r"norm\.weight.*gives them different values on the ranks of a pipeline"):
        train(rank, world_size, Run(LAYOUTS["pipeline"], {"num_layers": 4}, None, STEPS), OtherConstants)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Different, DifferentOnMeta])
def test_all_of_four_ranks_start_from_what_rank_0_has(kind: type[Module]) -> None:
    compare(4, FOUR_RANKS, kind)


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "experts"])
@on_ranks(2)
def test_models_that_differ_are_refused_before_values_are_sent(rank: int, world_size: int, layout: str) -> None:
    """Sizes that differ would end the process in the collective."""
    experts = EXPERTS if layout == "experts" else None
    run = Run(LAYOUTS[layout], {"num_layers": 4, "vocab_size": 61 + rank}, experts, STEPS)
    with pytest.raises(PlanError, match=r"built different models.*rank 0: .*61.*rank 1: .*62"):
        train(rank, world_size, run, Different)
