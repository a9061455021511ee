"""Checkpoints that nobody has named: those that cannot be read are skipped by name, and no code in them runs."""

from __future__ import annotations

import shutil
import signal
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from ls_strategy.checkpoint.manifest import FileRecord, Manifest
from ls_strategy.config import CheckpointConfig
from ls_strategy.errors import CheckpointError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import Net, on_ranks, trainer_of
from tests.dist.test_preemption import STEPS, At, Resumable, handler, run, saved, send
from tests.pickles import MakesFolder

pytestmark = pytest.mark.dist


class Notes:
    """Harmless, but torch does not know it."""


def keep(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "kept", filename="{step}", save_top_k=-1, **{"every_n_train_steps": 2, **options})


def spoil_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def spoil_meta(path: Path, data: bytes) -> None:
    """Its checksum in the manifest is right: whoever can write the one can write the other."""
    (path / "meta.pt").write_bytes(data)
    manifest = Manifest.from_json((path / "manifest.json").read_text())
    manifest.files["meta.pt"] = FileRecord(len(data), [(0, len(data), zlib.crc32(data))])
    (path / "manifest.json").write_text(manifest.to_json())


def bytes_of(value: Any, folder: Path, **options: Any) -> bytes:
    torch.save(value, folder / "made.pt", **options)
    data = (folder / "made.pt").read_bytes()
    (folder / "made.pt").unlink()
    return data


def whole(extra: Any) -> dict[str, Any]:
    """What a run would resume from, but for one entry."""
    return {"state_dict": {}, "optimizer_states": [], "lr_schedulers": [], "loops": {}, "global_step": 9, "x": extra}


CONTENTS: dict[str, Callable[[Path], bytes]] = {
    "code": lambda folder: bytes_of(whole(MakesFolder(folder / "ran")), folder),
    "code in the old format": lambda folder: bytes_of(
        whole(MakesFolder(folder / "ran")), folder, _use_new_zipfile_serialization=False
    ),
    "an object": lambda folder: bytes_of(whole(Notes()), folder),
    "garbage": lambda folder: b"\x80\x02c" * 100,
    "a list": lambda folder: bytes_of([1], folder),
}


def strategy_of(kind: str) -> Any:
    return "ddp" if kind == "ddp" else ZeROStrategy(stage=2, checkpoint=CheckpointConfig(format=kind))  # type: ignore[arg-type]


def fit(kind: str, folder: Path, rank: int, world_size: int, **options: Any) -> tuple[pl.Trainer, Net, list[str]]:
    """Fit as somebody does who trusts the own checkpoints. Return also the warnings."""
    trainer = trainer_of(
        strategy_of(kind),
        callbacks=[handler(), keep(folder)],
        max_epochs=1,
        default_root_dir=folder,
        use_distributed_sampler=False,
        enable_checkpointing=True,
    )
    module = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, Resumable(rank, world_size), weights_only=False, **options)
    return trainer, module, [str(each.message) for each in caught]


def prepare(kind: str, folder: Path, rank: int, world_size: int, content: str) -> Path:
    """The good checkpoints of steps 2 and 4 are older than that of step 5, which is spoilt."""
    callbacks = [handler(), keep(folder), At(0, 5, send(signal.SIGTERM))]
    run(strategy_of(kind), folder, rank, world_size, *callbacks, enable_checkpointing=True)
    assert saved(folder) == ["preemption/local/step=5.ckpt"]
    path = folder / "preemption" / "local" / "step=5.ckpt"
    if rank == 0:
        spoil = spoil_meta if path.is_dir() else spoil_file
        spoil(path, CONTENTS[content](folder))
    dist.barrier()
    return path


@pytest.mark.sample(3)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
@on_ranks(2)
def test_an_older_checkpoint_is_resumed_from_and_the_newer_one_is_named(rank, world_size, tmp_path, kind, content):
    path = prepare(kind, tmp_path, rank, world_size, content)
    trainer, module, messages = fit(kind, tmp_path, rank, world_size)
    assert (trainer.global_step, len(module.losses)) == (STEPS, STEPS - 4), "from step 4"
    assert not (tmp_path / "ran").exists()
    if rank == 0:
        (message,) = [each for each in messages if "cannot be read" in each and "PreemptionHandler" in each]
        assert str(path) in message
        if content == "code":
            assert "(posix.mkdir)" in message
    assert path.exists(), "what could not be read is not removed"


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["sharded", "ddp"])
@on_ranks(2)
def test_without_an_older_checkpoint_the_run_does_not_start_from_scratch(rank, world_size, tmp_path, kind):
    path = prepare(kind, tmp_path, rank, world_size, "code")
    good = tmp_path / "elsewhere.ckpt"
    if rank == 0:
        (tmp_path / "kept" / "step=4.ckpt").rename(good)
        shutil.rmtree(tmp_path / "kept")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"found no checkpoint that can be resumed from.*step=5\.ckpt"):
        fit(kind, tmp_path, rank, world_size)
    assert path.exists()
    dist.barrier()
    _, module, _ = fit(kind, tmp_path, rank, world_size, ckpt_path=str(good))
    assert len(module.losses) == STEPS - 4, "what the user names comes first"
    assert not (tmp_path / "ran").exists()


@pytest.mark.wide
@on_ranks(2)
def test_files_with_weights_only_are_not_resumed_from(rank, world_size, tmp_path):
    only = keep(tmp_path, save_weights_only=True, every_n_train_steps=1)
    run("ddp", tmp_path, rank, world_size, only, enable_checkpointing=True, max_steps=3)
    _, module, messages = fit("ddp", tmp_path, rank, world_size)
    assert len(module.losses) == STEPS
    assert not any("cannot be read" in message for message in messages)


@on_ranks(1)
def test_a_type_that_the_user_calls_safe_is_resumed_from(rank, world_size, tmp_path):
    run("ddp", tmp_path, rank, world_size, handler(), At(0, 5, send(signal.SIGTERM)))
    path = tmp_path / "preemption" / "local" / "step=5.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "notes": Notes()}, path)
    with torch.serialization.safe_globals([Notes]):
        _, module, _ = fit("ddp", tmp_path, rank, world_size)
    assert len(module.losses) == 2 * STEPS - 5
