"""Every alias with offload trains, from a name alone, to what the stage trains to without offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ls_strategy.autoload import ALIASES
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.ops.lion import Lion
from tests.dist.ranks import Net, assert_equal, fit, on_ranks, weights

pytestmark = pytest.mark.wide

OFFLOADING = [name for name, arguments in ALIASES.items() if any(key.startswith("offload") for key in arguments)]


class ByDefault(Net):
    """An optimizer that names no kernel."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class WithLion(Net):
    def configure_optimizers(self) -> Any:
        return Lion(self.parameters(), lr=self.lr, weight_decay=0.1)


def test_there_is_one_for_every_stage_and_tier() -> None:
    assert {f"zero{stage}_{tier}" for stage in (1, 2, 3) for tier in ("offload", "nvme")} < set(OFFLOADING)
    assert {"zero3_offload_param", "zero3_offload_optimizer", "zero3_nvme_param"} < set(OFFLOADING)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
@pytest.mark.parametrize("net", [ByDefault, WithLion])
@on_ranks(2)
def test_rounding_is_the_same_everywhere(
    rank: int, world_size: int, net: type[Net], moments: str, tmp_path: Any
) -> None:
    """Stochastic, but decided by buffer, rank, step and element: with moments in fewer bits too, tiers are equal."""
    trusted = net()
    fit(ZeROStrategy(2, precision={"moments": moments}), trusted)  # type: ignore[arg-type]
    for tier in ("cpu", "nvme"):
        ours = net()
        fit(
            ZeROStrategy(2, precision={"moments": moments}, offload={"optimizer": tier, "nvme_path": str(tmp_path)}),
            ours,
        )  # type: ignore
        assert ours.losses == trusted.losses, tier
        assert_equal(weights(ours), weights(trusted), tier)


@pytest.mark.parametrize("net", [ByDefault, WithLion])
@on_ranks(2, timeout_s=120)
def test_an_alias_changes_nothing_but_the_place(rank: int, world_size: int, net: type[Net], tmp_path: Any) -> None:
    """Losses and weights, bit for bit; the folder is the one under ``default_root_dir``."""
    trusted: dict[int, Any] = {}
    for alias in OFFLOADING:
        stage = int(ALIASES[alias]["stage"])  # type: ignore[call-overload]
        if stage not in trusted:
            module = net()
            fit(f"zero{stage}", module)
            trusted[stage] = module.losses, weights(module)
        module = net()
        trainer = fit(alias, module, default_root_dir=tmp_path)
        assert module.losses == trusted[stage][0], alias
        assert_equal(weights(module), trusted[stage][1], alias)
        if "nvme" in alias:
            assert trainer.strategy.config.offload.nvme_path == str(tmp_path / "nvme")
            assert list((tmp_path / "nvme").iterdir()) == []  # its file has no name


@on_ranks(1)
def test_the_environment_names_the_drive(rank: int, world_size: int, tmp_path: Any) -> None:
    """``LS_STRATEGY_NVME_PATH`` comes before ``default_root_dir``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LS_STRATEGY_NVME_PATH", str(tmp_path / "drive"))
        trainer = fit("zero2_nvme", ByDefault(), default_root_dir=tmp_path)
    assert trainer.strategy.config.offload.nvme_path == str(tmp_path / "drive")
    assert (tmp_path / "drive").is_dir()
