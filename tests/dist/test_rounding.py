"""Moments in 8 and 16 bits are rounded with random numbers of their own on every rank, in every buffer, at every step.

Where ranks share random numbers, their rounding errors point the same way in all shards and no longer average out.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from ls_strategy.zero.flat import state_store as rest
from tests.dist.ranks import WIDTH, Net, fit, quiet

pytestmark = pytest.mark.wide

NUMEL, STEPS = 1024, 3
PORTION = 1 << 18
"""Elements whose scales, of 8-bit moments, are a whole page of a drive."""


class Halves(nn.Module):
    """Two parameters with the same gradient, each of which is the shard of one of two ranks."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(numel)), nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.linspace(-1.7, 2.3, self.one.numel()).exp()
        return x + (factors * (self.one + self.other)).sum()


class Same(Net):
    """Two buffers, whose gradients do not depend on the data; moments are the gradient itself, and nothing moves."""

    def __init__(self, numel: int = NUMEL, *, groups: bool = False) -> None:
        self.numel, self.groups = numel, groups
        super().__init__()

    def build(self) -> None:
        self.blocks = nn.ModuleList([Halves(self.numel), Halves(self.numel)])
        self.codes: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        return self(torch.zeros(WIDTH)).mean()

    def configure_optimizers(self) -> Any:
        names = dict(self.named_parameters())
        one, other = [p for n, p in names.items() if "one" in n], [p for n, p in names.items() if "other" in n]
        params: Any = [{"params": one}, {"params": other}] if self.groups else self.parameters()
        return torch.optim.AdamW(params, lr=0.0, betas=(0.0, 0.0), weight_decay=0.0)

    def on_train_batch_end(self, *_: Any) -> None:
        (state,) = self.trainer.strategy.require_engine().optimizers
        for flat, store in zip(state.flats, state.sharded.states.store, strict=True):
            flat.wait_updated()
            moments = [store.read(name, torch.float32) for name in ("exp_avg", "exp_avg_sq")]
            self.codes.append(torch.stack(moments).clone())


def stored(rank: int, world_size: int, options: dict[str, Any]) -> Tensor:
    """Moments as they are stored, ``(steps, buffers, moments, NUMEL)``."""
    quiet()
    module = Same()
    fit(ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **options})), module, max_steps=STEPS)
    return torch.stack(module.codes).view(STEPS, 2, 2, NUMEL)


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3, "offload.optimizer": "cpu"}], ids=str)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_every_rank_buffer_and_step_rounds_with_random_numbers_of_its_own(moments: str, options: Any) -> None:
    """The same number is stored everywhere: any two places agree no more often than chance has it."""
    found = torch.stack(spawn(stored, 2, {**options, "precision.moments": moments}, init_process_group=False))
    exact = torch.linspace(-1.7, 2.3, NUMEL).exp()
    for index, value in enumerate((exact, exact * exact)):
        places = found[:, :, :, index].reshape(-1, NUMEL)  # ranks, steps, buffers
        assert (places / value - 1).abs().max() < 0.15
        # Two that round independently agree where the fraction to be rounded is f with f^2 + (1-f)^2: 2/3 on average.
        equal = [(a == b).float().mean().item() for a, b in combinations(places, 2)]
        assert len(equal) == 66
        assert max(equal) < 0.75
        # Independent errors of 12 places average out.
        assert (places / value).mean().sub(1).abs() < 0.002


@pytest.mark.parametrize("moments", ["fp32"])
def test_what_is_not_rounded_is_the_same_everywhere(moments: str) -> None:
    """What the test above takes for granted."""
    found = torch.stack(spawn(stored, 2, {"stage": 1, "precision.moments": moments}, init_process_group=False))
    assert found.unique(dim=0).shape[0] == 1
    assert found.flatten(0, 2).unique(dim=0).shape[0] == 1


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_parts_of_a_buffer_that_are_updated_apart_round_with_random_numbers_of_their_own(moments: str) -> None:
    """Two parameter groups: two calls of the update for one buffer."""
    (found,) = spawn(stored_in_groups, 1, moments, init_process_group=False)
    one, other = found.split(NUMEL, dim=-1)
    equal = (one == other).float().mean(-1)  # by step, buffer and moment
    assert equal.shape == (STEPS, 2, 2)
    assert equal.max() < 0.75


def stored_in_groups(rank: int, world_size: int, moments: str) -> Tensor:
    quiet()
    module = Same(groups=True)
    fit(ZeROStrategy(1, sharding={"min_unit_numel": 0}, precision={"moments": moments}), module, max_steps=STEPS)  # type: ignore[arg-type]
    return torch.stack(module.codes).view(STEPS, 2, 2, 2 * NUMEL)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_buffer_updated_in_portions_is_rounded_as_in_one(moments: str, tmp_path: Any) -> None:
    """From a drive it comes in portions: two of them here."""
    whole, portions = spawn(stored_in_portions, 1, moments, str(tmp_path), init_process_group=False)[0]
    assert torch.equal(whole, portions)


def stored_in_portions(rank: int, world_size: int, moments: str, folder: str) -> tuple[Tensor, Tensor]:
    quiet()
    modules = Same(PORTION), Same(PORTION)
    shared: dict[str, Any] = {
        "sharding.min_unit_numel": 0,
        "precision.moments": moments,
        "sharding.overlap_step": False,
    }
    fit(ZeROStrategy(1, **nested({"offload.optimizer": "cpu", **shared})), modules[0], max_steps=STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rest, "NVME_CHUNK", PORTION)
        drive = {"offload.optimizer": "nvme", "offload.nvme_path": folder, "offload.nvme_allow_ram": True}
        fit(ZeROStrategy(1, **nested({**drive, **shared})), modules[1], max_steps=STEPS)
    whole, portions = (torch.stack(module.codes) for module in modules)
    return whole, portions
