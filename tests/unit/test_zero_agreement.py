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


def test_equal_ranks_agree_and_stages_of_a_pipeline_may_hold_different_parameters() -> None:
    agree(Ranks([[verdict_of()]]), None, "stage 3", ROWS)  # type: ignore[arg-type]
    agree(Ranks([[verdict_of(group=1, rows=ROWS[:1])]]), None, "stage 3", ROWS, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"error": "too large"}, "rank 1: too large"),
        ({"options": "stage 2"}, r"different options: rank 0: stage 3; rank 1: stage 2\. Start"),
    ],
    ids=["an error", "other options"],
)
def test_what_another_rank_has_is_raised_with_its_rank(theirs: dict[str, str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        agree(Ranks([[verdict_of(**theirs)]]), None, "stage 3", ROWS)  # type: ignore[arg-type]


def test_the_own_error_is_raised_as_it_is() -> None:
    own = PlanError("too small")
    with pytest.raises(PlanError) as caught:
        agree(Ranks([[verdict_of()]]), own, "stage 3", ROWS)  # type: ignore[arg-type]
    assert caught.value is own


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROWS[0], ("a.bias", (4,), "torch.float32")], r"rank 0: \('a.bias', \(3,\).*rank 1: \('a.bias', \(4,\)"),
        (ROWS[:1], "rank 1: None"),
    ],
    ids=["another shape", "missing"],
)
def test_the_first_difference_of_models_is_named(rows: Any, words: str) -> None:
    with pytest.raises(PlanError, match=rf"parameter 1 .*{words}"):
        agree(Ranks([[verdict_of(rows=rows)], [(None, rows)]]), None, "stage 3", ROWS)  # type: ignore[arg-type]


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
