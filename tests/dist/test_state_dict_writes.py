"""A state dict holds the parameters' memory in plain torch: what is read after a write to it is the same here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import Net, fit, on_ranks, weights

NAME = "blocks.1.wide.weight"
READS = (
    "nothing", "a forward", "the parameter", "the parameter twice", "a state dict", "a write", "a load", "another load",
)  # fmt: skip


class Writes(Net):
    """Writes to a state dict after each step, keeps it, and reads the weights in the same hook."""

    reads = ""
    forward_first = False

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if self.forward_first:
            self(torch.ones(4, 8, dtype=self.last.weight.dtype))  # a buffer may stay gathered
        before = {name: value.clone() for name, value in self.state_dict().items()}
        state = self.state_dict()
        state[NAME].mul_(1.25)
        self.__dict__.setdefault("seen", []).append(self.read(state, before))

    def read(self, state: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
        weight = self.get_parameter(NAME)
        if self.reads == "nothing":
            return torch.zeros(())
        if self.reads == "a forward":
            return self(torch.ones(4, 8, dtype=self.last.weight.dtype)).clone()  # type: ignore[no-any-return]
        if self.reads == "the parameter twice":
            weight.sum()
            state[NAME].mul_(0.5)
        if self.reads == "a write":
            weight.add_(0.01)
        if self.reads == "a load":
            self.load_state_dict({name: value * 1.01 for name, value in self.state_dict().items()})
        if self.reads == "another load":
            self.load_state_dict({name: value * 1.01 for name, value in before.items()})
        if self.reads == "a state dict":
            return self.state_dict()[NAME].clone()
        return weight.sum().clone()


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
    for reads in READS:
        for forward_first in (False, True):
            expected, ours = Writes(), Writes()
            for module, strategy in (
                (expected, "ddp"),
                (ours, ZeROStrategy(**nested({"stage": 3, "sharding.min_unit_numel": 0, **options}))),
            ):
                module.reads, module.forward_first = reads, forward_first
                fit(strategy, module, precision="64-true", max_epochs=1)
            case = f"{reads}, forward first: {forward_first}"
            torch.testing.assert_close(ours.seen, expected.seen, rtol=1e-12, atol=1e-12, msg=case)
            torch.testing.assert_close(ours.losses, expected.losses, rtol=1e-12, atol=1e-12, msg=case)
            torch.testing.assert_close(weights(ours), weights(expected), rtol=1e-12, atol=1e-12, msg=case)
