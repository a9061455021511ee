"""One verdict for all ranks: errors, options and models that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.zero.setup.agreement import agree, owners_of

ROWS = [("a.weight", (3, 4), "torch.float32"), ("a.bias", (3,), "torch.float32")]


class Ranks:
    """A group as rank ``rank`` sees it: `exchange_objects` answers with what the others gave, call after call."""

    def __init__(self, others: list[Any], rank: int = 0) -> None:
        self.others, self.rank = others, rank

    def exchange_objects(self, own: Any) -> list[Any]:
        return [own, *(answer if answer is not None else own for answer in self.others.pop(0))]


def verdict_of(error: str | None = None, options: str = "stage 3", group: Any = None, rows: Any = ROWS) -> Any:
    """What another rank gives in the first exchange."""
    sent: list[Any] = []

    class Recorder:
        rank = 1

        def exchange_objects(self, own: Any) -> list[Any]:
            sent.append(own)
            return [own]

    if error is None:
        agree(Recorder(), None, options, rows, group)  # type: ignore[arg-type]
        return sent[0]
    with pytest.raises(PlanError):
        agree(Recorder(), PlanError(error), options, rows, group)  # type: ignore[arg-type]
    return sent[0]


def test_equal_ranks_agree() -> None:
    agree(Ranks([[verdict_of()]]), None, "stage 3", ROWS)  # type: ignore[arg-type]


def test_an_error_of_another_rank_is_raised_with_its_rank() -> None:
    with pytest.raises(PlanError, match="rank 1: too large"):
        agree(Ranks([[verdict_of("too large")]]), None, "stage 3", ROWS)  # type: ignore[arg-type]


def test_the_own_error_is_raised_as_it_is() -> None:
    own = PlanError("too small")
    with pytest.raises(PlanError) as caught:
        agree(Ranks([[verdict_of()]]), own, "stage 3", ROWS)  # type: ignore[arg-type]
    assert caught.value is own


def test_other_options_are_shown_for_every_rank() -> None:
    with pytest.raises(PlanError, match=r"different options: rank 0: stage 3; rank 1: stage 2\. Start"):
        agree(Ranks([[verdict_of(options="stage 2")]]), None, "stage 3", ROWS)  # type: ignore[arg-type]


def test_the_first_difference_of_models_is_named() -> None:
    other = [ROWS[0], ("a.bias", (4,), "torch.float32")]
    ranks = Ranks([[verdict_of(rows=other)], [(None, other)]])
    with pytest.raises(PlanError, match=r"parameter 1 .*rank 0: \('a.bias', \(3,\).*rank 1: \('a.bias', \(4,\)"):
        agree(ranks, None, "stage 3", ROWS)  # type: ignore[arg-type]


def test_a_missing_parameter_is_a_difference() -> None:
    ranks = Ranks([[verdict_of(rows=ROWS[:1])], [(None, ROWS[:1])]])
    with pytest.raises(PlanError, match=r"parameter 1 .*rank 1: None"):
        agree(ranks, None, "stage 3", ROWS)  # type: ignore[arg-type]


def test_stages_of_a_pipeline_may_hold_different_parameters() -> None:
    agree(Ranks([[verdict_of(group=1, rows=ROWS[:1])]]), None, "stage 3", ROWS, 0)  # type: ignore[arg-type]


def test_a_parameter_of_two_optimizers_has_two_owners() -> None:
    model = nn.Linear(2, 2)
    first = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=1.0)
    second = torch.optim.SGD([model.weight], lr=1.0)
    owners = owners_of(model, [first, second])
    assert owners == {id(model.bias): ((0, 0),), id(model.weight): ((0, 1), (1, 0))}


def test_a_parameter_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"SGD\) holds a parameter of shape \(7,\) that is not in the LightningModule"):
        owners_of(nn.Linear(2, 2), [torch.optim.SGD([nn.Parameter(torch.zeros(7))], lr=1.0)])


def test_a_parameter_twice_in_one_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    optimizer.param_groups.append({**optimizer.param_groups[0]})
    with pytest.raises(PlanError, match=r"'weight' is in optimizer 0 \(SGD\) twice, in groups 0 and 1"):
        owners_of(model, [optimizer])
