"""Errors and numbers that are none, on one rank or on all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ls_strategy.extras.conformance.case import ROWS, Case, Net
from ls_strategy.extras.conformance.habit import habit


class _Raises(Net):
    raises = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.raises and batch_idx == 2:
            raise ValueError("the error of one rank")
        return super().training_step(batch, batch_idx)


@habit(right="every rank ends with an error within the limit", trusted="nobody", ends="in an error")
def error_on_one_rank(case: Case) -> None:
    """Raises in training_step on the last rank."""
    model = case.module(_Raises)
    model.raises = case.rank == case.ranks - 1
    case.fit(model)


class _Nan(Net):
    rows = 0  # of a global batch

    def loss(self, batch: Any) -> Tensor:
        index, x, y = batch
        return super().loss((index, x * float("nan") if int(index[0]) // self.rows == 2 else x, y))


@habit(right="losses that are NaN from there on, as in one process")
def nan_batch(case: Case) -> None:
    """Has a batch that is all NaN."""
    model = case.module(_Nan)
    model.rows = ROWS * case.ranks
    case.fit(model)
    case.note_losses(model)


class _NanOnOne(Net):
    nan_here = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        return loss * float("nan") if self.nan_here and batch_idx == 2 else loss


@habit(right="NaN on every rank from the next batch on", trusted="nobody")
def nan_on_one_rank(case: Case) -> None:
    """Has a loss that is NaN on rank 0 alone."""
    model = case.module(_NanOnOne)
    model.nan_here = case.rank == 0
    case.fit(model)
    later = [loss for name, loss in model.losses.items() if int(name.rsplit(" ", 1)[1]) > 2]
    case.claim("later losses are NaN", bool(later) and all(torch.tensor(later).isnan().tolist()))


class _StopsOnOne(Net):
    stops_here = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.stops_here and batch_idx == 2:
            self.trainer.should_stop = True


@habit(right="all ranks end after the same number of steps", trusted="nobody")
def stop_on_one_rank(case: Case) -> None:
    """Sets trainer.should_stop on the last rank alone."""
    model = case.module(_StopsOnOne)
    model.stops_here = case.rank == case.ranks - 1
    trainer = case.fit(model)
    case.note("steps", trainer.global_step)
