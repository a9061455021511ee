"""Modules that train here are copied, pickled and saved as plain torch modules, with memory of their own.

Trusted run: the same program under DDP, and the weights that the module itself has.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ls_strategy.config import nested
from ls_strategy.errors import StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import (
    Block,
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
from tests.marks import slow

pytestmark = pytest.mark.wide


def through_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    assert b"ls_strategy" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_pickle(module: nn.Module) -> nn.Module:
    data = pickle.dumps(module)
    assert b"ls_strategy" not in data, "a copy needs this package"
    return pickle.loads(data)


WAYS = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_file}


class Copying(Net):
    """Copies itself, and parts of itself, in every hook that follows a step, and looks at the copies."""

    def build(self) -> None:
        super().build()
        self.last.weight = self.first.weight
        self.first.register_forward_hook(functools.partial(noted, "a hook of the user's"))
        self.criterion = nn.SmoothL1Loss()
        self.copied = 0
        self.my_hooks = dict.fromkeys(range(200), "mine")

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        expected = weights(self)
        for name, way in WAYS.items():
            copied = way(self)
            self.look_at(copied, expected, name)
            self.look_at_training(copied, name)
        assert_equal(weights(self), expected, "the module itself")
        for part in (self.blocks[1], self.first, self.criterion, self.first.weight, self.blocks[2].norm.bias):
            size = sum(p.numel() for p in (part.parameters() if isinstance(part, nn.Module) else [part]))
            for dump in (pickle.dumps, saved_bytes):
                assert len(dump(part)) < 4 * size + 6_000, f"{type(part).__name__}: more than the part itself"
        self.copied += 1

    def look_at(self, copied: Any, expected: dict[str, Tensor], name: str) -> None:
        assert_equal(weights(copied), expected, name)
        assert copied.last.weight is copied.first.weight, f"{name}: tied no more"
        for p, own in zip(copied.parameters(), self.parameters(), strict=True):
            assert type(p) is nn.Parameter, name
            assert p.requires_grad == own.requires_grad, name
            assert p.untyped_storage().data_ptr() != own.untyped_storage().data_ptr(), f"{name}: shares memory"
            assert p.untyped_storage().nbytes() == p.numel() * p.element_size(), f"{name}: a view of a flat buffer"
        for module, own in zip(copied.modules(), self.modules(), strict=True):
            plain = vars(type(module)()) if not isinstance(module, (Net, nn.Linear, nn.LayerNorm)) else vars(module)
            assert vars(module).keys() <= plain.keys() | vars(own).keys(), name
            for key, value in vars(module).items():
                assert not type(value).__module__.startswith("ls_strategy"), f"{name}: {key}"
                for hook in value.values() if isinstance(value, dict) else ():
                    assert not type(hook).__module__.startswith("ls_strategy"), f"{name}: {key}"
        assert len(copied.first._forward_hooks) == 1, f"{name}: the user's own hook"
        assert copied.my_hooks == self.my_hooks, name

    def look_at_training(self, copied: Any, name: str) -> None:
        """As a plain module, by plain torch."""
        x, y = samples(4)
        before = weights(copied)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        copied.loss((x, y)).backward()
        assert all(p.grad is not None for p in copied.parameters()), name
        optimizer.step()
        copied.zero_grad()
        assert all(p.grad is None for p in copied.parameters()), name
        copied.load_state_dict(before)


def noted(_what: str, *_: Any) -> None:
    """A hook that can be pickled."""


def saved_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("stage", [slow(0), 1, 2])
@on_ranks(2)
def test_copies_while_training_are_plain_and_whole(rank: int, world_size: int, stage: int) -> None:
    trusted, module = Copying(), Copying()
    fit("ddp", trusted, max_epochs=1)
    trainer = fit(stage, module, max_epochs=1)
    assert trusted.copied == module.copied == 4
    assert_close(module.losses, trusted.losses, "losses")
    assert_close(weights(module), weights(trusted), "weights")
    for name, way in WAYS.items():
        module.look_at(way(module), weights(module), f"{name}, after the fit")
    del trainer
    for name, way in WAYS.items():
        module.look_at(way(module), weights(module), f"{name}, after the Trainer")


# --- modules in hyperparameters ---------------------------------------------------------------------------------------


class Given(Net):
    """Takes modules as arguments, as published packages do, and saves them."""

    def __init__(self, loss_fn: nn.Module, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loss_fn = loss_fn
        if middle is not None:
            self.blocks[1] = middle

    def loss(self, batch: Any) -> Tensor:
        return self.loss_fn(self(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.loggers and self.global_step % 2 == 0:
            name = f"{self.trainer.logger.name}-{self.global_step}.ckpt"
            self.trainer.save_checkpoint(Path(self.trainer.logger.save_dir) / name)


class Weighted(nn.Module):
    """A loss with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.weight * nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("stage", [slow(0), 1, 2, 3])
@on_ranks(2)
def test_hyperparameters_that_are_modules_are_saved(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    """Without parameters, with a buffer, and a part of the model itself, whose full weights are saved: while it trains.

    Loggers see them, too: this one writes them as YAML with every line.
    """
    for name, options in {
        "folder": {"checkpoint.format": "sharded"},
        "file": {"checkpoint.format": "file"},
        "beside": {"checkpoint.format": "sharded", "checkpoint.background": True},
        "file beside": {"checkpoint.format": "file", "checkpoint.background": True},
    }.items():
        strategy = ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, **options}))  # type: ignore[arg-type]
        module = Given(Weighted(), Block())
        logger = CSVLogger(tmp_path, name=name, version=0, flush_logs_every_n_steps=1)
        trainer = trainer_of(strategy, max_epochs=1, logger=logger, log_every_n_steps=1)
        trainer.fit(module, batches())
        for path in (tmp_path / f"{name}-{step}.ckpt" for step in (2, 4)):
            again = Given.load_from_checkpoint(path, weights_only=False)
            if path.name.endswith("-4.ckpt"):
                assert_equal(weights(again), weights(module), str(path))
            assert isinstance(again.loss_fn, Weighted)
            kept = {f"blocks.1.{key}": value for key, value in again.hparams["middle"].state_dict().items()}
            assert_equal(kept, {key: weights(again)[key] for key in kept}, f"{path}, hyperparameters")
        trainer.strategy.barrier()


@on_ranks(2)
def test_pickles_of_sharded_modules_are_refused_and_others_made(rank: int, world_size: int) -> None:
    """Stage 3: deep copies gather; pickles, which loggers make on rank 0 alone, are of what is gathered."""
    module = Given(Weighted())
    trainer = fit(3, module, max_epochs=1)
    for name, way in reversed(WAYS.items()):  # deep copies last: they leave something gathered
        for part in (module, module.blocks, module.blocks[1].wide, module.first):
            if way is copy.deepcopy:
                assert_equal(weights(way(part)), weights(part), name)
                continue
            trainer.strategy.require_engine().on_demand.release_idle()  # what was touched before is given back
            with pytest.raises(StateError, match=r"sharded \(stage 3\).*state_dict\(\)"):
                way(part)
        copied = way(module.loss_fn)
        assert_equal(copied(*samples(4)), module.loss_fn(*samples(4)), name)
        assert not copied._state_dict_hooks, name
    trainer.strategy.require_engine().on_demand.release_idle()
    with pytest.raises(StateError, match=r"sharded \(stage 3\)"):
        pickle.dumps(module.blocks[1].wide.weight)
    x = samples(4)[0]
    with trainer.strategy.gathered_parameters():
        copies = {name: way(module) for name, way in WAYS.items()}
        expected = module(x)
    for name, copied in copies.items():
        assert_equal(weights(copied), weights(module), name)
        assert_equal(copied(x), expected, name)


@on_ranks(2)
def test_shallow_copies_share_everything(rank: int, world_size: int) -> None:
    """As those of plain modules: what they compute with follows training."""
    for stage in (1, 3):
        module = Net()
        fit(stage, module, max_epochs=1)
        copied = copy.copy(module.blocks[0])
        assert copied.wide is module.blocks[0].wide
        copied = copy.copy(module.first)
        assert copied.weight is module.first.weight
        assert copy.copy(module.blocks[1].wide.weight).shape == module.blocks[1].wide.weight.shape
        if stage == 1:
            assert copy.copy(module.first.weight).data_ptr() == module.first.weight.data_ptr()
            assert_equal(copied(samples(4)[0]), module.first(samples(4)[0]), "forward")
            assert_equal(weights(copy.deepcopy(copied)), weights(copied), "a deep copy of it")


# --- other processes --------------------------------------------------------------------------------------------------


class Sent(Net):
    """Is sent to another process while it trains: torch moves the memory of what is sent."""

    def on_train_batch_end(self, *_: Any) -> None:
        ForkingPickler.dumps(self)


@on_ranks(2)
def test_training_goes_on_in_memory_that_was_shared(rank: int, world_size: int) -> None:
    trusted = Sent()
    fit("ddp", trusted)
    for stage in (0, 1, 2):
        module = Sent()
        fit(stage, module)
        assert_close(module.losses, trusted.losses, f"stage {stage}, losses")
        assert_close(weights(module), weights(trusted), f"stage {stage}, weights")


class Features(Dataset):
    """Samples that a module has changed, in a worker."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.x, self.y = samples(16)

    def __len__(self) -> int:
        return len(self.x)

    @torch.no_grad()
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.module(self.x[index : index + 1])[0], self.y[index]


class Loading(Net):
    """Its training data go through its own first layer, which does not train."""

    def build(self) -> None:
        super().build()
        self.first.requires_grad_(False)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Features(self.first), batch_size=4, num_workers=1, multiprocessing_context="spawn")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(300)
@on_ranks(2, timeout_s=280)
def test_workers_that_are_spawned_get_the_module(rank: int, world_size: int) -> None:
    trusted = Loading()
    trainer_of("ddp", max_epochs=2).fit(trusted)
    for stage in (1, 2):
        module = Loading()
        trainer_of(stage, max_epochs=2).fit(module)
        assert_close(module.losses, trusted.losses, f"stage {stage}")


# --- classes that copy themselves, recomputation, parts over ranks ----------------------------------------------------


class Own(nn.Linear):
    """Copies its dictionary by itself, as ``torch.fx.GraphModule`` does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        copied = Own.__new__(Own)
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


class WithOwn(Net):
    def build(self) -> None:
        super().build()
        self.blocks[1] = Own(8, 8)
        self.last = Own(8, 8)

    def on_train_batch_end(self, *_: Any) -> None:
        for part in (self.blocks[1], self.last):
            copied = copy.deepcopy(part)
            assert_equal(weights(copied), weights(part), "a class that copies itself")
            copied(torch.ones(8)).sum().backward()
            copied.zero_grad()
            assert copied.weight.grad is None
            assert pickle.loads(pickle.dumps(copied)).weight.equal(copied.weight)


@on_ranks(2)
def test_classes_that_copy_themselves(rank: int, world_size: int) -> None:
    for strategy in ("ddp", 1, 3):
        fit(strategy, WithOwn(), max_epochs=1)


@on_ranks(2)
def test_copies_of_recomputed_blocks_compute_as_their_class(rank: int, world_size: int) -> None:
    module = Copying()
    fit(ZeROStrategy(2, sharding={"min_unit_numel": 0}, activations="full"), module, max_epochs=1)
    assert module.copied == 4


@on_ranks(2)
def test_layers_that_are_divided_are_refused(rank: int, world_size: int) -> None:
    """What no rank has in full is not copied; what every rank has is."""
    module = Net()
    plan = {"blocks.*.wide": "column", "blocks.*.narrow": "row"}
    strategy = ZeROStrategy(1, sharding={"min_unit_numel": 0}, parallel={"tensor": {"size": 2, "plan": plan}})
    module.blocks = nn.ModuleList([Even() for _ in range(3)])
    fit(strategy, module, max_epochs=1)
    for part in (module, module.blocks[0], module.blocks[0].wide):
        for way in WAYS.values():
            with pytest.raises(StateError, match="cannot be pickled"):
                way(part)
    assert_equal(weights(copy.deepcopy(module.first)), weights(module.first), "what is not divided")


class Even(Block):
    """Its inner width divides by two."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
