"""Checkpoint folders under strategies that know nothing of them, and in programs that import Lightning alone.

Trusted runs: the same fit under DDP without a break, and what Lightning reads from one file of the same state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.manifest import is_committed
from tests.dist.ranks import (
    Net,
    assert_close,
    assert_equal,
    batches,
    fit,
    on_ranks,
    samples,
    trainer_of,
    weights,
)
from tests.dist.test_checkpoint_file import WithHistory
from tests.marks import slow

pytestmark = pytest.mark.wide

DDP = "ddp_find_unused_parameters_true"


def states(trainer: pl.Trainer) -> list[Any]:
    return [optimizer.state_dict()["state"] for optimizer in trainer.strategy.optimizers]


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, 3])
@on_ranks(2)
def test_ddp_goes_on_from_a_folder_as_if_nothing_had_happened(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    """Losses, weights and optimizer states of the second epoch are those of one DDP fit over both."""
    folder = tmp_path / "half.ckpt"
    whole, resumed = WithHistory(), WithHistory()
    trusted = fit(DDP, whole)
    fit(stage, WithHistory(), max_epochs=1).save_checkpoint(folder)
    trainer = fit(DDP, resumed, ckpt=folder)
    assert folder.is_dir()
    assert len(resumed.losses) == len(whole.losses) // 2
    assert_close(resumed.losses, whole.losses[len(resumed.losses) :], "losses")
    assert_close(weights(resumed), weights(whole), "weights")
    for mine, expected in zip(states(trainer), states(trusted), strict=True):
        assert mine.keys() == expected.keys()
        for number, state in expected.items():
            assert_close(dict(sorted(mine[number].items())), dict(sorted(state.items())), f"state of {number}")
    assert trainer.global_step == trusted.global_step


@on_ranks(2)
def test_evaluation_takes_a_folder_by_path_and_by_name(rank: int, world_size: int, tmp_path: Path) -> None:
    """As ``best`` and ``last`` of a callback that has seen nothing but its folder, too."""

    def kept() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename="net", monitor="val_loss", save_last=True)

    trained, callback = Net(), kept()
    zero = trainer_of(3, callbacks=[callback], enable_checkpointing=True)
    zero.fit(trained, batches(), batches(seed=2))
    best = callback.best_model_path
    expected = trainer_of(3).validate(trained, batches(seed=2), ckpt_path=best, verbose=False)
    for name in (best, "best"):
        trainer = trainer_of("ddp", callbacks=[callback], enable_checkpointing=True)
        found = trainer.validate(Net(), batches(seed=2), ckpt_path=name, verbose=False)
        assert found == [pytest.approx(expected[0])], name
    trainer = trainer_of("ddp", callbacks=[kept()], enable_checkpointing=True)
    for run in (trainer.test, trainer.predict):
        module = Net()
        assert run(module, batches(seed=2), ckpt_path="last")
        assert_equal(weights(module), weights(trained), run.__name__)


@on_ranks(2)
def test_ddp_replaces_the_folders_that_it_goes_on_from(rank: int, world_size: int, tmp_path: Path) -> None:
    """Lightning's own writer would move its file *into* a folder of that name, and the old weights would stay."""

    def kept() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename="net-{epoch}", save_last=True, enable_version_counter=False)

    for strategy, epochs in ((2, 1), ("ddp", 2), (2, 3), ("ddp", 4)):
        module = Net()
        trainer = trainer_of(strategy, callbacks=[kept()], enable_checkpointing=True, max_epochs=epochs)
        trainer.fit(module, batches(), ckpt_path="last" if epochs > 1 else None)
        trainer.save_checkpoint(tmp_path / "mine.ckpt")
        trainer.strategy.barrier()
        for name in ("last.ckpt", "mine.ckpt"):
            path = tmp_path / name
            assert path.is_dir() == (strategy == 2), f"{name} after {epochs} epochs"
            again = Net.load_from_checkpoint(path)
            assert_equal(weights(again), weights(module), f"{name} after {epochs} epochs")
        assert len(module.losses) == 4
        assert sorted(p.name for p in tmp_path.glob("*.ckpt"))[:2] == ["last.ckpt", "mine.ckpt"]
        trainer.strategy.barrier()


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
@on_ranks(2)
def test_the_learning_rate_finder_restores_what_it_saved(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    """And the fit that follows, with the rate found, is DDP's. Batch sizes are not searched on several ranks."""
    found = {}
    for strategy in ("ddp", stage):
        module = Net()
        before = weights(module)
        trainer = trainer_of(strategy, default_root_dir=tmp_path, max_epochs=1)
        finder = Tuner(trainer).lr_find(module, batches(numel=64), num_training=30)
        assert finder is not None
        assert_equal(weights(module), before, f"{strategy}, weights after the search")
        with pytest.raises(ValueError, match="distributed"):
            Tuner(trainer).scale_batch_size(module, batches())
        searched = len(module.losses)
        trainer.fit(module, batches())
        found[strategy] = (finder.results["loss"], module.lr, module.losses[searched:], weights(module))
        assert not list(tmp_path.glob(".*.ckpt")), "the search leaves its checkpoint behind"
        trainer.strategy.barrier()
    for mine, expected in zip(found[stage], found["ddp"], strict=True):
        assert_close(mine, expected, "found")


@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
@on_ranks(2)
def test_a_callback_searches_in_the_middle_of_a_fit(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    """`LearningRateFinder` saves, trains, and restores, with optimizer states the second time.

    The fit goes on with DDP's batches and random numbers: those behind the search.
    """
    found = {}
    for strategy in ("ddp", stage):
        torch.manual_seed(3)
        module = WithDropout()
        search = SearchAgain(num_training_steps=6)
        fit(strategy, module, max_epochs=3, callbacks=[search], default_root_dir=tmp_path)
        found[strategy] = (module.lr, module.losses, weights(module))
        assert search.searches == 2
    for mine, expected in zip(found[stage], found["ddp"], strict=True):
        assert_close(mine, expected, "found")


class WithDropout(Net):
    """Draws random numbers in every step."""

    def build(self) -> None:
        super().build()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class Loads(pl.Callback):
    """Loads a checkpoint when a fit starts or in the middle, once: only to look into it, or to restore it."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what, self.is_done = path, what, False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.what == "looks before":
            trainer.strategy.load_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) != (1, 2) or self.is_done:
            return
        self.is_done = True
        if self.what == "looks":
            trainer.strategy.load_checkpoint(self.path)
        if self.what == "restores":
            trainer._checkpoint_connector.restore(self.path)


@pytest.mark.parametrize("what", ["looks before", "looks", "restores"])
@pytest.mark.parametrize("stage", [slow(1), 3])
@on_ranks(2)
def test_a_callback_loads_another_fits_checkpoint(
    rank: int, world_size: int, stage: int, what: str, tmp_path: Path
) -> None:
    """The fit goes on with DDP's batches and random numbers: those it has, and not those of the checkpoint."""
    found = {}
    for strategy in ("ddp", stage):
        path = tmp_path / f"{strategy}.ckpt"
        data = DataLoader(TensorDataset(*samples()), batch_size=4, shuffle=True)
        fit(strategy, WithDropout(), data, max_epochs=2, max_steps=6).save_checkpoint(path)
        torch.manual_seed(3)
        module = WithDropout()
        fit(strategy, module, data, max_epochs=4, callbacks=[Loads(path, what)])
        found[strategy] = (module.losses, weights(module))
    for mine, expected in zip(found[stage], found["ddp"], strict=True):
        assert_close(mine, expected, "after the load")


class SearchAgain(LearningRateFinder):
    """When the fit starts and again in its third epoch, as Lightning's documents do it."""

    searches = 0

    def lr_find(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.searches += 1
        super().lr_find(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 2:
            self.lr_find(trainer, pl_module)


class Reloading(pl.Callback):
    """Looks at the checkpoint that was just saved, on one rank only."""

    seen = 0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        if trainer.is_global_zero and path:
            assert isinstance(type(pl_module).load_from_checkpoint(path), Net)
            self.seen += 1


@on_ranks(2)
def test_a_callback_loads_what_was_saved_on_one_rank(rank: int, world_size: int, tmp_path: Path) -> None:
    for stage in (1, 3):
        look = Reloading()
        kept = ModelCheckpoint(tmp_path / str(stage), monitor="val_loss")
        trainer = trainer_of(stage, callbacks=[kept, look], enable_checkpointing=True, max_epochs=3)
        trainer.fit(Net(), batches(), batches(seed=2))
        assert look.seen >= (2 if rank == 0 else 0)


# --- load_from_checkpoint ---------------------------------------------------------------------------------------------


class Sized(Net):
    """With hyperparameters, one of them a module."""

    def __init__(self, lr: float = 1e-2, name: str = "a", loss_fn: nn.Module | None = None) -> None:
        super().__init__(lr)
        self.save_hyperparameters(ignore=["loss_fn"])
        self.name = name


class Data(pl.LightningDataModule):
    """With a state."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size, self.epochs = size, 0

    def train_dataloader(self) -> DataLoader:
        self.epochs += 1
        return batches(batch_size=self.size)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


@on_ranks(2)
def test_load_from_checkpoint_is_that_of_one_file(rank: int, world_size: int, tmp_path: Path) -> None:
    """With its arguments: hyperparameters, ``strict``, ``map_location``, ``weights_only``, data modules."""
    folder, file = tmp_path / "net.ckpt", tmp_path / f"one{rank}.ckpt"
    module = Sized(name="b")
    trainer = trainer_of(3, max_epochs=1)
    trainer.fit(module, datamodule=Data(8))
    trainer.save_checkpoint(folder)
    consolidate(folder, file)
    for path in (folder, str(folder), file):
        for options in ({}, {"weights_only": True}, {"weights_only": False}, {"map_location": "cpu"}):
            again = Sized.load_from_checkpoint(path, **options)
            assert (again.name, again.lr) == ("b", 1e-2)
            assert_equal(weights(again), weights(module), f"{path}, {options}")
        assert Sized.load_from_checkpoint(path, name="c", lr=1.0).hparams == {"lr": 1.0, "name": "c"}
        data = Data.load_from_checkpoint(path)
        assert (data.size, data.epochs) == (8, 1)
        on_meta = TorchCheckpointIO().load_checkpoint(path, map_location="meta", weights_only=True)["state_dict"]
        assert {value.device.type for value in on_meta.values()} == {"meta"}
    for path in (folder, file):
        with pytest.raises(RuntimeError, match="Missing key"):
            More.load_from_checkpoint(path)
        assert More.load_from_checkpoint(path, strict=False).more.in_features == 2
    x = samples(4)[0]
    assert_equal(Sized.load_from_checkpoint(folder)(x), Sized.load_from_checkpoint(file)(x), "forward")
    if rank == 0:
        assert is_committed(folder)


class More(Sized):
    """Has more than what was saved."""

    def build(self) -> None:
        super().build()
        self.more = nn.Linear(2, 2)
