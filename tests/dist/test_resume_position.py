"""Which batches a resumed run trains on, for every moment at which a checkpoint can be saved.

In an epoch: those of the run that was not interrupted. Once the epoch is over, in whatever way it ended: those of DDP,
or of a plain Trainer, that resumes from its own checkpoint of the same moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import override

from tests.dist.ranks import on_ranks, trainer_of

pytestmark = pytest.mark.wide

SAMPLES = 120
"""Six batches of ten on each of two replicas; a single rank trains on the first one's."""

Batch = tuple[int, ...]
Options = dict[str, Any]


class Seen(pl.LightningModule):
    """Remembers which samples each step saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[Batch] = []

    @override
    def training_step(self, batch: list[Tensor], i: int) -> Tensor:
        self.seen.append(tuple(int(v) for v in batch[0]))
        return self.layer(batch[0].view(-1, 1)).mean() * 1e-3

    @override
    def validation_step(self, batch: list[Tensor], i: int) -> None:
        self.layer(batch[0].view(-1, 1))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Asks(Seen):
    """Makes a schedule of as many steps as there will be, so that loaders exist before the progress is restored."""

    @override
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


class At(pl.Callback):
    """Does something once, when a hook is called for the ``count``-th time."""

    def __init__(self, hook: str, count: int, act: Callable[[pl.Trainer], None]) -> None:
        self._left = count

        def called(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            self._left -= 1
            if self._left == 0:
                act(trainer)

        setattr(self, hook, called)


@dataclass(frozen=True)
class Moment:
    """When a checkpoint is saved, and how the run goes on from it."""

    first: Options
    """Of the Trainer that saves."""

    then: Options
    """Of the Trainer that resumes."""

    hook: str = ""
    """Where it is saved, at its ``count``-th call. Default: after the fit."""

    count: int = 1
    done: int | None = None
    """Batches before the moment, if it is in an epoch."""

    stop_at: int = 0
    """Batch after which ``trainer.should_stop`` is set in the first fit."""

    workers: int = 0
    validate: bool = False
    batch_size: int = 10
    """Of the run that resumes."""


def loader(workers: int = 0, batch_size: int = 10, replicas: int = 2) -> DataLoader:
    dataset = TensorDataset(torch.arange(SAMPLES).float())
    sampler = DistributedSampler(dataset, num_replicas=replicas, rank=0) if replicas else None
    # As in a program of its own; a rank of `spawn` would start every worker by importing torch again.
    context = "fork" if workers else None
    return DataLoader(
        dataset, batch_size, sampler=sampler, shuffle=None if replicas else True,
        num_workers=workers, multiprocessing_context=context,
    )  # fmt: skip


def train(
    strategy: Any, data: Any, options: Options, *callbacks: pl.Callback, kind: type[Seen] = Seen, **fit: Any
) -> tuple[pl.Trainer, Any]:
    module = kind()
    trainer = trainer_of(strategy, callbacks=list(callbacks), num_sanity_val_steps=0, **{"max_epochs": None, **options})
    trainer.fit(module, data, **fit)
    return trainer, module.seen


def resumed(strategy: Any, moment: Moment, path: Path, replicas: int = 2, kind: type[Seen] = Seen) -> list[Batch]:
    """Batches of the second run."""
    callbacks: list[pl.Callback] = []
    validation = {"val_dataloaders": loader()} if moment.validate else {}
    if moment.hook:
        callbacks.append(At(moment.hook, moment.count, lambda trainer: trainer.save_checkpoint(path)))
    if moment.stop_at:
        callbacks.append(At("on_train_batch_end", moment.stop_at, lambda t: setattr(t, "should_stop", True)))
    trainer, _ = train(
        strategy, loader(moment.workers, 10, replicas), moment.first, *callbacks, kind=kind, **validation
    )
    if not moment.hook:
        trainer.save_checkpoint(path)
    data = loader(moment.workers, moment.batch_size, replicas)
    return train(strategy, data, moment.then, ckpt_path=path, kind=kind, **validation)[1]


def check(moments: dict[str, Moment], trusted: str, folder: Path, replicas: int = 2, kind: type[Seen] = Seen) -> None:
    """Compare all moments, and report all that differ."""
    problems = []
    for number, (name, moment) in enumerate(moments.items()):
        ours = resumed(2, moment, folder / f"{number}-ours.ckpt", replicas, kind)
        if moment.done is None:
            # Workers have taken the indices of an earlier epoch before Lightning names the next one.
            alone = replace(moment, workers=0)
            expected = resumed(trusted, alone, folder / f"{number}-trusted.ckpt", replicas, kind)
        else:
            data = loader(moment.workers, moment.batch_size, replicas)
            expected = train(trusted, data, moment.then, kind=kind)[1][moment.done * 10 // moment.batch_size :]
        if ours != expected:
            problems.append(f"{name}:\n  is   {ours}\n  must {expected}")
    assert not problems, "\n".join(problems)


EPOCHS = {"max_epochs": 3}
LIMIT = {"limit_train_batches": 4}
AT_BATCH, AT_VALIDATION, AT_EPOCH_END = "on_train_batch_end", "on_validation_end", "on_train_epoch_end"
MOMENTS = {
    "after": {
        "max_steps, in an epoch": Moment({"max_steps": 4}, {"max_steps": 14}),
        "max_steps, in the second epoch": Moment({"max_steps": 8}, {"max_steps": 20}),
        "max_steps, at an epoch's end": Moment({"max_steps": 6}, {"max_steps": 16}),
        "max_steps, then max_epochs": Moment({"max_steps": 4}, EPOCHS),
        "max_epochs": Moment({"max_epochs": 1}, EPOCHS),
        "max_epochs, then max_steps": Moment({"max_epochs": 1}, {"max_steps": 16}),
        "should_stop": Moment(EPOCHS, EPOCHS, stop_at=2),
        "should_stop before max_steps": Moment({"max_steps": 20}, {"max_steps": 14}, stop_at=2),
        "max_time": Moment({"max_time": {"seconds": 0}, "max_steps": 5}, {"max_steps": 9}),
        "limited": Moment({"max_steps": 4, **LIMIT}, {"max_steps": 9, **LIMIT}),
        "limited, in an epoch": Moment({"max_steps": 6, **LIMIT}, {"max_steps": 13, **LIMIT}),
        "limited epochs": Moment({"max_epochs": 1, **LIMIT}, EPOCHS | LIMIT),
        "accumulation": Moment(
            {"max_steps": 2, "accumulate_grad_batches": 2}, {"max_steps": 7, "accumulate_grad_batches": 2}
        ),
        "early end of an epoch, by steps": Moment({"max_steps": 4}, {"max_steps": 14}, AT_EPOCH_END),
        "early end of an epoch, then epochs": Moment({"max_steps": 4}, EPOCHS, AT_EPOCH_END),
        "early end of an epoch, should_stop": Moment(EPOCHS, EPOCHS, AT_EPOCH_END, stop_at=2),
        "on_train_end in an epoch": Moment({"max_steps": 4}, {"max_steps": 14}, "on_train_end"),
        "on_train_end": Moment({"max_epochs": 1}, EPOCHS, "on_train_end"),
        "an epoch's end, by steps": Moment({"max_steps": 8}, {"max_steps": 16}, AT_EPOCH_END),
        "an epoch's end, by steps, limited": Moment(
            {"max_steps": 6, **LIMIT}, {"max_steps": 14, **LIMIT}, AT_EPOCH_END
        ),
        "an epoch's start": Moment({"max_epochs": 2}, EPOCHS, "on_train_epoch_start", 2),
        "an epoch's start, limited": Moment({"max_epochs": 2, **LIMIT}, EPOCHS | LIMIT, "on_train_epoch_start", 2),
    },
    "in": {
        "by steps": Moment({"max_steps": 5}, {"max_steps": 14}, AT_BATCH, 3, 3),
        "by epochs": Moment({"max_epochs": 1}, EPOCHS, AT_BATCH, 3, 3),
        "the second epoch": Moment({"max_epochs": 2}, EPOCHS, AT_BATCH, 9, 9),
        "a worker, the second epoch": Moment({"max_epochs": 2}, {"max_epochs": 2}, AT_BATCH, 9, 9, workers=1),
        "limited": Moment({"max_epochs": 1, **LIMIT}, EPOCHS | LIMIT, AT_BATCH, 3, 3),
        "accumulation": Moment(
            {"max_epochs": 1, "accumulate_grad_batches": 2}, EPOCHS | {"accumulate_grad_batches": 2}, AT_BATCH, 4, 4
        ),
        "a batch's start": Moment({"max_epochs": 1}, EPOCHS, "on_train_batch_start", 4, 3),
        "before validation": Moment(
            {"max_epochs": 1, "val_check_interval": 3},
            EPOCHS | {"val_check_interval": 3},
            "on_validation_start",
            1,
            3,
            validate=True,
        ),
        "validation": Moment(
            {"max_steps": 5, "val_check_interval": 3},
            {"max_steps": 16, "val_check_interval": 3},
            AT_VALIDATION,
            1,
            3,
            validate=True,
        ),
        "another batch size": Moment({"max_epochs": 1}, EPOCHS, AT_BATCH, 3, 3, batch_size=5),
    },
    "at the end of": {
        "the last batch": Moment({"max_epochs": 1}, EPOCHS, AT_BATCH, 6, 6),
        "the last batch, by steps": Moment({"max_steps": 8}, {"max_steps": 16}, AT_BATCH, 6, 6),
        "the last batch, limited": Moment({"max_epochs": 1, **LIMIT}, EPOCHS | LIMIT, AT_BATCH, 4, 4),
        "the last batch, limited, by steps": Moment(
            {"max_steps": 6, **LIMIT}, {"max_steps": 14, **LIMIT}, AT_BATCH, 4, 4
        ),
        "the last of two validations": Moment(
            {"max_epochs": 1, "val_check_interval": 3},
            EPOCHS | {"val_check_interval": 3},
            AT_VALIDATION,
            2,
            6,
            validate=True,
        ),
        "validation": Moment({"max_epochs": 1}, EPOCHS, AT_VALIDATION, 1, 6, validate=True),
        "validation, by steps": Moment({"max_steps": 8}, {"max_steps": 16}, AT_VALIDATION, 1, 6, validate=True),
        "validation, limited": Moment({"max_epochs": 1, **LIMIT}, EPOCHS | LIMIT, AT_VALIDATION, 1, 4, validate=True),
        "validation, limited, by steps": Moment(
            {"max_steps": 6, **LIMIT}, {"max_steps": 14, **LIMIT}, AT_VALIDATION, 1, 4, validate=True
        ),
        "the epoch": Moment({"max_epochs": 1}, EPOCHS, AT_EPOCH_END, 1, 6),
        "the epoch, limited": Moment({"max_epochs": 1, **LIMIT}, EPOCHS | LIMIT, AT_EPOCH_END, 1, 4),
    },
    "with workers": {
        "after max_steps": Moment({"max_steps": 4}, {"max_steps": 14}, workers=2),
        "in an epoch": Moment({"max_epochs": 1}, EPOCHS, AT_BATCH, 3, 3, workers=2),
        "last batch": Moment({"max_epochs": 1}, EPOCHS, AT_BATCH, 6, 6, workers=2),
        "limited": Moment({"max_epochs": 1, **LIMIT}, EPOCHS | LIMIT, AT_BATCH, 4, 4, workers=2),
        "validation": Moment({"max_epochs": 2}, EPOCHS, AT_VALIDATION, 2, 12, workers=2, validate=True),
    },
}


@pytest.mark.parametrize("kind", [Seen, Asks])
@pytest.mark.parametrize(
    "where", [pytest.param(name, marks=[pytest.mark.slow] if name == "with workers" else []) for name in MOMENTS]
)
@on_ranks(1, timeout_s=120)
def test_on_one_rank_as_a_plain_trainer_and_as_without_interruption(
    rank: int, world_size: int, tmp_path: Path, where: str, kind: type[Seen]
) -> None:
    check(MOMENTS[where], "auto", tmp_path, kind=kind)


@on_ranks(2)
def test_on_two_ranks_as_ddp_and_as_without_interruption(rank: int, world_size: int, tmp_path: Path) -> None:
    """With the sampler that Lightning inserts."""
    chosen = {
        "after": MOMENTS["after"]["max_steps, in an epoch"],
        "in": MOMENTS["in"]["by epochs"],
        "at the end": MOMENTS["at the end of"]["the last batch, limited"],
    }
    for kind in (Seen, Asks):
        check(chosen, "ddp", tmp_path / kind.__name__, replicas=0, kind=kind)


@on_ranks(1)
def test_the_last_batch_is_the_last_in_batches_of_another_size(rank: int, world_size: int, tmp_path: Path) -> None:
    """60 samples in batches of 7 are nine, not the 60 // 7 = 8 that six batches of ten would be."""
    moment = Moment({"max_epochs": 1}, EPOCHS, AT_BATCH, 6, 6, batch_size=7)
    expected = train("auto", loader(batch_size=7), EPOCHS)[1][9:]
    assert resumed(2, moment, tmp_path / "a.ckpt") == expected


@on_ranks(1)
def test_a_second_fit_with_the_same_loader_leaves_nothing_out(rank: int, world_size: int, tmp_path: Path) -> None:
    """Neither after a fit that resumed, nor after one that had nothing left to do."""
    path, data = tmp_path / "a.ckpt", loader()
    train(2, data, {"max_steps": 3}, At(AT_BATCH, 3, lambda trainer: trainer.save_checkpoint(path)))
    expected = train("auto", data, {"max_steps": 12})[1]
    trainer, done = train(2, data, {"max_steps": 3}, ckpt_path=path)
    assert done == []
    assert train(2, data, {"max_steps": 12})[1] == expected
    trainer, rest = train(2, data, {"max_steps": 12}, ckpt_path=path)
    assert rest == expected[3:]
    module = Seen()
    trainer.fit_loop.epoch_loop.max_steps = 24
    trainer.fit(module, data, ckpt_path=path)
    assert module.seen[:9] == expected[3:]


@on_ranks(1)
def test_a_run_that_goes_on_within_accumulated_batches_says_that_gradients_are_lost(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """After the fourth of six batches there was a step, and after the last one."""
    options = {"max_epochs": 2, "accumulate_grad_batches": 4}
    for count in (3, 4, 5, 6):
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            resumed(2, Moment(options, options, AT_BATCH, count, count), tmp_path / f"{count}.ckpt")
        texts = [text for each in noted if "accumulated batches" in (text := str(each.message))]
        lost = {3: "after 3 of 4", 5: "after 1 of 4"}.get(count)
        assert len(texts) == (lost is not None), texts
        assert lost is None or lost in texts[0]
