"""One step as a list of events: units in order, gradients in reverse, operations by their formula."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import ZeROConfig
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.forecast import Run, assumptions
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.traffic import traffic
from ls_strategy.precision import resolve_precision
from tests.live_bytes import LiveBytes

ROWS, WIDTH = 5, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.sum()


def question() -> Question:
    module = Net()
    optimizers = [torch.optim.AdamW(module.parameters())]
    run = Run(config=ZeROConfig(sharding={"min_unit_numel": 0}))
    return Question(module, optimizers, resolve_precision("32-true"), torch.ones(ROWS, WIDTH), run)


@pytest.fixture
def forecaster() -> Any:
    with question().forecaster() as made:
        yield made


def kinds(forecaster: Any) -> list[str]:
    return [e.kind for e in forecaster.trace().events if e.kind not in ("bytes", "saved")]


def test_forward_comes_before_backward(forecaster: Any) -> None:
    found = kinds(forecaster)
    assert [k for k in found if k in ("begin", "end_forward", "end_backward")] == [
        "begin",
        "end_forward",
        "end_backward",
    ]
    end = found.index("end_forward")
    assert "refetch" not in found[:end]
    assert "fetch" not in found[end:]


def test_gradients_come_in_the_reverse_order_of_the_forward(forecaster: Any) -> None:
    events = forecaster.trace().events
    fetched = [e.number for e in events if e.kind == "fetch"]
    grads = [e.number for e in events if e.kind == "grad"]
    assert len(grads) == 2
    assert grads == [n for n in reversed(fetched) if n in grads]


def test_operations_are_those_of_the_products(forecaster: Any) -> None:
    product = 2 * ROWS * WIDTH * WIDTH
    # Two forward products; backward has the weights' gradients twice, and one gradient of an input.
    assert forecaster.trace().flops == 5 * product


def test_all_memory_of_a_step_is_given_back_except_the_batch(forecaster: Any) -> None:
    events = forecaster.trace().events
    begin = next(i for i, e in enumerate(events) if e.kind == "begin")
    batch = sum(e.amount for e in events[:begin] if e.kind == "bytes")
    assert batch == ROWS * WIDTH * 4
    assert sum(e.amount for e in events if e.kind == "bytes") <= batch


def test_a_trace_is_taken_once(forecaster: Any) -> None:
    assert forecaster.trace() is forecaster.trace()


def test_a_step_that_fails_says_why() -> None:
    asked = question()
    asked.module.training_step = lambda batch, batch_idx: batch.numpy().sum()  # type: ignore[method-assign, assignment]
    with (
        asked.forecaster() as forecaster,
        pytest.raises(PlanError, match="cannot be counted on tensors"),
    ):
        forecaster.trace()


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_rank_sends_the_papers_multiple_of_the_parameters(forecaster: Any, stage: Any, times: int) -> None:
    plan = forecaster.plan(Candidate(stage).config(ZeROConfig(sharding={"min_unit_numel": 0})), 4)
    numel = sum(f.layout.numel for u in plan.units for f in u.flats)
    sent = traffic(plan, (8.0,)).sent
    # At stage 3 a unit's second gather may be spared where backward begins.
    assert (times - 1) * numel * 4 * 3 / 4 <= sent <= times * numel * 4 * 3 / 4
    if stage < 3:
        assert sent == times * numel * 4 * 3 / 4


class Gate(Net):
    """Runs its second half only if some value asks for it, as hand-written experts do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if (loss > 0).any():  # this line
            loss = loss + 2 * super().training_step(batch, batch_idx)
        self.seen = loss.item()  # a number, for a log
        return loss


def test_a_branch_by_a_value_is_named_in_the_plan_and_numbers_for_logs_are_not() -> None:
    module = Gate()
    optimizers = [torch.optim.AdamW(module.parameters())]
    asked = Question(module, optimizers, resolve_precision("32-true"), torch.ones(ROWS, WIDTH), Run())
    forecasts = asked.forecasts(Hardware(ranks=2, device="cpu"))
    lines = Path(__file__).read_text().splitlines()
    here = next(i for i, line in enumerate(lines, 1) if line.endswith("# this line"))
    assert {f.assumed for f in forecasts} == {(f"{__file__}:{here}",)}
    (sentence,) = assumptions(forecasts)
    assert f"taken to be False here: {__file__}:{here}." in sentence


class Masked(Net):
    """Computes its loss from what masks select, in every way that masks can."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return self.selected(x, x > 0)

    def selected(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = x[mask[:, 0]] + x[mask[:, 0].nonzero().squeeze(1)] + x[torch.where(mask[:, 0])[0]]
        return x[mask].sum() + x.masked_select(mask).sum() + rows.sum() + x[:, mask[0]].sum()


def test_a_mask_selects_as_much_as_it_can() -> None:
    """The planned peak is that of a step in which all is selected."""
    module, batch = Masked(), torch.ones(500, WIDTH)
    optimizers = [torch.optim.AdamW(module.parameters())]
    asked = Question(module, optimizers, resolve_precision("32-true"), batch, Run())
    with asked.forecaster() as forecaster:
        sizes = [e.amount for e in forecaster.trace().events if e.kind == "bytes"]
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1)
    with LiveBytes(ignore=[batch, *module.parameters()]) as live:
        module.training_step(batch, 0).backward()
    assert max(accumulate(sizes)) == live.peak + batch.nbytes


def test_a_step_without_branches_assumes_nothing(forecaster: Any) -> None:
    assert forecaster.trace().assumed == ()
