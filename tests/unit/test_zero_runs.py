"""Runs of adjacent parameters that an optimizer steps as one tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ls_strategy.zero.step.optimizer_state import ELEMENTWISE, OptimizerStates
from ls_strategy.zero.step.runs import Runs
from tests.unit.one_rank import engine_on, steps

NAMES = "abcde"


class Five(nn.Module):
    """Five vectors of 16 elements in one flat buffer, two of them in a group of their own."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Parameter(torch.full((16,), 1.0)))
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + sum(self.get_parameter(name).sum() for name in "abde")


def runs_of(*, cuts: bool = True) -> tuple[Runs, OptimizerStates, nn.Module]:
    model = Five()
    vectors = [getattr(model, name) for name in NAMES]
    groups = [{"params": vectors[:4]}, {"params": vectors[4:]}]
    optimizer = torch.optim.RMSprop(groups, lr=0.1, momentum=0.5)
    engine = engine_on(model, [optimizer], stage=1, offload="cpu")
    for hook in engine.optimizers[0].hooks:
        hook.remove()
    states = engine.optimizers[0].sharded.states
    return Runs(optimizer, states, None, [False], cuts=cuts), states, model


def spans(runs: Runs) -> list[tuple[int, int]]:
    return [(r.start // 16, r.stop // 16) for r in runs]


def test_parameters_of_one_group_are_one_run() -> None:
    runs, _, _model = runs_of()
    runs.compose([True] * 5, frozenset())
    assert spans(runs) == [(0, 4), (4, 5)]
    assert [r.group for r in runs] == [0, 1]


def test_an_unused_parameter_parts_two_runs() -> None:
    runs, _, _model = runs_of()
    runs.compose([True, True, False, True, True], frozenset())
    assert spans(runs) == [(0, 2), (3, 4), (4, 5)]


def test_a_dropped_parameter_is_in_no_run() -> None:
    runs, _, _model = runs_of()
    runs.compose([True] * 5, frozenset({0}))
    assert spans(runs) == [(1, 4), (4, 5)]


def test_parameters_with_other_states_are_in_another_run() -> None:
    runs, states, _model = runs_of()
    states.entries[1] = {"step": torch.tensor(3.0)}
    runs.compose([True] * 5, frozenset())
    assert spans(runs) == [(0, 1), (1, 2), (2, 4), (4, 5)]


def test_without_cuts_each_parameter_is_a_run_in_its_shape() -> None:
    runs, _, _model = runs_of(cuts=False)
    runs.compose([True] * 5, frozenset())
    assert spans(runs) == [(n, n + 1) for n in range(5)]


def test_the_same_arguments_keep_the_runs() -> None:
    runs, _, _model = runs_of()
    runs.compose([True] * 5, frozenset())
    before = list(runs)
    runs.compose([True] * 5, frozenset())
    assert all(a is b for a, b in zip(before, runs, strict=True))


def test_groups_hold_runs_inside_and_parameters_outside() -> None:
    runs, _, _model = runs_of()
    runs.compose([True] * 5, frozenset())
    optimizer = runs._optimizer
    outside = [id(p) for g in optimizer.param_groups for p in g["params"]]
    with runs.shown():
        assert [[p.numel() for p in g["params"]] for g in optimizer.param_groups] == [[64], [16]]
        assert all(p.grad is not None for g in optimizer.param_groups for p in g["params"])
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == outside


def test_groups_hold_parameters_again_after_an_error() -> None:
    runs, _, _model = runs_of()
    runs.compose([True] * 5, frozenset())
    with pytest.raises(ArithmeticError), runs.shown():
        raise ArithmeticError
    assert [len(g["params"]) for g in runs._optimizer.param_groups] == [4, 1]


def test_dissolved_states_are_those_of_the_parameters() -> None:
    runs, states, _model = runs_of()
    runs.compose([True, True, False, True, True], frozenset())
    with runs.shown():
        runs._optimizer.step()
    runs.dissolve()
    assert list(runs) == []
    assert sorted(states.entries) == [0, 1, 3, 4]
    assert states.entries[3]["square_avg"] is ELEMENTWISE
    assert states.entries[3]["step"].item() == 1.0


def test_steps_with_an_unused_parameter_are_those_of_a_plain_loop() -> None:
    model, baseline = Five(), Five()
    baseline.load_state_dict(model.state_dict())
    optimizer = torch.optim.RMSprop(baseline.parameters(), lr=0.1, momentum=0.5)
    for number in range(3):
        baseline(torch.randn(4, 1, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_on(model, [torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.5)], stage=1, offload="cpu")
    torch.testing.assert_close(steps(engine), [p.detach() for p in baseline.parameters()])
