"""What a Trainer does around training: schedules, callbacks, metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ls_strategy.extras.conformance.case import AdamNet, Case, Net
from ls_strategy.extras.conformance.habit import habit
from ls_strategy.extras.conformance.lightning import callbacks, tuner


class _Scheduled(AdamNet):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@habit()
def one_cycle(case: Case) -> None:
    """Steps OneCycleLR after every batch, which changes rate and momentum."""
    trainer = case.train(_Scheduled, max_epochs=2)
    case.note("learning rate", float(trainer.optimizers[0].param_groups[0]["lr"]))


class _Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


@habit()
def reduce_on_plateau(case: Case) -> None:
    """Reduces the learning rate by ReduceLROnPlateau on a validation loss."""
    trainer = case.train(_Plateau, max_epochs=4, limit_val_batches=2)
    case.note("learning rate", float(trainer.optimizers[0].param_groups[0]["lr"]))


class _Found(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@habit(right="the losses of both in one process")
def lr_find(case: Case) -> None:
    """Finds a learning rate with Tuner.lr_find, sets another one, and fits."""
    model = case.module(_Found)
    trainer = case.trainer(enable_checkpointing=True)
    tuner.Tuner(trainer).lr_find(model, case.loader(30), num_training=20, min_lr=1e-3, update_attr=False)
    case.note_losses(model, "search, ")
    model.lr = 0.1
    trainer.fit(model, case.loader())
    case.note_losses(model)


@habit(right="one process: the losses, and the epoch and step of the end")
def early_stopping(case: Case) -> None:
    """Stops early on a validation loss."""
    model = case.module(Net)
    stopping = callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.05)
    trainer = case.fit(model, max_epochs=20, limit_val_batches=2, callbacks=[stopping])
    case.note("epoch", trainer.current_epoch)
    case.note("step", trainer.global_step)
    case.note_losses(model)


class _Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        self.log("mean", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("last", batch[0].max().float(), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        return loss


@habit(right="the metrics of one process, on every rank")
def synced_metrics(case: Case) -> None:
    """Logs with sync_dist=True: a mean, a sum and a maximum."""
    trainer = case.train(_Logs)
    for name, value in trainer.callback_metrics.items():
        case.note(name, value)


class _Gathers(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        outputs = self.all_gather(self(batch[1]))
        assert isinstance(outputs, Tensor)
        if outputs.ndim == 3:  # (ranks, rows, width), and rank r has every row whose index is r modulo their number
            outputs = outputs.transpose(0, 1).flatten(0, 1)
        self.outputs = outputs.detach()


@habit(right="the outputs of one process")
def all_gather(case: Case) -> None:
    """Gathers the outputs of all ranks with self.all_gather."""
    model = case.module(_Gathers)
    case.fit(model, limit_val_batches=2)
    case.note("outputs", model.outputs)


@habit(right="one process: the names that are kept, and the best score")
def save_top_k(case: Case) -> None:
    """Keeps the best two checkpoints by a validation loss (ModelCheckpoint, save_top_k=2)."""
    model = case.module(Net)
    kept = callbacks.ModelCheckpoint(case.saves, "{epoch}", monitor="val_loss", save_top_k=2)
    options = {"enable_checkpointing": True, "limit_val_batches": 2, "max_epochs": 4}
    trainer = case.fit(model, callbacks=[kept], **options)
    trainer.strategy.barrier()
    case.note("kept", sorted(path.name for path in case.saves.iterdir()))
    case.note("best score", kept.best_model_score)
    case.note_losses(model)


@habit(right="one process: the losses, and the metrics of the last validation")
def validates_in_epoch(case: Case) -> None:
    """Validates before the fit and after every second batch."""
    trainer = case.train(Net, max_epochs=2, limit_val_batches=2, num_sanity_val_steps=2, val_check_interval=2)
    case.note("val_loss", trainer.callback_metrics["val_loss"])


@habit()
def accumulation_schedule(case: Case) -> None:
    """Changes the number of accumulated batches with the epoch (GradientAccumulationScheduler)."""
    case.train(Net, max_epochs=3, callbacks=[callbacks.GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})])
