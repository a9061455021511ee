"""Checkpoint folders of Lightning's own sharded strategies go on here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from ls_strategy.errors import CheckpointError
from tests.dist.ranks import STAGES, Net, assert_close, fit, on_ranks, weights

pytestmark = pytest.mark.wide


class Sharded(Net):
    """Under `ModelParallelStrategy` its blocks are sharded by FSDP2."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4)


@on_ranks(2)
def test_a_run_under_fsdp2_goes_on_here(rank: int, world_size: int, tmp_path: Path) -> None:
    fsdp2 = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fit(fsdp2, Sharded(), max_epochs=1).save_checkpoint(tmp_path / "fsdp2.ckpt")  # type: ignore[arg-type]
    whole = Sharded()
    fit("ddp", whole)
    for stage in STAGES:
        resumed = Sharded()
        fit(stage, resumed, ckpt=tmp_path / "fsdp2.ckpt")
        assert_close(resumed.losses, whole.losses[4:], f"stage {stage}, losses")
        assert_close(weights(resumed), weights(whole), f"stage {stage}, weights")


@on_ranks(2)
def test_one_of_ours_without_its_manifest_is_not_taken_for_a_foreign_one(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    fit(3, Net(), max_epochs=1).save_checkpoint(tmp_path / "ours.ckpt")
    if rank == 0:
        (tmp_path / "ours.ckpt" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"ours\.ckpt is not a committed checkpoint"):
        fit(3, Net(), ckpt=tmp_path / "ours.ckpt")
