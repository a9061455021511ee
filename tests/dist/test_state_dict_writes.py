"""A state dict holds the parameters' memory in plain torch: what is read after a write to it is the same here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import Net, fit, on_ranks, weights

NAME = "blocks.1.wide.weight"
READS = (
    "nothing", "a forward", "the parameter", "the parameter twice", "a state dict", "a write", "a write before another",
    "a load", "another load",
)  # fmt: skip
UNCOUNTED = ("data", "numpy")
"""Ways to write that do not count in a tensor's version."""


class Writes(Net):
    """Writes to a state dict in a hook, keeps it, and reads the weights in the same hook."""

    name = NAME
    reads = ""
    forward_first = False
    through = "itself"
    where = "after the step"

    def training_step(self, batch: Any, i: int) -> Any:
        if self.where == "before the forward":
            self.act()
        return super().training_step(batch, i)

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.where == "after the step":
            self.act()
        if self.where == "gathered":
            strategy: Any = self.trainer.strategy
            gathers = isinstance(strategy, ZeROStrategy)
            with strategy.gathered_parameters(modify=True) if gathers else nullcontext():
                self.act()

    @torch.no_grad()
    def act(self) -> None:
        if self.forward_first:
            self(torch.ones(4, 8, dtype=self.last.weight.dtype))  # a buffer may stay gathered
        before = {name: value.clone() for name, value in self.state_dict().items()}
        state = self.state_dict()
        self.write(state[self.name], 1.25)
        self.__dict__.setdefault("seen", []).append(self.read(state, before))

    def write(self, values: Tensor, factor: float) -> None:
        if self.through == "data":
            values.data.mul_(factor)
        elif self.through == "numpy":
            values.numpy()[1:] *= factor
            values.numpy()[:1] *= factor
        else:
            values.mul_(factor)

    def read(self, state: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        weight = self.get_parameter(self.name)
        if self.reads == "nothing":
            return torch.zeros(())
        if self.reads == "a forward":
            return self(torch.ones(4, 8, dtype=self.last.weight.dtype)).clone()  # type: ignore[no-any-return]
        if self.reads == "the parameter twice":
            weight.sum()
            self.write(state[self.name], 0.5)
        if self.reads == "a write before another":
            weight[0].add_(0.01)
            self.write(state[self.name][1:], 0.5)
        if self.reads == "a write":
            weight.add_(0.01)
        if self.reads == "a load":
            self.load_state_dict({name: value * 1.01 for name, value in self.state_dict().items()})
        if self.reads == "another load":
            self.load_state_dict({name: value * 1.01 for name, value in before.items()})
        if self.reads == "a state dict":
            return self.state_dict()[self.name].clone()
        return weight.sum().clone()


def compare(options: dict[str, Any], cases: Iterable[dict[str, Any]]) -> None:
    for case in cases:
        expected, ours = (type("Case", (Writes,), case)() for _ in range(2))
        strategy = ZeROStrategy(**nested({"stage": 3, "sharding.min_unit_numel": 0, **options}))
        for module, trained_by in ((expected, "ddp"), (ours, strategy)):
            fit(trained_by, module, precision="64-true", max_epochs=1)
        for of in ("seen", "losses"):
            found, trusted = getattr(ours, of), getattr(expected, of)
            torch.testing.assert_close(found, trusted, rtol=1e-12, atol=1e-12, msg=f"{of}: {case}")
        torch.testing.assert_close(weights(ours), weights(expected), rtol=1e-12, atol=1e-12, msg=str(case))


def crossed(**given: Iterable[Any]) -> Iterable[dict[str, Any]]:
    return (dict(zip(given, values, strict=True)) for values in itertools.product(*given.values()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"precision.gather": "fp32", "sharding.hpz": 2}, marks=pytest.mark.wide),
        pytest.param({"offload": "cpu"}, marks=pytest.mark.wide),
    ],
    ids=str,
)
@on_ranks(2, timeout_s=120)
def test_what_follows_a_write_sees_it(rank: int, world_size: int, options: dict[str, Any]) -> None:
    compare(options, crossed(reads=READS, forward_first=(False, True)))


@on_ranks(2, timeout_s=120)
def test_what_follows_a_write_sees_it_also_if_no_version_counts_it(rank: int, world_size: int) -> None:
    compare({}, [
        {"through": "data", "reads": "a forward"},
        {"through": "numpy", "reads": "a state dict"},
        {"through": "data", "reads": "the parameter twice", "name": "last.weight", "forward_first": True},
    ])  # fmt: skip


@on_ranks(2, timeout_s=120)
def test_gathered_parameters_and_those_in_flight_show_a_write(rank: int, world_size: int) -> None:
    """A unit that is prefetched when a step begins, and root parameters, uses of which send nothing."""
    compare({}, [
        {"where": "before the forward", "reads": "the parameter", "name": "blocks.0.wide.weight", "through": "data"},
        {"where": "before the forward", "reads": "the parameter", "name": "last.weight"},
        {"where": "gathered", "reads": "the parameter twice", "forward_first": True},
    ])  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("options", [{"precision.gather": "fp32", "sharding.hpz": 2}, {"offload": "cpu"}], ids=str)
@pytest.mark.parametrize("where", ["before the forward", "after the step", "gathered"])
@on_ranks(4, timeout_s=240)
def test_every_read_sees_every_write(rank: int, world_size: int, options: dict[str, Any], where: str) -> None:
    names, reads = itertools.cycle((NAME, "blocks.0.wide.weight", "last.weight")), READS[1:5]
    cases = crossed(where=[where], reads=reads, through=("itself", *UNCOUNTED), forward_first=[True])
    compare(options, ({"name": name, **case} for name, case in zip(names, cases, strict=False)))


class WritesOnOneRank(Net):
    """Writes to a state dict between a forward and its backward, on rank 0 only."""

    @torch.no_grad()
    def on_before_backward(self, loss: Tensor) -> None:
        state = self.state_dict()
        if self.global_rank == 0:
            state[NAME].mul_(0.5)


@pytest.mark.wide
@on_ranks(4)
def test_a_write_on_one_rank_only_does_not_end_it_where_nodes_have_copies(rank: int, world_size: int) -> None:
    options = {"stage": 3, "sharding.min_unit_numel": 0, "sharding.hpz": 2, "activations": "full"}
    module = WritesOnOneRank()
    fit(ZeROStrategy(**nested(options)), module, max_epochs=1)
    assert len(module.losses) > 1
