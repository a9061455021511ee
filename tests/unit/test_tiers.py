"""The registry of tiers: what one entry in it is enough for, also from another package."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from ls_strategy.config import OffloadConfig, TierName
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.tiers import TIERS, TierKind
from ls_strategy.tiers.base import ResidentTier
from tests.unit.one_rank import ShelfTier, adamw, close_engines, engine_on, network, register_shelf, steps

CPU = torch.device("cpu")


def trained(stage: int, offload: Any) -> list[Tensor]:
    model = network()
    engine = engine_on(model, [adamw(model.parameters())], stage=stage, offload=offload)
    try:
        return steps(engine)
    finally:
        close_engines()


@pytest.fixture
def shelves(monkeypatch: pytest.MonkeyPatch) -> list[ShelfTier]:
    """Register a tier as another package does; return what was opened."""
    return register_shelf(monkeypatch, "shelf")


def test_options_name_every_tier_of_this_package() -> None:
    assert tuple(TIERS) == get_args(get_args(TierName)[0])


def test_options_take_a_tier_while_it_is_registered(shelves: list[ShelfTier], monkeypatch: pytest.MonkeyPatch) -> None:
    assert OffloadConfig(optimizer="shelf").tiers == {"shelf"}
    with pytest.raises(ConfigError, match=r"must be 'cpu' or 'nvme' or 'shelf' or a .*Set offload.optimizer='shelf'"):
        OffloadConfig(optimizer="shelve")
    monkeypatch.delitem(TIERS, "shelf")
    with pytest.raises(ConfigError, match=r"Got offload.optimizer='shelf', but .*must be 'cpu' or 'nvme' or a "):
        OffloadConfig(optimizer="shelf")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_new_tier_trains_to_the_same_bits_as_host_memory(stage: int, shelves: list[ShelfTier]) -> None:
    expected = trained(stage, "cpu")
    assert shelves == []
    torch.testing.assert_close(trained(stage, "shelf"), expected, rtol=0, atol=0)
    (shelf,) = shelves
    assert {name for _, name in shelf.shelf} == {"master", "exp_avg", "exp_avg_sq", "grad"}
    assert shelf.closed


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_new_tier_in_memory_trains_to_the_same_bits_as_host_memory(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIERS, "memory", TierKind("in another memory", resident=True, open=TIERS["cpu"].open))
    torch.testing.assert_close(trained(stage, "memory"), trained(stage, "cpu"), rtol=0, atol=0)


def test_states_of_several_tiers_train_together(shelves: list[ShelfTier]) -> None:
    offload = OffloadConfig(optimizer="cpu", parameters="shelf")
    torch.testing.assert_close(trained(3, offload), trained(3, "cpu"), rtol=0, atol=0)
    assert {name for _, name in shelves[0].shelf} == {"param"}


def test_the_plan_names_the_place_of_a_new_tier(shelves: list[ShelfTier]) -> None:
    model = network()
    engine = engine_on(model, [adamw(model.parameters())], stage=1, offload="shelf")
    assert "per rank, on a shelf: parameters 0.0 MiB, masters" in engine.plan.describe()


def test_a_tier_that_is_not_resident_needs_a_fused_update(shelves: list[ShelfTier]) -> None:
    model = network()
    with pytest.raises(PlanError, match=r"Got offload.optimizer='shelf' with RAdam, but it needs a fused update"):
        engine_on(model, [torch.optim.RAdam(model.parameters())], stage=1, offload="shelf")


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
