"""Runs of adjacent parameters that an optimizer steps as one tensor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ls_strategy.zero.step.optimizer_state import ELEMENTWISE, OptimizerStates
from ls_strategy.zero.step.runs import Run, compose
from ls_strategy.zero.step.torch_updater import TorchUpdater
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


def states_of(*, cuts: bool = True) -> tuple[OptimizerStates, TorchUpdater, nn.Module]:
    model = Five()
    vectors = [getattr(model, name) for name in NAMES]
    groups = [{"params": vectors[:4]}, {"params": vectors[4:]}]
    optimizer = torch.optim.RMSprop(groups, lr=0.1, momentum=0.5)
    engine = engine_on(model, [optimizer], stage=1, offload="cpu")
    for hook in engine.optimizers[0].hooks:
        hook.remove()
    states = engine.optimizers[0].sharded.states
    return states, TorchUpdater(optimizer, states, cuts=cuts), model


def runs_of(
    states: OptimizerStates, updater: TorchUpdater, used: list[bool] | None = None, *, cuts: bool = True
) -> list[Run]:
    composed = compose(states, used or [True] * 5, [updater] * 5, cuts=cuts)
    assert all(by is updater for by, _ in composed)
    return [run for _, run in composed]


def spans(runs: list[Run]) -> list[tuple[int, int]]:
    return [(r.start // 16, r.stop // 16) for r in runs]


@pytest.mark.parametrize(
    ("used", "by", "expected"),
    [
        ([True] * 5, [0] * 5, [(0, 4), (4, 5)]),
        ([True, True, False, True, True], [0] * 5, [(0, 2), (3, 4), (4, 5)]),
        ([True] * 5, [0, 1, 0, 0, 0], [(0, 1), (2, 4), (4, 5)]),
    ],
    ids=["of one group", "parted by an unused one", "parted by one that is not stepped in runs"],
)
def test_parameters_are_one_run(used: list[bool], by: list[int], expected: list[tuple[int, int]]) -> None:
    states, updater, _model = states_of()
    updaters = [updater, SimpleNamespace(in_runs=False)]
    runs = [run for _, run in compose(states, used, [updaters[n] for n in by], cuts=True)]
    assert spans(runs) == expected
    assert [r.group for r in runs] == [r.start // 64 for r in runs]


def test_parameters_with_other_states_are_in_another_run() -> None:
    states, updater, _model = states_of()
    states.entries[1] = {"step": torch.tensor(3.0)}
    assert spans(runs_of(states, updater)) == [(0, 1), (1, 2), (2, 4), (4, 5)]


def test_without_cuts_each_parameter_is_a_run() -> None:
    states, updater, _model = states_of(cuts=False)
    assert spans(runs_of(states, updater, cuts=False)) == [(n, n + 1) for n in range(5)]


def test_each_run_is_of_one_updater() -> None:
    states, updater, _model = states_of()
    other = SimpleNamespace(in_runs=True)
    composed = compose(states, [True] * 5, [updater, other, other, other, other], cuts=True)
    assert [by is updater for by, _ in composed] == [True, False, False]


def test_groups_hold_runs_inside_and_parameters_outside() -> None:
    states, updater, _model = states_of()
    updater.prepare(runs_of(states, updater))
    optimizer = updater._optimizer
    outside = [id(p) for g in optimizer.param_groups for p in g["params"]]
    with updater.stepping():
        assert [[p.numel() for p in g["params"]] for g in optimizer.param_groups] == [[64], [16]]
        assert all(p.grad is not None for g in optimizer.param_groups for p in g["params"])
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == outside


def test_groups_hold_parameters_again_after_an_error() -> None:
    states, updater, _model = states_of()
    updater.prepare(runs_of(states, updater))
    with pytest.raises(ArithmeticError), updater.stepping():
        raise ArithmeticError
    assert [len(g["params"]) for g in updater._optimizer.param_groups] == [4, 1]


def test_collected_states_are_those_of_the_parameters() -> None:
    states, updater, _model = states_of()
    updater.prepare(runs_of(states, updater, [True, True, False, True, True]))
    with updater.stepping():
        updater._optimizer.step()
    assert len(updater.tensors()) > 0
    updater.collect()
    assert updater.tensors() == []
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
