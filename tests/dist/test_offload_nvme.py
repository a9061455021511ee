"""What a drive, a folder or an option can do to a run with offload: a clear error on every rank, nothing left over."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ls_strategy.config import TierConfig, nested
from ls_strategy.errors import ConfigError, LSError, PlanError, RankFailedError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.tiers.file_io import NVMeError
from tests.dist.ranks import Net, assert_equal, batches, fit, on_ranks, weights
from tests.limits import wall
from tests.optimizers import EachTensor


class OnDrive(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def strategy(path: Path | str, **options: Any) -> ZeROStrategy:
    options = {"offload.optimizer": "nvme", "offload.parameters": "nvme", "offload.nvme_path": str(path), **options}
    return ZeROStrategy(3, **nested({"sharding.min_unit_numel": 0, **options}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 0, "offload.optimizer": "cpu"}, ["stage=0", "Use stage 1"]),
        ({"stage": 2, "offload.parameters": "cpu"}, ["stage=2", "stage=3"]),
        ({"stage": 2, "offload.gradients": "cpu"}, ["offload.gradients", "offload.optimizer"]),
        (
            {"stage": 3, "offload.optimizer": "cpu", "offload.delay_after": 5},
            ["=5", "stage 1 or 2"],
        ),
        ({"stage": 2, "offload.delay_after": 5}, ["offload.optimizer"]),
        ({"stage": 2, "precision.moments": "fp8"}, ["fp8", "int8"]),
        ({"stage": 2, "offload.step_on": "gpu"}, ["gpu", "device"]),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        ZeROStrategy(**nested(options))
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        TierConfig(tier="cpu", ratio=ratio)


def refused(ours: ZeROStrategy, net: type[Net] = OnDrive) -> str:
    """The message of an error that comes before anything was trained."""
    module = net()
    with pytest.raises(LSError) as refusal:
        fit(ours, module)
    assert module.losses == []
    return str(refusal.value)


@pytest.mark.wide
@on_ranks(2)
def test_a_folder_that_cannot_take_states(rank: int, world_size: int, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    assert "which is a file. Set it to a folder" in refused(strategy(tmp_path / "file"))
    message = refused(strategy("/dev/shm"))
    assert "in host memory" in message
    assert "nvme_allow_ram=True" in message
    fit(strategy("/dev/shm", **{"offload.nvme_allow_ram": True}), OnDrive())


@on_ranks(2)
def test_a_full_drive_is_found_before_training(rank: int, world_size: int, tmp_path: Any) -> None:
    """On one rank: said on both."""
    usage = shutil.disk_usage

    def full(path: Any) -> Any:
        real = usage(path)
        return real._replace(free=4096) if rank == 1 else real

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", full)
        message = refused(strategy(tmp_path))
    assert ("rank 1: " in message) == (rank == 0)
    assert "free" in message


@pytest.mark.wide
@on_ranks(2)
def test_an_error_of_the_drive_ends_every_rank(rank: int, world_size: int, tmp_path: Any) -> None:
    """In the middle of training, on one rank; the other learns which and why."""
    write, calls = os.pwritev, [0]

    def fails(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] > 150:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments)

    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "pwritev", fails)
        with pytest.raises(NVMeError if rank == 1 else RankFailedError) as failure:
            fit(strategy(tmp_path), OnDrive(), batches(numel=512))
    assert "Resume from a checkpoint" in str(failure.value)
    if rank == 0:
        assert "rank 1: NVMeError" in str(failure.value)
    assert time.monotonic() - start < wall(40)


@pytest.mark.wide
@on_ranks(2)
def test_a_folder_that_is_deleted_meanwhile(rank: int, world_size: int, tmp_path: Any) -> None:
    """Training does not notice: its file has no name."""

    class Deletes(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            shutil.rmtree(tmp_path / "drive", ignore_errors=True)

    trusted, ours = OnDrive(), OnDrive()
    fit(3, trusted)
    fit(strategy(tmp_path / "drive"), ours, callbacks=[Deletes()])
    assert_equal(weights(ours), weights(trusted), "weights")


_ENDLESS = """
import sys
from tests.dist.ranks import batches, fit
from tests.dist.test_offload_nvme import OnDrive, strategy
fit(strategy(sys.argv[1]), OnDrive(), batches(), max_epochs=-1)
"""


@pytest.mark.wide
def test_kill_9_leaves_nothing_on_the_drive(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _ENDLESS, str(tmp_path)]) as process:
        try:
            deadline = time.monotonic() + wall(60)
            while not _open_files(process.pid, tmp_path) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert _open_files(process.pid, tmp_path)  # it is at work
        finally:
            process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def _open_files(pid: int, folder: Path) -> list[str]:
    found: list[str] = []
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


class OwnClass(EachTensor):
    """Element-wise, and known to nobody."""

    def change(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(grad, 0.1)
        p.sub_(group["lr"] * mean)


class WithOwnClass(Net):
    def configure_optimizers(self) -> Any:
        return OwnClass(self.parameters(), lr=0.05)


class WithAmsgrad(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, amsgrad=True)


class WithForeach(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr, foreach=True)


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("net", "stages"),
    [(WithOwnClass, (3,)), *((each, (1, 2, 3)) for each in (WithOwnClass, WithAmsgrad, WithForeach))],
)
@on_ranks(2)
def test_optimizers_without_a_fused_update(
    rank: int, world_size: int, net: type[Net], stages: tuple[int, ...], tmp_path: Any
) -> None:
    """In host memory they step by themselves, to the same bits; on a drive, and in fewer bits, they are refused."""
    for stage in stages:
        trusted, ours = net(), net()
        fit(stage, trusted)
        fit(ZeROStrategy(stage, sharding={"min_unit_numel": 0}, offload={"optimizer": "cpu"}), ours)  # type: ignore[arg-type]
        assert ours.losses == trusted.losses
        assert_equal(weights(ours), weights(trusted), f"stage {stage}")
    name = "OwnClass" if net is WithOwnClass else "Adam"
    for options in ({"offload.nvme_path": str(tmp_path)}, {"offload.optimizer": "cpu", "precision.moments": "bf16"}):
        with pytest.raises(PlanError, match=f"{name}.*fused update.*AdamW") as refusal:
            fit(strategy(**{"path": tmp_path, **{k: v for k, v in options.items() if k != "offload.nvme_path"}}), net())
        assert "offload to 'cpu' with moments='fp32'" in str(refusal.value)


class GetsMomentum(Net):
    """In the middle of the fit."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["momentum"] = 0.9 * self.current_epoch


@pytest.mark.wide
@on_ranks(2)
def test_a_state_that_comes_late_is_refused_with_the_cure(rank: int, world_size: int, tmp_path: Any) -> None:
    with pytest.raises(PlanError, match=r"SGD.*'momentum_buffer'.*offload to 'cpu'"):
        fit(strategy(path=tmp_path), GetsMomentum())
