"""Weights that user code writes to between a forward and its backward: the numbers of DDP at stage 3, or its error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ls_strategy.config import nested
from ls_strategy.errors import StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import Net, fit, on_ranks, weights


class Writes(Net):
    """Halves a parameter in the second step, through what ``means`` says, once its loss is there."""

    means = "state dict"
    name = "blocks.1.wide.weight"
    again = False
    """Whether backward runs the blocks' forwards again."""
    early = False
    """Whether it writes inside of ``training_step``."""

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.again else block(h)
        return self.last(h)

    def training_step(self, batch: Any, i: int) -> Any:
        loss = super().training_step(batch, i)
        if self.early:
            self.write()
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if not self.early:
            self.write()

    @torch.no_grad()
    def write(self) -> None:
        if self.global_step != 1:
            return
        module, _, name = self.name.rpartition(".")
        if self.means == "state dict":
            self.state_dict()[self.name].mul_(0.5)
        elif self.means == "state dict of a part":
            self.get_submodule(module).state_dict()[name].mul_(0.5)
        else:
            self.get_parameter(self.name).mul_(0.5)


SAVED = ("blocks.1.wide.weight", "last.weight")
NOT_SAVED = ("blocks.1.wide.bias", "first.weight", "last.bias")
"""By autograd."""


def outcome(strategy: Any, **given: Any) -> tuple[str, list[float], dict[str, Tensor]]:
    """Return the kind of the error, or losses and weights. Collective."""
    module = type("Case", (Writes,), given)()
    try:
        fit(strategy, module, max_epochs=1)
    except (RuntimeError, StateError) as error:
        kind = type(error).__name__ if "modified by an inplace operation" in str(error) else error
        return str(kind), module.losses, {}
    return "", module.losses, weights(module)


def compare(options: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    for case in cases:
        error, losses, expected = outcome("ddp", **case)
        options = {"stage": 3, "sharding.min_unit_numel": 0, **options}
        found, our_losses, ours = outcome(ZeROStrategy(**nested(options)), **case)
        assert found == error, case
        assert our_losses == pytest.approx(losses, rel=1e-6)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_write_through_a_state_dict_is_refused_where_autograd_has_saved_the_weight(
    rank: int, world_size: int
) -> None:
    cases: list[dict[str, Any]] = [{"name": name, "early": name == SAVED[0]} for name in SAVED]
    cases += [{"name": NOT_SAVED[0], "means": "state dict of a part"}, {"name": SAVED[0], "again": True}]
    compare({}, cases)


@pytest.mark.wide
@pytest.mark.parametrize("options", [{}, {"sharding.hpz": 2}, {"offload.parameters": "cpu"}], ids=str)
@on_ranks(4, timeout_s=240)
def test_every_write_is_as_under_ddp(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """A forward that runs again reads what was written, also where backward gathers from a second copy (hpZ)."""
    compare(options, [
        {"name": name, "means": means, "again": again, "early": early}
        for name in (*SAVED, *NOT_SAVED)
        for means in ("state dict", "state dict of a part", "parameter")
        for early in (False, True)
        for again in (False, True)
    ])  # fmt: skip
