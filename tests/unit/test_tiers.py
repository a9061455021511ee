"""The registry of tiers: what one line in it is enough for."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ls_strategy.config import OffloadConfig, TierName
from ls_strategy.errors import PlanError, StateError
from ls_strategy.tiers import TIERS
from ls_strategy.tiers.base import ResidentTier
from tests.unit.one_rank import ShelfTier, adamw, close_engines, engine_on, network, steps

CPU = torch.device("cpu")


def trained(stage: int, offload: Any) -> list[Tensor]:
    model = network()
    engine = engine_on(model, [adamw(model.parameters())], stage=stage, offload=offload)
    try:
        return steps(engine)
    finally:
        close_engines()


def test_every_name_that_an_option_takes_has_one_line() -> None:
    assert tuple(TIERS) == get_args(TierName)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_new_tier_trains_to_the_same_bits_as_host_memory(stage: int, shelves: list[ShelfTier]) -> None:
    expected = trained(stage, "cpu")
    assert shelves == []
    torch.testing.assert_close(trained(stage, "nvme"), expected, rtol=0, atol=0)
    (shelf,) = shelves
    assert {name for _, name in shelf.shelf} == {"master", "exp_avg", "exp_avg_sq", "grad"}
    assert shelf.closed


def test_states_of_several_tiers_train_together(shelves: list[ShelfTier]) -> None:
    offload = OffloadConfig(optimizer="cpu", parameters="nvme")
    torch.testing.assert_close(trained(3, offload), trained(3, "cpu"), rtol=0, atol=0)
    assert {name for _, name in shelves[0].shelf} == {"param"}


def test_the_plan_names_the_place_of_a_new_tier(shelves: list[ShelfTier]) -> None:
    model = network()
    engine = engine_on(model, [adamw(model.parameters())], stage=1, offload="nvme")
    assert "per rank, on a shelf: parameters 0.0 MiB, masters" in engine.plan.describe()


def test_a_tier_that_is_not_resident_needs_a_fused_update(shelves: list[ShelfTier]) -> None:
    model = network()
    with pytest.raises(PlanError, match=r"Got offload.optimizer='nvme' with RAdam, but it needs a fused update"):
        engine_on(model, [torch.optim.RAdam(model.parameters())], stage=1, offload="nvme")


def test_only_the_tiers_of_the_options_are_opened() -> None:
    model = network()
    assert engine_on(model, [adamw(model.parameters())], stage=1).offload.tiers == {}
    model = network()
    assert list(engine_on(model, [adamw(model.parameters())], stage=1, offload="cpu").offload.tiers) == ["cpu"]


def test_host_memory_holds_zeros_until_it_is_written() -> None:
    assert TIERS["cpu"].open is not None
    tier = TIERS["cpu"].open({(0, "master"): (5, torch.float32)}, OffloadConfig(), CPU, 0)
    assert isinstance(tier, ResidentTier)
    assert torch.equal(tier.tensor((0, "master")), torch.zeros(5))
    tier.close()
    with pytest.raises(StateError, match="closed"):
        tier.get((0, "master"))
