"""Rows of docs/features.md in which features meet states that are stored elsewhere."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from docs.examples.model import Model, data
from ls_strategy import GatedFeedForward, MoE, ZeROStrategy, moe_losses
from ls_strategy.config import nested
from tests.dist.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.dist]

DIVIDED: list[dict[str, Any]] = [
    {"parallel.tensor.size": 2},
    {"parallel.context": 2},
    {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 4},
    {"parallel.expert": 2},
    {"activations.checkpointing": "full"},
    {"activations.offload": "cpu"},
]


class Averages(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


class Validates(Model):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", super().training_step(batch, batch_idx), sync_dist=True)


class Sparse(Validates):
    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block.mlp = MoE(64, lambda: GatedFeedForward(64, 96), num_experts=4, k=2, second_expert_sampling=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + moe_losses(self)


def fit(folder: Any, *, averages: bool = False, **options: Any) -> tuple[float, float]:
    """Loss of the last step, and of the validation after it."""
    torch.manual_seed(1)
    module = Sparse() if "parallel.expert" in options else Validates()
    strategy = ZeROStrategy(
        **nested(
            {**options, "sharding.min_unit_numel": 0, "offload.nvme_path": str(folder), "offload.nvme_allow_ram": True}
        )
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[Averages()] if averages else [],
        max_steps=4, val_check_interval=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data(), data())
    return float(trainer.callback_metrics["loss"]), float(trainer.callback_metrics["val"])


@pytest.mark.parametrize("options", DIVIDED, ids=lambda options: next(iter(options)))
@on_ranks(2, timeout_s=150)
def test_the_numbers_do_not_depend_on_where_states_rest(
    rank: int, world_size: int, options: dict[str, Any], tmp_path: Any
) -> None:
    """Trusted run: the same without offload."""
    for stage, parameters in ((2, False), (3, True)):
        trusted = fit(tmp_path, stage=stage, **options)
        for tier in ("cpu", "nvme"):
            rest = {"offload.optimizer": tier, **({"offload.parameters": tier} if parameters else {})}
            assert fit(tmp_path, stage=stage, **rest, **options) == trusted, (stage, tier)


@on_ranks(2, timeout_s=150)
def test_weight_averaging_with_states_elsewhere(rank: int, world_size: int, tmp_path: Any) -> None:
    """Validation runs on Lightning's average."""
    for stage in (1, 2):
        trusted = fit(tmp_path, averages=True, stage=stage)
        assert trusted[1] != fit(tmp_path, stage=stage)[1]
        for tier in ("cpu", "nvme"):
            assert fit(tmp_path, averages=True, stage=stage, **{"offload.optimizer": tier}) == trusted, (stage, tier)
