"""What is on the disk: what a save may take away, single files, and the order in which everything reaches the disk."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ls_strategy import ZeROStrategy
from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.safetensors import export_safetensors
from ls_strategy.errors import CheckpointError
from ls_strategy.extras.callbacks.preemption import PreemptionHandler
from ls_strategy.testing import spawn
from tests.dist.ranks import Net, assert_equal, batches, fit, folders, on_ranks, quiet, trainer_of, weights
from tests.dist.test_checkpoint_crash import Wide, files_of_at_most
from tests.dist.test_checkpoint_folder import TEN, TEN_STEPS, Dropped, DroppedAgain, moments, seeded
from tests.dist.test_preemption import Resumable
from tests.marks import slow
from tests.os_calls import replaced
from tests.unit.checkpoint_folders import small_folder

pytestmark = pytest.mark.wide

# --- what a save may take away ----------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("save_as", ["sharded", "file"])
@on_ranks(2)
def test_a_path_that_is_no_checkpoints_is_an_error_on_all_ranks(
    rank: int, world_size: int, save_as: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Net()
    trainer = fit(3, module, max_epochs=1, save_as=save_as)
    folder = tmp_path / "work" / "checkpoints"
    for name in ("step=1.ckpt", "step=2.ckpt"):
        trainer.save_checkpoint(folder / name)
    if rank == 0:
        (folder / "notes.txt").write_text("mine")
    dist.barrier()
    monkeypatch.chdir(folder.parent)
    before = tree(tmp_path)
    for path, why in (
        ("checkpoints", "is a folder that holds something other than a checkpoint"),
        ("./", "is the working directory or contains it"),
        ("..", "is the working directory or contains it"),
        ("", "is empty"),
        ("checkpoints/notes.txt", "is a file that torch.save did not write"),
        ("/dev/null", "is a device, a pipe or a socket"),
    ):
        with pytest.raises(CheckpointError, match=rf"rank 0: Got the checkpoint path '{path}', which {why}"):
            trainer.save_checkpoint(path)
        dist.barrier()
        assert tree(tmp_path) == before
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    trainer.validate(module, batches(), verbose=False)  # all ranks are still together
    for kind in ("file", "sharded"):
        other = fit(3, Net(), max_epochs=1, save_as=kind)
        other.save_checkpoint(folder / "step=1.ckpt")  # the one kind replaces the other
        assert (folder / "step=1.ckpt").is_file() == (kind == "file")
        dist.barrier()


class SavesToAFolder(Net):
    """In the middle of training, to a folder that is not a checkpoint."""

    where: Path

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.where)
            raise AssertionError("it was saved")


@on_ranks(2)
def test_a_background_save_is_refused_at_the_call(rank: int, world_size: int, tmp_path: Path) -> None:
    if rank == 0:
        (tmp_path / "notes.txt").write_text("mine")
    module = SavesToAFolder()
    module.where = tmp_path
    with pytest.raises(CheckpointError, match=r"something other than a checkpoint: notes\.txt"):
        fit(
            folders(2, background=True),
            module,
        )
    assert tree(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_the_best_that_are_no_checkpoints_any_more_are_kept(
    rank: int, world_size: int, background: bool, tmp_path: Path
) -> None:
    """A user has put a file into a checkpoint that ``save_top_k`` removes."""

    class Keeper(Net):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_rank == 0 and self.trainer.global_step == 1:
                while not (tmp_path / "step=1.ckpt").exists():
                    time.sleep(0.01)
                (tmp_path / "step=1.ckpt" / "notes.txt").write_text("mine")

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
    strategy = folders(2, background=background)
    trainer = fit(strategy, Keeper(), callbacks=[saves], enable_checkpointing=True)
    dist.barrier()
    assert trainer.global_step == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step=1.ckpt", "step=8.ckpt"]
    assert (tmp_path / "step=1.ckpt" / "notes.txt").read_text() == "mine"


@on_ranks(2)
def test_a_link_that_would_take_a_users_folder_is_an_error_on_all_ranks(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """``last.ckpt`` is a folder of something else, made during training."""

    class Maker(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 2 and self.global_rank == 0:
                (tmp_path / "last.ckpt").unlink()
                (tmp_path / "last.ckpt").mkdir()
                (tmp_path / "last.ckpt" / "notes.txt").write_text("mine")

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_last="link", save_top_k=-1)
    with pytest.raises(CheckpointError, match=r"something other than a checkpoint: notes\.txt"):
        fit(2, Maker(), callbacks=[saves], enable_checkpointing=True)
    assert tree(tmp_path / "last.ckpt") == {"notes.txt": b"mine"}


# --- one file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [slow(1), 3])
@on_ranks(2)
def test_dropout_goes_on_from_one_file_bit_for_bit(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    """After seven steps, in the middle of an epoch, and after ten; and from a folder that was made one file."""
    options: dict[str, Any] = {"data": batches(TEN_STEPS)}
    whole = Dropped()
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)
    strategy, _ = seeded(stage, "32-true", **{"checkpoint.format": "file"})
    expected = moments(fit(strategy, whole, callbacks=[saves], enable_checkpointing=True, **options))
    half = fit(seeded(stage, "32-true", **{"checkpoint.format": "file"})[0], Dropped(), max_epochs=1, **options)
    half.save_checkpoint(tmp_path / "10.ckpt")
    fit(seeded(stage, "32-true")[0], Dropped(), max_epochs=1, **options).save_checkpoint(tmp_path / "folder.ckpt")
    if rank == 0:
        consolidate(tmp_path / "folder.ckpt", tmp_path / "one.ckpt")
    dist.barrier()
    for steps, name in ((7, "step=7.ckpt"), (TEN, "10.ckpt"), (TEN, "one.ckpt")):
        assert (tmp_path / name).is_file()
        rest = DroppedAgain()
        trainer = fit(
            seeded(stage, "32-true", **{"checkpoint.format": "file"})[0], rest, ckpt=tmp_path / name, **options
        )
        assert_equal(rest.losses, whole.losses[steps:], f"{name}: losses")
        assert_equal(weights(rest), weights(whole), f"{name}: weights")
        assert_equal(moments(trainer), expected, f"{name}: moments")
    found = torch.load(tmp_path / "10.ckpt", weights_only=True)
    assert sorted(found["ls_strategy"]["random_states"]) == ["rank_0", "rank_1"]
    half.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "random_states" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)["ls_strategy"]


@on_ranks(2)
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    """A full disk, or a quota."""
    module = Wide()
    trainer = fit(3, module, max_epochs=1, save_as="file")
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    expected = (tmp_path / "first.ckpt").read_bytes() if rank == 0 else b""
    for nbytes in (0, 1000, 30_000):
        for name in ("first.ckpt", "second.ckpt"):
            with (
                files_of_at_most(nbytes),
                pytest.raises(CheckpointError, match=rf"{name} failed: rank 0: OSError: .*File too large.*untouched"),
            ):
                trainer.save_checkpoint(tmp_path / name)
            assert [entry.name for entry in tmp_path.iterdir()] == ["first.ckpt"]
            dist.barrier()
    assert rank or (tmp_path / "first.ckpt").read_bytes() == expected
    trainer.validate(module, batches(), verbose=False)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    assert torch.load(tmp_path / "first.ckpt", weights_only=True)["global_step"] == 4


@on_ranks(2)
def test_training_goes_on_without_a_half_file(rank: int, world_size: int, tmp_path: Path) -> None:
    class Full(Wide):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 1:
                self.limits = files_of_at_most(30_000)
                self.limits.__enter__()

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=1)
    strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, checkpoint={"format": "file", "on_error": "continue"})
    trainer = trainer_of(strategy, callbacks=[saves], enable_checkpointing=True)
    module = Full()
    try:
        trainer.fit(module, batches())
    finally:
        module.limits.__exit__(None, None, None)
    dist.barrier()
    assert trainer.global_step == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["step=1.ckpt"]
    assert commit.newest([tmp_path]) == str(tmp_path / "step=1.ckpt")
    assert torch.load(tmp_path / "step=1.ckpt", weights_only=True)["global_step"] == 1


@pytest.mark.parametrize("on_save_error", ["raise", "continue"])
@on_ranks(2)
def test_preemption_on_a_full_disk_goes_on_from_the_last_whole_file(
    rank: int, world_size: int, on_save_error: Any, tmp_path: Path
) -> None:
    class Stopped(Wide):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 3:
                self.limits = files_of_at_most(30_000)
                self.limits.__enter__()
                os.kill(os.getpid(), signal.SIGUSR1)

    def run(module: Net, on_save_error: Any) -> Any:
        saves = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=2, save_top_k=-1)
        strategy = ZeROStrategy(
            2, sharding={"min_unit_numel": 0}, checkpoint={"format": "file", "on_error": on_save_error}
        )
        callbacks = [PreemptionHandler(check_every_s=0), saves]
        options: dict[str, Any] = {"enable_checkpointing": True, "use_distributed_sampler": False, "max_epochs": 1}
        trainer = trainer_of(strategy, callbacks=callbacks, default_root_dir=tmp_path, **options)
        trainer.fit(module, Resumable(rank, world_size))
        return trainer

    stopped = Stopped()
    try:
        with pytest.raises(CheckpointError, match=r"failed|was not saved"):
            run(stopped, on_save_error)
    finally:
        stopped.limits.__exit__(None, None, None)
    dist.barrier()
    assert [p.name for p in (tmp_path / "preemption" / "local").glob("*")] == []
    resumed = Wide()
    assert run(resumed, on_save_error).global_step == 8
    assert len(resumed.losses) == 6


class Elsewhere(TorchCheckpointIO):
    """A user's own, which knows where its checkpoints are."""

    removed: ClassVar[list[str]] = []

    def remove_checkpoint(self, path: Any) -> None:
        self.removed.append(Path(path).name)
        super().remove_checkpoint(path)


@on_ranks(2)
def test_a_users_checkpoint_io_removes_its_files(rank: int, world_size: int, tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1)
    strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, checkpoint="file", checkpoint_io=Elsewhere())
    fit(strategy, Net(), callbacks=[saves], enable_checkpointing=True)
    assert Elsewhere.removed == (["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"] if rank == 0 else [])


# --- in which order everything reaches the disk -----------------------------------------------------------------------

Event = tuple[float, str, str]
"""When, what, and the name of the file or folder."""


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """What this process syncs and renames, after it is done."""
    events: list[Event] = []
    plain = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor: int) -> None:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        plain["fsync"](descriptor)
        events.append((time.monotonic(), "sync", Path(name).name))

    def renamed(how: str) -> Any:
        def rename(source: Any, target: Any, **options: Any) -> None:
            events.append((time.monotonic(), "rename", Path(target).name))
            plain[how](source, target, **options)

        return rename

    exchange = commit.exchange_names

    def swap(a: str, b: str) -> bool:
        events.append((time.monotonic(), "rename", Path(b).name))
        return exchange(a, b)

    commit.exchange_names = swap
    try:
        with replaced({"fsync": fsync, "rename": renamed("rename"), "replace": renamed("replace")}):
            yield events
    finally:
        commit.exchange_names = exchange


def save_recorded(rank: int, world_size: int, path: Path, kind: str) -> list[list[Event]]:
    """A first save, and one that takes the place of another."""
    quiet()
    save_as = "file" if kind == "file" else "sharded"
    strategy = ZeROStrategy(
        3, sharding={"min_unit_numel": 0}, checkpoint={"format": save_as, "background": kind == "background"}
    )

    class Saves(Net):
        found: ClassVar[list[list[Event]]] = []

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step in (2, 4):
                with recorded() as events:
                    self.trainer.save_checkpoint(path)
                    self.trainer.strategy.wait_for_saves()
                    self.trainer.strategy.barrier()
                self.found.append(events)

    module = Saves()
    fit(strategy, module, max_epochs=1)
    assert threading.active_count() < 50
    return module.found


@pytest.mark.parametrize("kind", ["folder", "background", "file"])
def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path: Path, kind: str) -> None:
    """Power may fail: no rename outruns the bytes, or the names of files, that it stands for."""
    found = spawn(save_recorded, 2, tmp_path / "x.ckpt", kind, init_process_group=False)
    for number in range(2):
        events = sorted(event for events in found for event in events[number])
        [named] = [at for at, what, name in events if (what, name) == ("rename", "x.ckpt")]

        def synced(name: str, before: float, after: float = 0.0, events: list[Event] = events) -> bool:
            times = [at for at, what, found in events if what == "sync" and found.strip(".").startswith(name)]
            return any(after < at < before for at in times)

        ends = float("inf")
        assert synced(tmp_path.name, ends, after=named), "the folder's name for it"
        if kind == "file":
            assert synced("x.ckpt", named), events
            continue
        [marked] = [at for at, what, name in events if (what, name) == ("rename", "manifest.json")]
        for name in ("__0_0.distcp", "__1_0.distcp", "metadata", "meta.pt", "manifest.json.tmp"):
            assert synced(name, marked), f"{name} is not synced before the manifest has its name: {events}"
        assert synced("x.ckpt", marked), "the names of the files are not synced before the manifest has its name"
        assert synced("x.ckpt", named, after=marked), "the manifest's name is not synced before the rename"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path: Path, kind: str) -> None:
    source = small_folder(tmp_path / "x.ckpt")
    with recorded() as events:
        if kind == "folder":
            export_safetensors(source, tmp_path / "out", max_shard_bytes=90)
        else:
            consolidate(source, tmp_path / "out")
    [named] = [at for at, what, name in events if (what, name) == ("rename", "out")]
    synced = {name for at, what, name in events if what == "sync" and at < named}
    files = {p.name for p in (tmp_path / "out").iterdir()} if kind == "folder" else set()
    assert synced >= files | {"out"}
    assert len(files) == (4 if kind == "folder" else 0), "three files of weights and their index"
    assert [name for at, what, name in events if what == "sync" and at > named] == [tmp_path.name]
