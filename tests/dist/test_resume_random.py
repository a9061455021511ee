"""Resumed runs draw the random numbers, and see the samples, of the run that was not interrupted.

Also where code asks for ``trainer.estimated_stepping_batches``, as schedules do: Lightning then makes loaders and their
first iterators while optimizers are configured, or in a hook before that, earlier than it restores the progress.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset
from typing_extensions import override

from ls_strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks, quiet, trainer_of
from tests.marks import few_or_all

PLACES = ("configure_optimizers", "setup", "on_fit_start")
"""Where the number of batches is asked for."""

ANYWHERE = ("", *PLACES)
"""There, and nowhere."""

SAMPLES = 24


class Asks(pl.LightningModule):
    """Notes the samples and a random number of every step, and asks for the number of steps in ``place``."""

    def __init__(self, place: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.place = place
        self.seen: list[tuple[Any, ...]] = []

    def ask(self, place: str) -> None:
        if place == self.place:
            assert self.trainer.estimated_stepping_batches > 1

    @override
    def setup(self, stage: str) -> None:
        self.ask("setup")

    @override
    def on_fit_start(self) -> None:
        self.ask("on_fit_start")

    @override
    def training_step(self, batch: Any, i: int) -> Tensor:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        batch = batch["b"] if isinstance(batch, dict) else batch
        self.seen.append((*(round(float(v), 4) for v in batch[0]), round(float(torch.rand(1)), 6), f"{rate:.6f}"))
        return self.layer(batch[0].view(-1, 1)).mean() * 1e-3

    @override
    def configure_optimizers(self) -> Any:
        self.ask("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class SaveAt(pl.Callback):
    """Saves after ``count`` batches."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._left = path, count

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._left -= 1
        if not self._left:
            trainer.save_checkpoint(self._path)


class Numbers(Dataset[Tensor]):
    """Samples that all generators of the process that loads them have changed."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor]:
        return (torch.tensor(i + 0.1 * (torch.rand(1).item() + random.random() + np.random.rand())),)


class Stateful:
    """A loader that knows where it stands."""

    def __init__(self) -> None:
        self._next = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        first, self._next = self._next, 0
        for i in range(first, 6):
            self._next = i + 1
            yield [torch.tensor([float(i)])]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def plain(workers: int = 0, *, stays: bool = False) -> DataLoader:
    context = "fork" if workers else None
    return DataLoader(
        TensorDataset(torch.arange(SAMPLES).float()), 4, num_workers=workers,
        multiprocessing_context=context, persistent_workers=stays,
    )  # fmt: skip


def shuffled() -> DataLoader:
    data = TensorDataset(torch.arange(SAMPLES).float())
    return DataLoader(data, 4, sampler=RandomSampler(data))


def run(strategy: Any, place: str, data: Any, *callbacks: pl.Callback, ckpt: Any = None, **options: Any) -> list[Any]:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3 if ckpt is None else 4)
    module = Asks(place)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, **options}
    trainer = trainer_of(strategy, callbacks=list(callbacks), **options)
    trainer.fit(module, data, ckpt_path=ckpt)
    return module.seen


def check(
    make_data: Any,
    done: int,
    path: Path,
    make_strategy: Any = lambda: 1,
    *,
    places: Sequence[str] = ANYWHERE,
    passes: int = 1,
    **options: Any,
) -> None:
    """Compare a run resumed after ``done`` batches, of so many passes, with the one that was not interrupted."""
    for place in places:
        saved = path / f"{place}.ckpt"
        whole = run(make_strategy(), place, make_data(), SaveAt(saved, done), **options)
        rest = run(make_strategy(), place, make_data(), ckpt=saved, **options)
        assert rest == whole[done * passes :], (
            f"asked in {place}:\n  is   {rest[:4]}\n  must {whole[done * passes :][:4]}"
        )


DATA: dict[str, Any] = {
    "sequential": plain,
    "workers": lambda: plain(2),
    "workers that stay": lambda: plain(2, stays=True),
    "stateful": Stateful,
    "several": lambda: {"a": plain(), "b": plain()},
    "changed at random": lambda: DataLoader(Numbers(), 4),
}


LIMITS: dict[str, dict[str, int]] = {"epochs": {"max_epochs": 3}, "steps": {"max_steps": 16, "max_epochs": 3}}
Cases = list[tuple[str, str, Sequence[str]]]
"""Names of data and limit, and places."""

FEW: Cases = [
    (kind, ("epochs", "steps")[i % 2], (ANYWHERE[(i + i // 4) % 4],))
    for i, kind in enumerate(DATA)
]  # fmt: skip


@pytest.mark.parametrize("cases", few_or_all(FEW, [(*each, ANYWHERE) for each in itertools.product(DATA, LIMITS)]))
@on_ranks(1, timeout_s=150)
def test_inside_an_epoch(rank: int, world_size: int, tmp_path: Path, cases: Cases) -> None:
    for kind, limit, places in cases:
        folder = tmp_path / f"{kind} {limit}"
        check(DATA[kind], 8, folder, places=places, use_distributed_sampler=False, **LIMITS[limit])


@pytest.mark.parametrize("places", few_or_all({0: ("",), 3: ("setup",)}, {0: ANYWHERE, 3: ANYWHERE}))
@on_ranks(2)
def test_inside_an_epoch_with_the_sampler_of_lightning(
    rank: int, world_size: int, tmp_path: Path, places: dict[int, Sequence[str]]
) -> None:
    for stage, of_stage in places.items():
        check(plain, 4, tmp_path / str(stage), lambda stage=stage: stage, places=of_stage)


@pytest.mark.wide
@on_ranks(2, timeout_s=100)
def test_virtual_ranks_draw_what_they_would_have_drawn(rank: int, world_size: int, tmp_path: Path) -> None:
    """Their iterators, samplers, datasets and workers draw from streams of their own."""

    def make() -> ZeROStrategy:
        return ZeROStrategy(stage=2, parallel={"virtual_ranks": 4})

    for name, data, done in (
        ("inside", lambda: DataLoader(Numbers(), 2), 4),
        ("between", lambda: DataLoader(Numbers(), 2, shuffle=True), 3),
        ("workers", lambda: DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context="fork"), 4),
    ):
        check(data, done, tmp_path / name, make, passes=2)


def drawn(rank: int, world_size: int, virtual: int | None, place: str) -> list[Any]:
    quiet()
    strategy: Any = "ddp" if virtual is None else ZeROStrategy(stage=2, parallel={"virtual_ranks": virtual})
    return run(strategy, place, DataLoader(Numbers(), 2, shuffle=True))


@pytest.mark.sample(1)
@pytest.mark.dist
@pytest.mark.parametrize("place", PLACES)
def test_virtual_ranks_draw_what_ranks_of_ddp_draw(place: str) -> None:
    """Iterators draw when they are made, which moves the numbers that come after it."""
    expected = spawn(drawn, 2, None, place, init_process_group=False)
    (found,) = spawn(drawn, 1, 2, place, init_process_group=False)
    assert found == [step for both in zip(*expected, strict=True) for step in both]


@on_ranks(1)
def test_a_total_number_of_steps_that_is_auto(rank: int, world_size: int, tmp_path: Path) -> None:
    """Of a DeepSpeed configuration's schedule."""
    schedule = {"warmup_num_steps": 2, "total_num_steps": "auto", "warmup_max_lr": 0.01, "warmup_min_lr": 0}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
    }

    def train(*callbacks: pl.Callback, ckpt: Any = None) -> list[Any]:
        module = Asks()
        module.configure_optimizers = lambda: None  # type: ignore[method-assign]
        trainer = trainer_of(ZeROStrategy(deepspeed_config=config), callbacks=list(callbacks), max_epochs=3)
        trainer.fit(module, plain(), ckpt_path=ckpt)
        return module.seen

    saved = tmp_path / "a.ckpt"
    torch.manual_seed(3)
    whole = train(SaveAt(saved, 8))
    torch.manual_seed(4)
    assert train(ckpt=saved) == whole[8:]


@pytest.mark.parametrize("places", few_or_all([("",), ("on_fit_start",)], [ANYWHERE, ANYWHERE]))
@on_ranks(1)
def test_between_two_epochs_the_order_is_drawn_from_the_saved_numbers(
    rank: int, world_size: int, tmp_path: Path, places: list[Sequence[str]]
) -> None:
    """Also where Lightning restores the epoch as one that goes on, with ``max_steps``."""
    for limit, of_limit in zip([{"max_epochs": 3}, {"max_epochs": 3, "max_steps": 14}], places, strict=True):
        check(shuffled, 6, tmp_path / str(len(limit)), places=of_limit, use_distributed_sampler=False, **limit)


class Evaluates(Asks):
    @override
    def test_step(self, batch: Any, i: int) -> None: ...


@on_ranks(1)
def test_a_checkpoint_that_no_batch_was_trained_from_moves_nothing(rank: int, world_size: int, tmp_path: Path) -> None:
    """Loaded for a test, or by a fit that had nothing left to do."""
    seen: dict[Any, list[Any]] = {}
    for strategy in ("ddp", 1):
        saved, seen[strategy] = tmp_path / f"{strategy}.ckpt", []
        trainer = trainer_of(strategy, max_epochs=1)
        trainer.fit(Evaluates(), plain())
        trainer.save_checkpoint(saved)
        for first in ("test", "fit"):
            trainer, module = trainer_of(strategy, max_epochs=1), Evaluates()
            getattr(trainer, first)(module, plain(), ckpt_path=saved)
            torch.manual_seed(7)
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, plain())
            seen[strategy].append(module.seen)
    assert seen[1] == seen["ddp"]
    assert all(seen["ddp"])
