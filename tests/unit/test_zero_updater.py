"""What steps the parameters of an optimizer: every updater trains as torch does, also one of another package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.errors import PlanError
from ls_strategy.optimizers.muon import Muon
from ls_strategy.zero.step import updater as seam
from ls_strategy.zero.step.optimizer_state import OptimizerStates
from ls_strategy.zero.step.runs import Run
from ls_strategy.zero.step.updater import StepArguments, Updater
from tests.optimizers import EachTensor
from tests.unit.one_rank import engine_on, network, steps


class Momentum(EachTensor):
    """``m = 0.5 m + g; p -= lr m`` in torch: what the updater of another package does on runs."""

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["m"] = 0.5 * state.get("m", torch.zeros_like(p)) + grad
        p -= group["lr"] * state["m"]


class MomentumUpdater(Updater):
    """Steps the parameters of `Momentum` and SGD whose group asks for it, with its states in the flat store."""

    def __init__(self, optimizer: Optimizer, states: OptimizerStates) -> None:
        self.optimizer, self.states = optimizer, states
        self.runs: Sequence[Run] = ()
        self.stepped: list[int] = []

    def takes(self, number: int) -> bool:
        group = self.optimizer.param_groups[self.states.group_of[number]]
        return bool(group.get("elsewhere"))

    def prepare(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    def begin(self, step: StepArguments, dropped: frozenset[int], others: Callable[[], None]) -> None:
        for run in self.runs:
            run.flat.before_change()
            momentum = self.states.store[run.flat_number].tensor("m", torch.float32)[run.start : run.stop]
            momentum.mul_(0.5).add_(run.flat.averages.tensor()[run.start : run.stop])
            run.flat.master.detach()[run.start : run.stop].sub_(0.1 * momentum)
            self.stepped += run.members
            for number in run.members:
                self.states.entries[number] = {"m": "elementwise"}
        others()

    def collect(self) -> None:
        self.runs = ()

    def tensors(self) -> list[Tensor]:
        return []


@pytest.fixture
def registered() -> Iterator[list[MomentumUpdater]]:
    made: list[MomentumUpdater] = []

    def make(optimizer: Optimizer, states: OptimizerStates) -> Updater:
        made.append(MomentumUpdater(optimizer, states))
        return made[-1]

    seam.UPDATERS.append(make)
    yield made
    seam.UPDATERS.remove(make)


def halves(model: nn.Module, **more: Any) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], **more}, {"params": params[3:], "lr": 0.05}]


def by_shape(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices are stepped as full tensors, vectors by the fused update."""
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "use_muon": False}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "fused": lambda model: torch.optim.AdamW(halves(model), lr=0.1),
    "torch": lambda model: torch.optim.RMSprop(halves(model), lr=0.1, momentum=0.5),
    "full tensors": lambda model: Muon(by_shape(model), lr=0.1),
    "another": lambda model: Momentum(halves(model, elsewhere=True), lr=0.1),
    "another in place of the fused": lambda model: torch.optim.SGD(halves(model, elsewhere=True), lr=0.1, momentum=0.5),
}


def plain(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    for number in range(count):
        batch = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("stage", "offload"), [(0, None), (1, None), (3, None), (2, "cpu")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_updater_steps_as_torch_does(
    name: str, stage: int, offload: str | None, registered: list[MomentumUpdater]
) -> None:
    """Also in an engine that goes on from the states and weights of the first two steps."""
    baseline, model = network(), network()
    plain(baseline, OPTIMIZERS[name](baseline), 5)
    engine = engine_on(model, [OPTIMIZERS[name](model)], stage=stage, offload=offload)
    engine.private_gradients = engine.early_step = offload is not None
    middle = steps(engine, 2)
    saved = engine.optimizers[0].sharded.states.full_state_dict()
    again = network()
    with torch.no_grad():
        for p, value in zip(again.parameters(), middle, strict=True):
            p.copy_(value)
    resumed = engine_on(again, [OPTIMIZERS[name](again)], stage=stage, offload=offload)
    resumed.optimizers[0].sharded.states.load_full_state_dict(saved)
    for found in (steps(engine, 3, first=2), steps(resumed, 3, first=2)):
        for ours, theirs in zip(found, baseline.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    assert any(updater.stepped for updater in registered) == name.startswith("another")


@pytest.mark.usefixtures("registered", "shelves")
def test_states_that_are_not_in_memory_are_refused_to_updaters_of_other_packages() -> None:
    model = network()
    optimizer = OPTIMIZERS["another in place of the fused"](model)
    with pytest.raises(PlanError, match=r"MomentumUpdater.*'nvme'.*offload.optimizer='cpu'"):
        engine_on(model, [optimizer], stage=2, offload="nvme")
