"""Folders that real Trainers saved, as one file: plain Lightning goes on where the sharded run was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from ls_strategy import ShardedEMA, ZeROStrategy
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.describe import describe, verify_all
from ls_strategy.config.option_names import option_names
from ls_strategy.lightning.checkpointing.loading import load_from_checkpoint
from tests.dist.ranks import Net, Sgd, assert_close, assert_equal, fit, on_ranks, weights
from tests.dist.test_checkpoint_file import Mixed
from tests.marks import slow

pytestmark = pytest.mark.wide


class TwoOptimizers(Net):
    """Steps them in turn."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:
        loss = self.noted_loss(batch)
        optimizer = self.optimizers()[i % 2]
        self.manual_backward(loss)
        optimizer.step()
        for one in self.optimizers():
            one.zero_grad()

    def configure_optimizers(self) -> Any:
        last = list(self.last.parameters())
        rest = [p for n, p in self.named_parameters() if not n.startswith("last.")]
        return [torch.optim.AdamW(rest, lr=1e-2, fused=True), torch.optim.SGD(last, lr=1e-2, momentum=0.9)]


@pytest.mark.parametrize("make", [slow(Mixed), slow(Sgd), TwoOptimizers])
@on_ranks(2)
def test_plain_ddp_goes_on_from_the_consolidated_file(
    rank: int, world_size: int, make: type[Net], tmp_path: Path
) -> None:
    for stage in (2, 3):
        folder, file = tmp_path / f"{stage}.ckpt", tmp_path / f"{stage}.one.ckpt"
        half, whole = make(), make()
        trainer = fit(stage, half, max_epochs=1)
        trainer.save_checkpoint(folder)
        if rank == 0:
            assert verify_all(folder) == []
            found = describe(folder)
            assert found.step == trainer.global_step
            assert found.layout.keys() <= {"world_size", "stage", "precision", *option_names()}
            assert found.layout["stage"] == stage
            consolidate(folder, file)
        dist.barrier()
        fit(stage, whole)
        resumed = make()
        fit("ddp", resumed, ckpt=file)
        assert len(resumed.losses) == len(whole.losses) - len(half.losses)
        assert_close(resumed.losses, whole.losses[len(half.losses) :], f"stage {stage}: losses")
        assert_close(weights(resumed), weights(whole), f"stage {stage}: weights")
        again = make()
        fit(stage, again, ckpt=file)
        assert_close(again.losses, resumed.losses, f"stage {stage}: losses of a sharded run from the file")


class PartlyFrozen(Net):
    """``checkpoint.frozen=False`` has something to leave out."""

    def build(self) -> None:
        super().build()
        self.blocks[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, fused=True)


@on_ranks(2)
def test_a_file_goes_on_in_the_middle_of_an_epoch_without_frozen_parameters(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    whole, half, resumed = PartlyFrozen(), PartlyFrozen(), PartlyFrozen()
    fit(ZeROStrategy(stage=3), whole)
    callback = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3)
    fit(
        ZeROStrategy(stage=3, checkpoint={"frozen": False}),
        half,
        max_steps=3,
        enable_checkpointing=True,
        callbacks=[callback],
    )
    if rank == 0:
        consolidate(tmp_path / "step=3.ckpt", tmp_path / "one.ckpt")
        saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
        assert not any(name.startswith("blocks.0.") for name in saved["state_dict"])
        assert len(saved["ls_strategy"]["left_out"]) == 6
    dist.barrier()
    fit(ZeROStrategy(stage=3), resumed, ckpt=tmp_path / "one.ckpt")
    assert_close(resumed.losses, whole.losses[3:], "losses")


@on_ranks(2)
def test_the_average_comes_along(rank: int, world_size: int, tmp_path: Path) -> None:
    trainer = fit(3, Mixed(), callbacks=[ShardedEMA(decay=0.5)])
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    if rank == 0:
        consolidate(tmp_path / "x.ckpt", tmp_path / "one.ckpt")
        saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
        assert saved["ema_state_dict"].keys() == saved["state_dict"].keys()
        difference = (saved["ema_state_dict"]["first.weight"] - saved["state_dict"]["first.weight"]).abs().max()
        assert 0 < difference < 0.1
        Mixed().load_state_dict(saved["ema_state_dict"])
    dist.barrier()


@on_ranks(2)
def test_modules_load_folder_and_file_alike(rank: int, world_size: int, tmp_path: Path) -> None:
    module = Mixed()
    trainer = fit(3, module, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    expected = weights(module)
    if rank == 0:
        consolidate(tmp_path / "x.ckpt", tmp_path / "one.ckpt", weights_only=True)
        assert_equal(load_from_checkpoint(Mixed, tmp_path / "x.ckpt").state_dict(), expected, "folder")
        assert_equal(Mixed.load_from_checkpoint(tmp_path / "one.ckpt").state_dict(), expected, "file")
    dist.barrier()


@pytest.mark.slow
@on_ranks(2)
def test_lightnings_own_consolidation_reads_our_folders(rank: int, world_size: int, tmp_path: Path) -> None:
    module = Mixed()
    fit(3, module, max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    expected = weights(module)
    if rank == 0:
        command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint", str(tmp_path / "x.ckpt")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
        assert done.returncode == 0, done.stderr
        saved = torch.load(tmp_path / "x.ckpt.consolidated", weights_only=True)
        assert saved["state_dict"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(saved["state_dict"][name], value), name
    dist.barrier()
