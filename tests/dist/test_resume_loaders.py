"""Loaders whose order no sampler knows continue with the next batch: iterables, streams, workers, loaders with a state.

The trusted run is the one that was not interrupted. It has another seed than the run that resumes, which therefore has
to take its random numbers from the checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info
from typing_extensions import override

from ls_strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks, quiet, trainer_of
from tests.marks import few_or_all

SAMPLES, BATCH = 48, 4

Make = Callable[[int, int], Any]
"""Gets a rank and the number of ranks, and makes a loader."""


def sample(index: int, *, noise: bool = False) -> Tensor:
    drawn = torch.rand(1).item() + random.random() + np.random.rand() if noise else 0.0
    return torch.tensor([float(index), drawn])


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return sample(index)


class Stream(IterableDataset[Tensor]):
    """Gives every worker of every rank its share, in an order that is drawn at the begin."""

    def __init__(self, rank: int, ranks: int, *, noise: bool = False) -> None:
        self.rank, self.ranks, self.noise = rank, ranks, noise

    def indices(self) -> list[int]:
        worker = get_worker_info()
        workers, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        share = range(self.rank * workers + own, SAMPLES, self.ranks * workers)
        return [share[i] for i in torch.randperm(len(share)).tolist()]

    def __iter__(self) -> Iterator[Tensor]:
        for index in self.indices():
            yield sample(index, noise=self.noise)


class SizedStream(Stream):
    def __len__(self) -> int:
        return SAMPLES // self.ranks


class StatefulStream(Stream):
    """Has an order that depends on the number of the pass, which is part of its state."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.passes, self.done, self.loaded = 0, 0, False

    @override
    def __iter__(self) -> Iterator[Tensor]:
        first, self.loaded = (self.done if self.loaded else 0), False
        share = list(range(self.rank, SAMPLES, self.ranks))
        random.Random(self.passes).shuffle(share)
        for self.done in range(first + 1, len(share) + 1):
            yield sample(share[self.done - 1])
        self.passes, self.done = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.done, self.loaded = state["passes"], state["done"], True


class Batches:
    """An object that has nothing but an iterator."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.indices = torch.arange(rank, SAMPLES, ranks).float()

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.indices.view(-1, BATCH, 1)


class Stateful:
    """Its state is the number of batches that it has given."""

    done, loaded = 0, False

    def __iter__(self) -> Any:
        first, self.loaded = (self.done if self.loaded else 0), False
        for self.done, batch in enumerate(list(super().__iter__())[first:], first + 1):  # type: ignore[misc]
            yield batch
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done, self.loaded = state["done"], True


class StatefulBatches(Stateful, Batches):
    pass


class ModuleStream(Stream, nn.Module):
    """Has weights, and with them a ``state_dict`` that says nothing about its position."""

    def __init__(self, rank: int, ranks: int) -> None:
        nn.Module.__init__(self)
        super().__init__(rank, ranks)


class Draws(Sampler[int]):
    """A sampler of the user's, without a generator that could be found."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(SAMPLES), SAMPLES)

    def __len__(self) -> int:
        return SAMPLES


class CountsPasses(Draws):
    """Has an order that depends on the number of its passes, which no checkpoint holds."""

    passes = 0

    @override
    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.passes).sample(range(SAMPLES), SAMPLES)
        self.passes += 1


class FailingStream(Stream):
    """Has methods for a state that do nothing but fail."""

    def state_dict(self) -> None:
        raise NotImplementedError

    load_state_dict = state_dict


class SizedStatefulBatches(StatefulBatches):
    def __len__(self) -> int:
        return len(self.indices) // BATCH


def loader(dataset: Any, workers: int = 0, kind: Any = DataLoader, **options: Any) -> Any:
    context = "fork" if workers else None
    return kind(dataset, BATCH, num_workers=workers, multiprocessing_context=context, **options)


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(random.randrange(1000))


LAST, END = "on_train_batch_end", "on_train_epoch_end"
OWN_ORDER = {"use_distributed_sampler": False}
LOADERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "stream": (lambda *ranks: loader(Stream(*ranks)), {}),
    "sized stream": (lambda *ranks: loader(SizedStream(*ranks)), {}),
    "workers": (lambda *ranks: loader(Stream(*ranks, noise=True), 2), {}),
    "sized stream, workers": (lambda *ranks: loader(SizedStream(*ranks), 3), {}),
    "stateful stream": (lambda *ranks: loader(StatefulStream(*ranks)), {}),
    "stateful stream, a limit": (lambda *ranks: loader(StatefulStream(*ranks)), {"limit_train_batches": 5}),
    "stream of a module": (lambda *ranks: loader(ModuleStream(*ranks)), {}),
    "stream without a state after all": (lambda *ranks: loader(FailingStream(*ranks)), {}),
    "object": (Batches, {}),
    "stateful object": (StatefulBatches, {}),
    "sized stateful object": (SizedStatefulBatches, {}),
    "stateful object, a limit": (StatefulBatches, {"limit_train_batches": 5}),
    "samples, workers": (lambda *_: loader(Samples(), 2, shuffle=True), {}),
    "random order": (lambda *_: loader(Samples(), sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)), OWN_ORDER),
    "own sampler": (lambda *_: loader(Samples(), sampler=Draws()), OWN_ORDER),
    "own generator, workers": (lambda *_: loader(Samples(), 2, shuffle=True, generator=own_generator()), OWN_ORDER),
    "several": (lambda *r: {"a": Batches(*r), "b": loader(Samples(), shuffle=True), "c": StatefulBatches(*r)}, {}),
    "several with states": (lambda *r: {"a": loader(StatefulStream(*r)), "b": loader(Samples(), shuffle=True)}, {}),
}


def torchdatas(dataset: Any, workers: int = 0, **options: Any) -> Any:
    module = importlib.import_module("torchdata.stateful_dataloader")
    return loader(dataset, workers, module.StatefulDataLoader, **options)


def hugging_faces(rank: int, ranks: int, *, shuffle: bool = False) -> Any:
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    found = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(SAMPLES)]}).to_iterable_dataset(num_shards=12)
    found = found.shuffle(seed=3, buffer_size=10) if shuffle else found
    return (
        importlib.import_module("datasets.distributed").split_dataset_by_node(found, rank, ranks).with_format("torch")
    )


LIBRARIES: dict[str, dict[str, tuple[Make, dict[str, Any]]]] = {
    "torchdata": {
        "Lightning's sampler": (lambda *_: torchdatas(Samples(), shuffle=True), {}),
        "samples, workers": (lambda *_: torchdatas(Samples(), 2, shuffle=True), OWN_ORDER),
        "stateful stream": (lambda *ranks: torchdatas(StatefulStream(*ranks)), {}),
        "stream, workers": (lambda *ranks: torchdatas(Stream(*ranks), 2), {}),
    },
    "datasets": {
        "in this process": (lambda *ranks: loader(hugging_faces(*ranks)), {}),
        "shuffled": (lambda *ranks: loader(hugging_faces(*ranks, shuffle=True)), {}),
        "workers": (lambda *ranks: loader(hugging_faces(*ranks), 2), {}),
    },
}


class Seen(pl.LightningModule):
    """Notes the batches of all steps, which draw random numbers too."""

    def __init__(self, *, asks: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[Any] = []
        self.asks = asks

    @override
    def training_step(self, batch: Any, i: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        parts = [part for part in parts if part is not None]
        noted = [part.tolist() for part in parts] + [torch.rand(1).item()]
        if not getattr(self.trainer.strategy, "runs_filler", False):
            self.seen.append(noted)
        return self.layer(parts[0][:, :1]).mean() * 1e-3

    def ask(self, hook: str) -> None:
        if self.asks == hook:
            self.trainer.fit_loop.setup_data()  # as all do that ask for a number of batches or steps

    @override
    def setup(self, stage: str) -> None:
        self.ask("setup")

    @override
    def configure_optimizers(self) -> Any:
        self.ask("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SaveAt(pl.Callback):
    """Saves when a hook is called for the ``count``-th time, and notes after how many steps of the module."""

    def __init__(self, hook: str, count: int, path: Path) -> None:
        self.path, self.done, self._left = path, 0, count

        def called(trainer: pl.Trainer, module: Seen, *_: Any) -> None:
            self._left -= 1
            if self._left == 0:
                self.done = len(module.seen)
                trainer.save_checkpoint(path)

        setattr(self, hook, called)


def train(
    data: Any,
    seed: int,
    *callbacks: pl.Callback,
    strategy: Any = 2,
    asks: str = "",
    ckpt: Any = None,
    kind: Any = Seen,
    **options: Any,
) -> list[Any]:
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed)
    module = kind(asks=asks)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, **options}
    trainer_of(strategy, callbacks=list(callbacks), **options).fit(
        module, data() if callable(data) else data, ckpt_path=ckpt
    )
    return module.seen


def moments(batches: int, folder: Path) -> list[SaveAt]:
    """Inside the first epoch, before and after its last step, at its end, and inside the second before a step."""
    return [
        SaveAt("on_train_batch_end", batches - 2, folder / "inside.ckpt"),
        SaveAt("on_train_batch_start", batches, folder / "before.ckpt"),
        SaveAt("on_train_batch_end", batches, folder / "last.ckpt"),
        SaveAt("on_train_epoch_end", 1, folder / "end.ckpt"),
        SaveAt("on_train_batch_start", batches + 3, folder / "second.ckpt"),
    ]


def check(
    name: str, rank: int, world_size: int, folder: Path, case: Any = None, *, asks: str = "", **options: Any
) -> None:
    make, more = case or LOADERS[name]
    options = {**more, **options}
    replicas = 1 if more == OWN_ORDER else world_size
    batches = options.get("limit_train_batches", SAMPLES // BATCH // replicas)
    saves = moments(batches, folder)

    def data() -> Any:
        return make(rank, world_size)

    whole = train(data, 3, *saves, asks=asks, **options)
    assert len(whole) == 3 * batches
    for save in saves:
        rest = train(data, 4, ckpt=save.path, asks=asks, **options)
        assert rest == whole[save.done :], (
            f"{name}, {save.path.stem}:\n  is   {rest[:3]}\n  must {whole[save.done :][:3]}"
        )


@pytest.mark.parametrize("names", few_or_all(["workers", "own sampler"], list(LOADERS)))
@on_ranks(1, timeout_s=200)
def test_the_next_batch_comes_next(rank: int, world_size: int, tmp_path: Path, names: list[str]) -> None:
    """With the random numbers of its workers, at every moment at which a checkpoint is saved."""
    for name in names:
        check(name, rank, world_size, tmp_path / name)


@pytest.mark.parametrize("names", few_or_all(["stateful object"], list(LOADERS)))
@on_ranks(2, timeout_s=200)
def test_every_rank_continues_with_its_own(rank: int, world_size: int, tmp_path: Path, names: list[str]) -> None:
    """Where Lightning has the states of rank 0, behind a batch that was fetched ahead."""
    for name in names:
        check(name, rank, world_size, tmp_path / name)


@pytest.mark.parametrize("names", few_or_all(["object"], list(LOADERS)))
@on_ranks(1, timeout_s=200)
def test_code_that_asks_for_the_number_of_batches_moves_nothing(
    rank: int, world_size: int, tmp_path: Path, names: list[str]
) -> None:
    for number, name in enumerate(names):
        check(name, rank, world_size, tmp_path / name, asks=("setup", "configure_optimizers")[number % 2])


def _is_missing(name: str) -> bool:
    return importlib.util.find_spec(name) is None


@pytest.mark.wide
@pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=pytest.mark.skipif(_is_missing(name), reason="not there")) for name in LIBRARIES],
)
@on_ranks(2, timeout_s=200)
def test_loaders_and_datasets_of_libraries(rank: int, world_size: int, tmp_path: Path, library: str) -> None:
    for name, case in LIBRARIES[library].items():
        check(name, rank, world_size, tmp_path / name, case)


class Validated(Seen):
    @override
    def validation_step(self, batch: Any, i: int) -> None:
        torch.rand(1)


class Made(pl.LightningDataModule):
    """Draws numbers whenever it makes the training data."""

    def __init__(self, make: Callable[[], Any], *, validates: bool) -> None:
        super().__init__()
        self.make, self.validates = make, validates

    @override
    def train_dataloader(self) -> Any:
        torch.rand(3)
        return self.make()

    @override
    def val_dataloader(self) -> Any:
        return loader(Samples(), shuffle=True) if self.validates else []


def shortest(rank: int, ranks: int) -> Any:
    """A pass that ends before the length that Lightning takes it to have."""
    short = loader(StatefulStream(rank, 2 * ranks))
    return CombinedLoader({"a": loader(Samples(), shuffle=True), "b": short}, "min_size")


BETWEEN: dict[str, tuple[Make, dict[str, Any], tuple[str, ...]]] = {
    "made again": (lambda *r: loader(Stream(*r)), {"reload_dataloaders_every_n_epochs": 1}, (LAST, END)),
    "shortest": (shortest, {}, (LAST, END)),
    "made again, stateful": (
        lambda *r: loader(StatefulStream(*r)),
        {"reload_dataloaders_every_n_epochs": 1},
        (LAST, END),
    ),
    "made again at times": (
        lambda *_: loader(Samples(), shuffle=True),
        {"reload_dataloaders_every_n_epochs": 2},
        (END,),
    ),
    "validated": (lambda *r: loader(Stream(*r, noise=True), 2), {}, ("on_validation_end", END)),
}
"""Data, options of the Trainer, and hooks in which a checkpoint is saved."""


@pytest.mark.parametrize("names", few_or_all(["made again", "shortest"], list(BETWEEN)))
@on_ranks(1, timeout_s=200)
def test_between_two_epochs_is_drawn_what_is_drawn_without_interruption(
    rank: int, world_size: int, tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        make, options, hooks = BETWEEN[name]
        validates = "on_validation_end" in hooks

        def data(make: Make = make, validates: bool = validates) -> Any:
            return Made(lambda: make(rank, world_size), validates=validates)

        options = {**options, "kind": Validated if validates else Seen}
        count = len(train(data, 3, **{**options, "max_epochs": 1}))
        saves = [SaveAt(hook, count if hook == LAST else 1, tmp_path / f"{name} {hook}.ckpt") for hook in hooks]
        whole = train(data, 3, *saves, **options)
        for save in saves:
            assert train(data, 4, ckpt=save.path, **options) == whole[save.done :], save.path.stem


REPORTED: dict[str, tuple[Make, str, int, str]] = {
    "workers that stay": (
        lambda *r: loader(Stream(*r), 1, persistent_workers=True),
        END,
        1,
        "workers that stay between epochs",
    ),
    "draws between steps": (
        lambda *r: loader(Stream(*r, noise=True)),
        "on_train_batch_start",
        3,
        "the data draw random numbers in the process that trains",
    ),
    "a sampler counts": (
        lambda *_: loader(Samples(), sampler=CountsPasses()),
        LAST,
        SAMPLES // BATCH + 3,
        "the 3 batches that were read again are not the 3 that the run has trained on",
    ),
    "one has ended": (
        lambda *r: CombinedLoader([loader(StatefulStream(*r)), loader(StatefulStream(r[0], 2 * r[1]))], "max_size"),
        LAST,
        8,
        "one of several loaders had reached its end",
    ),
}


@pytest.mark.parametrize("names", few_or_all(["draws between steps", "a sampler counts"], list(REPORTED)))
@on_ranks(1)
def test_an_order_that_no_checkpoint_holds_is_reported(
    rank: int, world_size: int, tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        make, hook, count, message = REPORTED[name]

        def data(make: Make = make) -> Any:
            return make(rank, world_size)

        path = tmp_path / f"{name}.ckpt"
        train(data, 3, SaveAt(hook, count, path))
        assert message in resumed_with_warnings(data, path)[1], name


LEFT_OUT: dict[str, tuple[str, int, dict[str, Any], tuple[int, int], str]] = {
    "epoch": ("on_train_epoch_start", 2, {}, (12, 12), "takes epoch 1 for trained"),
    "validation": ("on_train_batch_end", 24, {}, (12, 12), "saved before a validation had ended"),
    "inside it": ("on_validation_batch_end", 14, {}, (12, 12), "saved before a validation had ended"),
    "inside an epoch": (
        "on_train_batch_end",
        18,
        {"val_check_interval": 0.5},
        (18, 36),
        "saved before a validation had ended",
    ),
    "nothing": ("on_validation_end", 2, {}, (12, 12), ""),
    "none was due": ("on_train_epoch_end", 1, {"check_val_every_n_epoch": 2}, (24, 12), ""),
    "nothing, inside an epoch": ("on_train_batch_end", 17, {"val_check_interval": 0.5}, (19, 48), ""),
}
"""A hook and its call in which a checkpoint is saved, options, how many batches a run then trains on and validates, and
what the log says of that."""


@pytest.mark.parametrize("names", few_or_all(["epoch", "validation", "nothing"], list(LEFT_OUT)))
@on_ranks(1, timeout_s=200)
def test_what_lightning_leaves_out_is_reported(rank: int, world_size: int, tmp_path: Path, names: list[str]) -> None:
    """With DDP it leaves out the same."""
    for name in names:
        hook, count, options, left, message = LEFT_OUT[name]
        for strategy in ("ddp", 2):
            path, validated, said = tmp_path / f"{name}.ckpt", Counts(), Said()
            options = {**options, "kind": Validated, "strategy": strategy}

            def data() -> Any:
                return Made(lambda: loader(Samples(), shuffle=True), validates=True)

            train(data, 3, SaveAt(hook, count, path), **options)
            with said:
                seen = train(data, 4, validated, ckpt=path, **options)
            assert (len(seen), validated.count) == left, (name, strategy)
            texts = [each for each in said.texts if each.startswith("ZeROStrategy: the checkpoint was saved ")]
            assert len(texts) == (strategy == 2 and bool(message)), (name, texts)
            assert not texts or message in texts[0]


class Counts(pl.Callback):
    """Counts batches of validations."""

    count = 0

    @override
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self.count += 1


class Said(logging.Handler):
    """Notes what Lightning logs and warns of."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        self._caught = warnings.catch_warnings(record=True)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> None:
        self._warnings: Any = self._caught.__enter__()
        warnings.simplefilter("always")
        self._logger.addHandler(self)
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *error: Any) -> None:
        self._logger.setLevel(self._level)
        self._logger.removeHandler(self)
        self._caught.__exit__(*error)
        self.texts += [str(each.message) for each in self._warnings]


class Continues(Stream):
    """Goes on where its last pass has ended, which nobody can know."""

    taken = 0

    @override
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(SAMPLES // self.ranks):
            self.taken += 1
            yield sample(self.taken)


def resumed_with_warnings(data: Any, path: Path) -> tuple[list[Any], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(data, 4, ckpt=path)
    return seen, "\n".join(str(each.message) for each in caught)


@on_ranks(2)
def test_other_data_than_before_are_reported(rank: int, world_size: int, tmp_path: Path) -> None:
    """Also if they differ on another rank than the one that warns."""
    for differs in (False, True):

        def data(differs: bool = differs) -> Any:
            ranks = (rank, world_size)
            return loader(Continues(*ranks)) if differs and rank == 1 else Batches(*ranks)

        path = tmp_path / f"{differs}.ckpt"
        train(data, 3, SaveAt("on_train_batch_end", 9, path))
        seen, said = resumed_with_warnings(data, path)
        assert len(seen) == 9
        assert ("the 3 batches that were read again are not the 3" in said) == (differs and rank == 0), said


def saves_or_resumes(rank: int, world_size: int, path: Path, name: str, resume: bool) -> tuple[list[Any], str]:
    quiet()
    make = LOADERS[name][0]
    if resume:
        return resumed_with_warnings(lambda: make(rank, world_size), path)
    return train(make(rank, world_size), 3, SaveAt("on_train_batch_end", 3, path)), ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("object", "trains on 3 batches of every rank a second time"),
        pytest.param("stateful object", "that rank 0 had among 2 ranks", marks=pytest.mark.wide),
    ],
)
def test_another_number_of_ranks_is_reported(tmp_path: Path, name: str, said: str) -> None:
    spawn(saves_or_resumes, 2, tmp_path / "a.ckpt", name, False, init_process_group=False)
    ((seen, found),) = spawn(saves_or_resumes, 1, tmp_path / "a.ckpt", name, True, init_process_group=False)
    assert said in found
    assert len(seen) == 3 * (SAMPLES // BATCH) - (3 if name == "stateful object" else 0)


@pytest.mark.wide
@on_ranks(2)
def test_ranks_of_different_lengths_read_their_own_numbers_again(rank: int, world_size: int, tmp_path: Path) -> None:
    def data() -> Any:
        batches = Batches(rank, world_size)
        batches.indices = batches.indices[: BATCH * (3 + 2 * rank)]
        return batches

    def run(seed: int, *callbacks: pl.Callback, ckpt: Any = None) -> list[Any]:
        strategy = ZeROStrategy(stage=2, uneven="join")
        seen = train(data, seed, *callbacks, ckpt=ckpt, strategy=strategy, enable_checkpointing=True)
        return [batch for batch, _ in seen]

    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(3, every)
    for step, done in ((2, (2, 2)), (4, (3, 4)), (7, (5, 7))):
        assert run(4, ckpt=tmp_path / f"step={step}.ckpt") == whole[done[rank] :]


class StatefulLoader(Stateful, DataLoader):
    """Has no length either, so that Lightning fetches a batch ahead."""

    def __len__(self) -> int:
        raise TypeError("nobody knows")


@pytest.mark.wide
@on_ranks(1)
def test_virtual_ranks_continue_behind_what_was_fetched_ahead(rank: int, world_size: int, tmp_path: Path) -> None:
    def run(seed: int, *callbacks: pl.Callback, ckpt: Any = None) -> list[Any]:
        strategy = ZeROStrategy(stage=2, parallel={"virtual_ranks": 2})
        data = StatefulLoader(Samples(), BATCH, shuffle=False)
        return train(data, seed, *callbacks, ckpt=ckpt, strategy=strategy, use_distributed_sampler=False)

    saves = moments(SAMPLES // BATCH, tmp_path)
    whole = run(3, *saves)
    for save in saves:
        assert [step[:-1] for step in run(4, ckpt=save.path)] == [step[:-1] for step in whole[save.done :]], save.path
