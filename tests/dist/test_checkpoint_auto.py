"""``checkpoint="auto"``: one file in Lightning's format while it is small, a folder beyond, and runs that change."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ShardedEMA, ZeROStrategy, load_from_checkpoint
from ls_strategy.checkpoint import background
from ls_strategy.checkpoint.commit import newest
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.describe import describe, verify_all
from ls_strategy.checkpoint.manifest import is_committed
from ls_strategy.checkpoint.save import FileSave
from ls_strategy.checkpoint.shared_file import SharedArchive
from ls_strategy.checkpoint.source import OURS, read_checkpoint
from ls_strategy.config import nested
from ls_strategy.errors import CheckpointError
from ls_strategy.fabric.strategy import ZeROFabricStrategy
from ls_strategy.lightning.checkpointing import kind as checkpoint_kind
from tests.dist.ranks import WIDTH, Net, assert_close, assert_equal, fit, on_ranks, trainer_of, weights
from tests.dist.test_checkpoint_order import Chain
from tests.limits import wall
from tests.marks import slow

OPTIONS: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {},
    "2": {},
    "3": {"sharding.min_unit_numel": 0},
    "3, host": {"sharding.min_unit_numel": 0, "offload.optimizer": "cpu", "offload.parameters": "cpu"},
    "1, 8 bits": {"precision.moments": "int8"},
}


def strategy(name: str | int = "3", **options: Any) -> ZeROStrategy:
    """With checkpoints as they are by default."""
    return ZeROStrategy(int(str(name)[0]), **nested({**OPTIONS[str(name)], **options}))  # type: ignore[arg-type]


def limit(nbytes: int) -> Any:
    """The largest file."""
    return patch.object(checkpoint_kind, "LARGEST_FILE", nbytes)


def kind(path: Path) -> str:
    return "folder" if path.is_dir() else "file" if path.is_file() else "nothing"


@contextmanager
def lines() -> Iterator[list[str]]:
    """What the strategy logs about kinds."""
    found: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "checkpoint='auto'" in record.getMessage():
                found.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Keeps()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# --- the kind ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["3", "0", "1", slow("2"), "3, host", slow("1, 8 bits")])
@on_ranks(2)
def test_a_small_one_is_the_file_that_ddp_writes(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    paths = {}
    for each in ("ddp", name):
        trainer = fit("ddp" if each == "ddp" else strategy(name), Net(), max_epochs=1)
        paths[each] = tmp_path / f"{each}.ckpt"
        trainer.save_checkpoint(paths[each])
    if rank == 0:
        assert kind(paths[name]) == "file"
        theirs, ours = (torch.load(paths[each], weights_only=True) for each in ("ddp", name))
        assert set(ours) - {OURS, "ZeROPrecision"} == set(theirs)
        if "8" in name:  # a code has 3 bits of mantissa, which bounds the error of every update
            start = Net().state_dict()
            moved, must = ({k: v - start[k] for k, v in each["state_dict"].items()} for each in (ours, theirs))
            assert_close(moved, must, "updates", 2.0**-3)
        else:
            assert_close(ours["state_dict"], theirs["state_dict"], "weights")
        mine, trusted = ours["optimizer_states"][0], theirs["optimizer_states"][0]
        assert list(mine["state"]) == list(trusted["state"])
        assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in trusted["param_groups"]]
        for loaded in (Net.load_from_checkpoint(paths[name]), load_from_checkpoint(Net, paths[name])):
            assert_equal(loaded.state_dict(), ours["state_dict"], "loaded")
        consolidate(paths[name], tmp_path / "one.ckpt")
        assert_equal(read_checkpoint(tmp_path / "one.ckpt")["state_dict"], ours["state_dict"], "consolidated")


@pytest.mark.wide
@on_ranks(2)
def test_the_limit_counts_weights_and_states_and_the_log_says_which(rank: int, world_size: int, tmp_path: Path) -> None:
    numel = sum(p.numel() for p in Net().parameters())
    states = 3 * 4 * numel  # weights and two moments, in fp32; step counts are few
    for nbytes, expected in ((states + 1000, "file"), (states - 1, "folder")):
        with limit(nbytes), lines() as log:
            trainer = fit(strategy(3), Net(), max_epochs=1)
            for number in range(2):
                trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
                assert rank or kind(tmp_path / f"{number}.ckpt") == expected
        assert len(log) == (rank == 0), log
        why = r"weights and optimizer states together have .* KiB, (at most|more than) .* KiB"
        assert rank or re.search(why, log[0])
        assert rank or ("single files" if expected == "file" else "are folders") in log[0]


class Grows(Net):
    """A buffer that is larger on one rank: each alone would decide otherwise."""

    def __init__(self, numel: int = 0) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(numel))


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [3, 1])
@on_ranks(2)
def test_ranks_that_know_different_sizes_decide_alike(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    numel = sum(p.numel() for p in Net().parameters())
    for larger in range(2):
        with limit(3 * 4 * numel + 10_000):
            module = Grows()
            trainer = fit(strategy(stage), module, max_epochs=1)
            module.queue = torch.zeros(10_000 if rank == larger else 1)
            trainer.save_checkpoint(tmp_path / f"{larger}.ckpt")
            assert rank or kind(tmp_path / f"{larger}.ckpt") == "folder"


class Lora(Net):
    def build(self) -> None:
        super().build()
        self.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.wide
@on_ranks(2)
def test_what_only_folders_can_hold_is_a_folder(rank: int, world_size: int, tmp_path: Path) -> None:
    with lines() as log:
        trainer = fit(strategy(3, **{"checkpoint.frozen": False}), Lora(), max_epochs=1)
        trainer.save_checkpoint(tmp_path / "frozen.ckpt")
    assert rank or describe(tmp_path / "frozen.ckpt").left_out
    assert rank or "checkpoint.frozen=False" in log[0]
    options = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
    data = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(3, (16,))), batch_size=4)
    with lines() as log:
        trainer = trainer_of(ZeROStrategy(1, **nested(options)), max_epochs=1)
        trainer.fit(Chain(), data)
        trainer.save_checkpoint(tmp_path / "pipeline.ckpt")
    assert kind(tmp_path / "pipeline.ckpt") == "folder"
    assert rank or "pipeline" in log[0]


# --- runs that change -------------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("last", ["link", True])
@on_ranks(2)
def test_a_run_may_change_from_save_to_save(
    rank: int, world_size: int, background: bool, last: Any, tmp_path: Path
) -> None:
    class Alternates(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            checkpoint_kind.LARGEST_FILE = 0 if checkpoint_kind.LARGEST_FILE else 2 << 30

    keeps = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=2, save_last=last, monitor="step")
    keeps.mode = "max"
    module = Net()
    with limit(0):
        trainer = fit(
            strategy(3, **{"checkpoint.background": background}),
            module,
            callbacks=[Alternates(), keeps],
            enable_checkpointing=True,
        )
    trainer.strategy.barrier()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["last.ckpt", "step=7.ckpt", "step=8.ckpt"], names
    assert {kind(tmp_path / f"step={n}.ckpt") for n in (7, 8)} == {"file", "folder"}
    if rank == 0:
        assert newest([tmp_path]) in {str(tmp_path / n) for n in ("last.ckpt", "step=8.ckpt")}
        for name in names:
            checkpoint = read_checkpoint(tmp_path / name, weights_only=False)
            assert checkpoint["global_step"] == (7 if "7" in name else 8), name
            if kind(tmp_path / name) == "folder":
                assert verify_all(tmp_path / name) == []
        assert_equal(
            {n: v + 0 for n, v in read_checkpoint(tmp_path / "last.ckpt")["state_dict"].items()},
            weights(Net.load_from_checkpoint(tmp_path / "step=8.ckpt")),
            "the last one",
        )
    dist.barrier()
    for path, target in (("step=7.ckpt", 1), ("step=8.ckpt", "ddp")):
        resumed = Net()
        runner = fit(target, resumed, ckpt=tmp_path / path, max_epochs=3)
        assert runner.global_step == 12


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("first", ["sharded", "file"])
@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_either_takes_the_place_of_the_other(
    rank: int, world_size: int, first: str, background: bool, tmp_path: Path
) -> None:
    class Saves(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                self.trainer.save_checkpoint(tmp_path / "x.ckpt")

    for number, form in enumerate((first, "file" if first == "sharded" else "sharded", first)):
        options = {"checkpoint.format": form, "checkpoint.background": background}
        module = Saves()
        module.register_buffer("mark", torch.tensor(number))
        fit(strategy(2, **options), module, max_epochs=1)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["x.ckpt"]
        assert kind(tmp_path / "x.ckpt") == ("file" if form == "file" else "folder")
        assert read_checkpoint(tmp_path / "x.ckpt")["state_dict"]["mark"] == number
        dist.barrier()


@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["memory://checkpoints-auto", "local"])
def test_on_another_file_system_too(scheme: str, tmp_path: Path) -> None:
    place = f"{tmp_path}/x.ckpt" if scheme == "local" else f"{scheme}/x.ckpt"
    for number, form in enumerate(("sharded", "file", "file", "sharded")):
        module = Net()
        module.register_buffer("mark", torch.tensor(number))
        trainer = fit(strategy(1, **{"checkpoint.format": form}), module, max_epochs=1)
        trainer.save_checkpoint(place)
        assert int(read_checkpoint(place)["state_dict"]["mark"]) == number
        trainer.strategy.remove_checkpoint(place)
        with pytest.raises(CheckpointError, match="does not exist"):
            read_checkpoint(place)
        trainer.save_checkpoint(place)


# --- in the background ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_processes_that_have_saved_before_save_with_those_that_have_not(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """As where one rank has trained alone before, or another process has taken the place of a lost one."""
    if rank == 1:
        alone = background.BackgroundSaver(0, 1, torch.device("cpu"))
        alone.submit(FileSave(str(tmp_path / "alone.ckpt"), {}, lambda value: 0), lambda *_: None)
        alone.wait()
        alone.close()
    for run in ("first", "second"):  # which share a rendezvous store
        options = {"checkpoint.background": True, "checkpoint.format": "sharded"}
        save = ModelCheckpoint(tmp_path / run, every_n_train_steps=1, save_top_k=-1)
        trainer = fit(strategy(2, **options), Net(), callbacks=[save], enable_checkpointing=True)
        assert len([p for p in (tmp_path / run).iterdir() if is_committed(p)]) == trainer.global_step > 1


class Counts(Net):
    """With a buffer that every step changes in place."""

    def build(self) -> None:
        super().build()
        self.register_buffer("aaa", torch.zeros(3))

    def training_step(self, batch: Any, i: int) -> Any:
        self.aaa.add_(1)
        return super().training_step(batch, i)


class Saves(Counts):
    """Saves after the second step, and goes on to train while the file is being written."""

    path: Path
    saved: dict[str, Tensor]
    seconds = 0.0

    def build(self) -> None:
        super().build()
        self.overtakes = threading.Event()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.saved = weights(self)
            started = time.perf_counter()
            self.trainer.save_checkpoint(self.path)
            self.seconds = time.perf_counter() - started

    def training_step(self, batch: Any, i: int) -> Any:
        if self.global_step == 3:
            dist.barrier()
            assert not self.path.exists()  # training overtakes the save
            dist.barrier()  # no rank writes before all have looked
            self.overtakes.set()
        return super().training_step(batch, i)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["0", "1", "3", "3, host"])
@on_ranks(2)
def test_training_that_overtakes_a_file_does_not_change_it(
    rank: int, world_size: int, name: str, tmp_path: Path
) -> None:
    plain = background.run

    def later(*args: Any) -> Any:
        assert module.overtakes.wait(30)
        return plain(*args)

    module = Saves()
    module.path = tmp_path / "x.ckpt"
    with patch.object(background, "run", later):
        trainer = fit(strategy(name, **{"checkpoint.background": True}), module)
    assert kind(module.path) == "file"
    assert module.seconds < wall(15)
    assert_equal(read_checkpoint(module.path)["state_dict"], module.saved, "weights")
    whole, resumed = weights(module), Counts()
    fit(strategy(name), resumed, ckpt=module.path)
    assert_equal(weights(resumed), whole, "resumed")
    assert trainer.global_step == 8


@pytest.mark.wide
@pytest.mark.parametrize("on_error", ["raise", "continue"])
@on_ranks(2)
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(
    rank: int, world_size: int, on_error: str, tmp_path: Path
) -> None:
    plain, calls = SharedArchive.complete, []

    def fails(archive: SharedArchive, path: str, pieces: Any) -> int:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return plain(archive, path, pieces)

    keeps = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1)
    options = {"checkpoint.background": True, "checkpoint.on_error": on_error}
    with patch.object(SharedArchive, "complete", fails):
        if on_error == "raise":
            with pytest.raises(CheckpointError, match=r"step=4\.ckpt failed: rank 0: OSError.*No space left"):
                fit(strategy(3, **options), Net(), callbacks=[keeps], enable_checkpointing=True)
        else:
            fit(strategy(3, **options), Net(), callbacks=[keeps], enable_checkpointing=True)
    dist.barrier()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == (["step=2.ckpt"] if on_error == "raise" else ["step=2.ckpt", "step=8.ckpt"]), names


# --- what programs do with it -----------------------------------------------------------------------------------------


class Hooked(Net):
    """Removes, changes and adds weights on every rank, as programs do that know DDP."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["first.bias"]
        state["last.bias"] = state["last.bias"] * 2
        checkpoint["norm"] = float(state["first.weight"].norm())
        self.seen.append(checkpoint["norm"])


class Renames(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{k}": v for k, v in checkpoint["state_dict"].items()}
        checkpoint["first"] = float(checkpoint["state_dict"]["net.first.weight"].sum())


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("by", ["module", "callback"])
@on_ranks(2)
def test_hooks_on_every_rank_get_what_ddp_gives_them(rank: int, world_size: int, by: str, tmp_path: Path) -> None:
    found, seen = [], []
    for each in ("ddp", "0", "1", "3"):
        module = Hooked() if by == "module" else Net()
        trainer = fit(
            each if each == "ddp" else strategy(each),
            module,
            max_epochs=1,
            callbacks=[] if by == "module" else [Renames()],
        )
        trainer.save_checkpoint(tmp_path / f"{each}.ckpt")
        found.append(torch.load(tmp_path / f"{each}.ckpt", weights_only=True))
        seen.append(module.seen)
        dist.barrier()
    for theirs, ours, values in zip([found[0]] * 3, found[1:], seen[1:], strict=True):
        assert_close(ours["state_dict"], theirs["state_dict"], "weights")
        for key in ("norm", "first"):
            assert_close(ours.get(key, 0.0), theirs.get(key, 0.0), key)
        assert_close(values, seen[0], "on this rank")


class Notes(TorchCheckpointIO):
    """A user's own way to write checkpoints."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(f"save {Path(path).name}")
        super().save_checkpoint(checkpoint, path)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(f"remove {Path(path).name}")
        super().remove_checkpoint(path)


@on_ranks(2)
def test_a_users_plugin_writes_and_removes_the_files(rank: int, world_size: int, tmp_path: Path) -> None:
    notes = Notes()
    keeps = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=1)
    fit(strategy(3), Net(), callbacks=[keeps], enable_checkpointing=True, plugins=[notes], max_epochs=1)
    calls = ["save step=2.ckpt", "save step=4.ckpt", "remove step=2.ckpt"]
    assert notes.calls == (calls if rank == 0 else [])


@pytest.mark.wide
@on_ranks(2)
def test_an_average_goes_into_the_file(rank: int, world_size: int, tmp_path: Path) -> None:
    module, whole = Net(), Net()
    trainer = fit(strategy(3), Net(), max_epochs=1, callbacks=[ShardedEMA(0.5)])
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    averages = []
    for each, stage, ckpt in ((module, 1, tmp_path / "half.ckpt"), (whole, 3, None)):
        trainer = fit(strategy(stage), each, ckpt=ckpt, callbacks=[ShardedEMA(0.5)])
        trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        averages.append(read_checkpoint(tmp_path / f"{stage}.ckpt")["ema_state_dict"])
        assert kind(tmp_path / f"{stage}.ckpt") == "file"
    assert_close(weights(module), weights(whole), "weights")
    assert_close(averages[0], averages[1], "averages")


@on_ranks(2)
def test_fabric_decides_so_too(rank: int, world_size: int, tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=ZeROFabricStrategy(3))
    fabric.launch()
    parts: dict[str, Any] = {}
    for number in range(2):
        module = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        model, optimizer = fabric.setup(module, optimizer)
        fabric.backward(model(torch.ones(2, WIDTH)).sum())
        optimizer.step()
        parts |= {f"model{number}": model, f"optimizer{number}": optimizer}
    one = {k: parts[k] for k in ("model0", "optimizer0")}
    cases = [("file", 2 << 30, one), ("folder", 100, one), ("file", 2 << 30, parts)]
    for number, (expected, nbytes, state) in enumerate(cases):
        path = tmp_path / f"{number}.ckpt"
        with limit(nbytes):
            fabric.save(path, {**state, "step": number})
        assert kind(path) == expected
        before = weights(parts["model0"])
        assert fabric.load(path, {**state, "step": 0}) == {}
        assert_equal(weights(parts["model0"]), before, "loaded")
    with limit(100), pytest.raises(Exception, match='or set checkpoint="file"'):
        fabric.save(tmp_path / "both.ckpt", parts)


# --- what is in it ----------------------------------------------------------------------------------------------------


class Versioned(nn.Linear):
    """What version 1 saved was transposed; torch tells a module by which version a state dict was saved."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *args)


class WithVersion(Net):
    def build(self) -> None:
        super().build()
        self.last = Versioned(WIDTH, WIDTH)


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["file", "sharded"])
@on_ranks(2)
def test_modules_learn_which_version_saved_them(rank: int, world_size: int, form: str, tmp_path: Path) -> None:
    whole, module = WithVersion(), WithVersion()
    fit(strategy(3), whole)
    trainer = fit(strategy(3, **{"checkpoint.format": form}), module, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    dist.barrier()
    for target in (strategy(1), "ddp"):
        resumed = WithVersion()
        fit(target, resumed, ckpt=tmp_path / "x.ckpt")
        assert_close(weights(resumed), weights(whole), "resumed")
    half = weights(module)
    consolidate(tmp_path / "x.ckpt", tmp_path / f"{rank}.ckpt")
    for path in ("x.ckpt", f"{rank}.ckpt"):
        for loaded in (
            load_from_checkpoint(WithVersion, tmp_path / path),
            WithVersion.load_from_checkpoint(tmp_path / path),
        ):
            assert_equal(weights(loaded), half, path)


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["3", "1"])
@on_ranks(2)
def test_a_damaged_file_is_not_resumed(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    trainer = fit(strategy(name), Net(), max_epochs=1)
    path = tmp_path / "x.ckpt"
    trainer.save_checkpoint(path)
    fit(strategy(name), Net(), ckpt=path)
    if rank == 0:
        assert verify_all(path) == []
        first = torch.load(path, weights_only=True)["state_dict"]["first.weight"].numpy().tobytes()
        data = bytearray(path.read_bytes())
        at = bytes(data).index(first)
        data[at + 40] ^= 1
        path.write_bytes(data)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"x\.ckpt is damaged: its record"):
        fit(strategy(name), Net(), ckpt=path)


@on_ranks(2)
def test_names_can_be_removed_on_ranks_without_the_values(rank: int, world_size: int, tmp_path: Path) -> None:
    class Removes(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]["first.bias"]
            assert checkpoint["state_dict"]["first.weight"].shape == (WIDTH, WIDTH)

    with limit(0):
        trainer = fit(strategy(3, **{"checkpoint.format": "file"}), Removes(), max_epochs=1)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert "first.bias" not in read_checkpoint(tmp_path / "x.ckpt")["state_dict"]
