"""What the conformance suite makes of names of strategies, of texts of errors, and of numbers."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from ls_strategy.extras.conformance.__main__ import main
from ls_strategy.extras.conformance.case import Note, Notes
from ls_strategy.extras.conformance.habits import all_habits
from ls_strategy.extras.conformance.specification import Specification, parse
from ls_strategy.extras.conformance.verdict import combined, difference, says_what_to_do


def test_a_strategy_is_an_alias_or_a_class_with_arguments() -> None:
    assert parse("ddp") == Specification("ddp", "ddp")
    given = parse("mine=torch.optim.lr_scheduler.Made(x=1, size=devices, y='a') @ a.b")
    assert (given.label, given.target, given.prepare_path) == ("mine", "torch.optim.lr_scheduler.Made", "a.b")
    assert pickle.loads(pickle.dumps(parse("collections.Counter(a=devices)"))).make(3) == {"a": 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "ddp(x=1)"], "Give the dotted path of the class"),
        (["--strategy", "a.B(1)"], "Use keywords"),
        (["--strategy", "a.B(x=f())"], "Use keywords"),
        (["--strategy", "a b"], r"Write \[name=\]alias"),
        (["--strategy", "no_such"], "is no alias of Lightning"),
        (["--strategy", "no.such.Thing"], "cannot be imported"),
        (["--strategy", "ddp", "ddp"], "Name them apart, as in mine=ddp"),
        (["--strategy", "ddp", "--only", "sleep"], "which is no habit. Choose from: plain_sgd"),
        (["--strategy", "ddp", "--devices", "1"], "need two or more"),
        (["--strategy", "ddp", "--keep", "."], "Give a new folder"),
        ([], "Give one strategy or more"),
    ],
)
def test_a_mistake_on_the_command_line_ends_with_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    import re

    assert re.search(words, " ".join(capsys.readouterr().err.split()))


def test_every_habit_says_what_it_does_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    habits = all_habits()
    assert len(habits) > 50
    assert all(each.does.endswith(".") and f"{name}\n    {each.does}\n" in shown for name, each in habits.items())


@pytest.mark.parametrize(
    ("value", "right", "by"),
    [
        (1.0 + 2e-6, 1.0, 2e-6),
        (torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0]), 0.75),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), 0.0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan]), math.inf),
        (torch.zeros(2), torch.zeros(3), math.inf),
        (math.inf, 1.0, math.inf),
        (math.inf, -math.inf, math.inf),
        (3, 3, 0.0),
        (3, 3.0, math.inf),
        (True, 1, math.inf),
    ],
)
def test_a_difference_is_relative_to_the_largest_number(value: object, right: object, by: float) -> None:
    assert difference(value, right) == pytest.approx(by, rel=1e-6)


def test_notes_of_ranks_become_what_is_compared() -> None:
    ranks = [Notes({"a": Note(x, "mean"), "b": Note(x, "first"), "c": Note(x, "each")}) for x in (1.0, 3.0)]
    ranks[1].notes |= {"d": Note(1.0, "mean"), "e": Note(1.0, "each")}
    assert combined(ranks) == {"a": [2.0], "b": [1.0], "c": [1.0, 3.0], "d": [None], "e": [None, 1.0]}


@pytest.mark.parametrize(
    ("text", "has_cure"),
    [
        ("Got x=1, but x is even. Set x=2.", True),
        (
            "you must enable the detection of unused parameters by setting strategy='ddp_find_unused_parameters_true'",
            True,
        ),
        ("Please set `accelerator='cuda'`", True),
        ("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", False),
        ("element 0 of tensors does not require grad and does not have a grad_fn", False),
        ("[Errno 21] Is a directory: 'model.ckpt'", False),
        ("Connection reset by peer", False),
        ("", False),
    ],
)
def test_an_error_is_a_refusal_if_it_says_what_to_do(text: str, has_cure: bool) -> None:
    assert says_what_to_do(text) is has_cure
