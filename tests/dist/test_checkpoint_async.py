"""Saving in the background: what is saved is the state at the call, whatever training does meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from ls_strategy import ShardedEMA, ZeROStrategy
from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.background import BackgroundSaver, _Held
from ls_strategy.checkpoint.files import RankFile
from ls_strategy.checkpoint.manifest import is_committed, read_manifest
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import CheckpointError
from ls_strategy.testing import free_port, spawn, torchrun_env
from tests.dist.ranks import Net, fit, folders, on_ranks, saved
from tests.dist.test_offload import TIERS
from tests.marks import slow
from tests.models import Case, PrivateNet, loader, quiet, trainer_of

pytestmark = pytest.mark.wide

STEPS = 5
F32, B16 = "32-true", "bf16-true"
PLACES = [
    (0, None, "fp32", F32), (1, None, "fp32", F32), (2, None, "fp32", B16), (3, None, "bf16", F32),
    (1, "cpu", "fp32", F32), (2, "half", "int8", B16), (2, "nvme", "fp32", F32), (3, "cpu", "bf16", F32),
    (3, None, "fp32", F32), (3, "nvme", "int8", F32), (3, "param", "fp32", F32), (0, None, "int8", B16),
    (3, "nvme_param", "fp32", F32), (3, "mixed", "fp32", F32), (3, None, "int8", B16),
]  # fmt: skip


@contextmanager
def slow_writes(seconds: float) -> Iterator[None]:
    """Every tensor takes as long to be copied, and again to be written, so that training overtakes the save."""

    def slow(plain: Any) -> Any:
        def call(*args: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(seconds)
            plain(*args)

        return call

    with (
        mock.patch.object(RankFile, "add_tensor", slow(RankFile.add_tensor)),
        mock.patch.object(_Held, "copy", slow(_Held.copy)),
    ):
        yield


class WritesAfterSaves(pl.Callback):
    """Writes to parameters in all ways, to buffers and to states of the optimizer, when the next batch begins."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            return
        with torch.no_grad():
            pl_module.emb.weight.add_(0.01)
            pl_module.head.bias.data.mul_(0.9)
            pl_module.blocks[1].up.weight.detach()[0] += 0.5
            pl_module.bn.running_mean.add_(1)
        if batch_idx == 2:
            trainer.optimizers[0].state.clear()


def train(case: Case, world_size: int, folder: Path, *, every: int = 1) -> PrivateNet:
    """Save after every step, or after some."""
    module = PrivateNet(case)
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    callbacks = [save, WritesAfterSaves(), ShardedEMA(0.5)]
    trainer = trainer_of(case, world_size, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, loader(case, world_size))
    return module


def values(folder: Path) -> dict[str, Any]:
    """Everything of a checkpoint but what depends on its path."""
    checkpoint = saved(folder)
    keys = ("state_dict", "ema_state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step")
    return {k: checkpoint[k] for k in keys}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def every_place(rank: int, world_size: int, places: list[Any]) -> list[str]:
    """What differs between saves that training waits for and saves that it overtakes."""
    quiet()
    root = Path(tempfile.gettempdir())
    problems: list[str] = []
    for stage, tier, moments, precision in places:
        name = f"{stage}-{tier}-{moments}-{precision}"
        options = {
            "offload.nvme_path": str(root / "nvme"),
            "precision.moments": moments,
            "checkpoint.format": "sharded",
            **({} if tier is None else TIERS[tier]),
        }
        traits = ("private", "tied", "frozen", "buffers", "uneven")
        given = tuple(options.items())
        case = Case(stage=stage, traits=traits, fused=None, precision=precision, steps=STEPS, options=given)
        trusted = train(case, world_size, root / f"{name}-sync")
        behind = replace(case, options=(*case.options, ("checkpoint.background", True)))
        with slow_writes(0.002):
            module = train(behind, world_size, root / f"{name}-async")
        if module.result.losses != trusted.result.losses:
            problems.append(f"{name}: losses")
        for step in range(1, STEPS + 1) if rank == 0 else ():
            a, b = (values(root / f"{name}-{kind}" / f"step={step}.ckpt") for kind in ("sync", "async"))
            problems += [f"{name}, step {step}: {key}" for key in a if not same(a[key], b[key])]
    return problems


@pytest.mark.parametrize(
    ("world_size", "places"), [(1, PLACES[2::3]), (2, PLACES[8:9]), slow(1, PLACES), slow(2, PLACES)]
)
def test_training_that_overtakes_a_save_does_not_change_it(
    world_size: int, places: list[Any], tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for problems in spawn(every_place, world_size, places, init_process_group=False, timeout_s=150):
        assert problems == []


class SavesTwice(Net):
    """Saves after the first and the third step, and notes how long that took."""

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.trainer.global_step in (1, 3):
            started = time.perf_counter()
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / f"{self.trainer.global_step}.ckpt")
            self.seconds = time.perf_counter() - started


@on_ranks(2)
def test_a_save_in_the_background_is_there_after_the_fit(rank: int, world_size: int, tmp_path: Path) -> None:
    module = SavesTwice()
    with slow_writes(0.01):
        trainer = fit(
            folders(3, background=True),
            module,
            default_root_dir=tmp_path,
        )
    for step in (1, 3):
        assert read_manifest(tmp_path / f"{step}.ckpt").step == step
    trainer.save_checkpoint(tmp_path / "after.ckpt")  # nobody would wait for this one later
    assert is_committed(tmp_path / "after.ckpt")


@contextmanager
def one_rank_fails(rank: int, when: str) -> Iterator[None]:
    """Rank 1 cannot finish its file of the checkpoint whose path ends with ``when``."""
    plain = RankFile.close

    def close(self: RankFile) -> Any:
        if rank == 1 and when in str(self._file.name):
            raise OSError(28, "No space left on device")
        return plain(self)

    RankFile.close = close  # type: ignore[method-assign]
    try:
        yield
    finally:
        RankFile.close = plain  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("when", "steps", "left"), [("1.ckpt", 3, []), ("3.ckpt", 8, ["1.ckpt"])], ids=["by the next save", "at the end"]
)
@on_ranks(2)
def test_an_error_in_the_background_is_raised(
    rank: int, world_size: int, when: str, steps: int, left: list[str], tmp_path: Path
) -> None:
    module = SavesTwice()
    message = rf"{re.escape(when)} failed: rank 1: OSError: .*No space left"
    with one_rank_fails(rank, when), pytest.raises(CheckpointError, match=message):
        fit(folders(3, background=True), module, default_root_dir=tmp_path)
    assert len(module.losses) == steps
    assert [f.name for f in tmp_path.iterdir()] == left


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_training_goes_on_and_the_last_checkpoint_stays(
    rank: int, world_size: int, background: bool, tmp_path: Path
) -> None:
    strategy = ZeROStrategy(
        2,
        sharding={"min_unit_numel": 0},
        checkpoint={"format": "sharded", "background": background, "on_error": "continue"},
    )
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    with one_rank_fails(rank, "step=4"):
        module = Net()
        fit(strategy, module, callbacks=[save], max_epochs=1, enable_checkpointing=True)
    assert len(module.losses) == 4
    assert [f.name for f in tmp_path.iterdir()] == ["step=2.ckpt"]


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_the_link_to_the_last_one_is_never_broken(
    rank: int, world_size: int, background: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    broken: list[str] = []

    def watch(owner: str, name: str, plain: Any) -> None:
        def watched(*args: Any) -> None:
            plain(*args)
            last = tmp_path / "last.ckpt"
            if last.is_symlink() and not is_committed(last):
                broken.append(f"after {name}{args}")

        monkeypatch.setattr(f"{owner}.{name}", watched)

    watch("ls_strategy.checkpoint.commit", "commit", commit.commit)
    watch("ls_strategy.lightning.checkpointing.saving", "link_checkpoint", commit.link)
    watch("ls_strategy.lightning.checkpointing.saving", "remove_checkpoint", commit.remove)
    strategy = folders(2, background=background)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last="link")
    with slow_writes(0.002):
        fit(strategy, Net(), callbacks=[save], enable_checkpointing=True)
    dist.barrier()  # rank 0 removes
    assert broken == []
    assert sorted(f.name for f in tmp_path.iterdir()) == ["last.ckpt", "step=8.ckpt"]
    assert (tmp_path / "last.ckpt").resolve().name == "step=8.ckpt"
    resumed = Net()
    fit(2, resumed, ckpt="last", callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True, max_epochs=3)
    assert len(resumed.losses) == 4


@on_ranks(2)
def test_copies_wait_for_nobody(rank: int, world_size: int, tmp_path: Path, monkeypatch: Any) -> None:
    """The call returns before a byte is written, also where the disk does nothing at all for a while."""
    plain = BackgroundSaver.submit
    returned: list[bool] = []

    def submit(self: BackgroundSaver, *args: Any) -> None:
        plain(self, *args)
        returned.append(not list(tmp_path.rglob("*.distcp")))

    monkeypatch.setattr(BackgroundSaver, "submit", submit)
    begin = commit.begin
    monkeypatch.setattr(commit, "begin", lambda *args: (time.sleep(0.5), begin(*args))[1])
    fit(
        folders(3, background=True),
        SavesTwice(),
        default_root_dir=tmp_path,
    )
    assert returned[0]


class CountsWaits(Net):
    """Saves after every step, and notes where the training thread waited for other ranks in the third call."""

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        strategy: Any = self.trainer.strategy
        strategy.wait_for_saves()  # of the call before
        plain, waits = Comm.blocking, list[str]()
        with mock.patch.object(
            Comm, "blocking", lambda self, kind, *a, **k: (waits.append(kind), plain(self, kind, *a, **k))[1]
        ):
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / f"{self.global_step}.ckpt")
        if self.global_step == 3:
            self.waits = waits


@on_ranks(2)
def test_a_call_waits_for_the_other_ranks_once(rank: int, world_size: int, tmp_path: Path) -> None:
    """The threads have the cores afterwards: a rank that met the others at the end would wait for theirs."""
    module = CountsWaits()
    fit(folders(3, background=True), module, default_root_dir=tmp_path)
    assert module.waits == ["all_reduce"]


LOST = """
import os, signal, sys
import torch
from ls_strategy import ShardedEMA, ZeROStrategy
from ls_strategy.checkpoint.files import RankFile
from tests.dist.ranks import Net, fit

torch.set_num_threads(1)

def is_lost(self):
    os.kill(os.getpid(), signal.SIGKILL)

class Waits(Net):
    def training_step(self, batch, i):
        if i == 2:
            if os.environ["RANK"] == "1":
                RankFile.close = is_lost
            self.trainer.save_checkpoint(sys.argv[1] + "/lost.ckpt")
            self.trainer.strategy.wait_for_saves()
        return super().training_step(batch, i)

fit(ZeROStrategy(2, checkpoint={"format": "sharded", "background": True}), Waits(), default_root_dir=sys.argv[1])
"""


def test_a_rank_that_is_lost_during_a_save_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody else would end the ranks of another node: an elastic run restarts when one of its ranks fails."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOST, str(tmp_path)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **torchrun_env(rank, 2, port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[1].wait(140) == -signal.SIGKILL
        _, said = ranks[0].communicate(timeout=30)
        assert ranks[0].returncode == 1, said
        assert not (tmp_path / "lost.ckpt").exists()
    finally:
        for rank in ranks:
            rank.kill()
