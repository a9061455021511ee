"""Saves and resumes: in the middle of an epoch, on other numbers of ranks, under other strategies, and killed ones."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ls_strategy.extras.conformance.case import WIDTH, AdamNet, Case
from ls_strategy.extras.conformance.habit import habit
from ls_strategy.extras.conformance.lightning import callbacks

_EPOCH = 4  # batches
_OPTIONS: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": True}
_RESUMED = "one process without an interruption, and the same bits as before it"


def _every(case: Case, **when: int) -> callbacks.ModelCheckpoint:
    return callbacks.ModelCheckpoint(case.saves, "{epoch}-{step}", save_top_k=-1, **when)  # type: ignore[arg-type]


def _goes_on_from(case: Case, model: AdamNet, *batches: str) -> None:
    """Claim that the first batch of a resumed run is one of these: a run from the start has right losses too."""
    first = next(iter(model.losses), "none")
    case.claim(f"it goes on from {' or '.join(batches)} (it did from {first})", first in batches)
    case.note_losses(model)


def _resume(case: Case, name: str, first: str, loader: Any = None) -> None:
    """Go on from a checkpoint, and compare with the same rank's losses of the phase before, bit for bit."""
    model = case.module(AdamNet)
    case.fit(model, loader or case.loader(_EPOCH), ckpt_path=case.saves / name, **_OPTIONS)
    if case.before is not None:
        for batch, loss in model.losses.items():
            right = case.before.notes[f"loss of {batch}"].value
            case.claim(f"the loss of {batch} has the same bits ({loss!r} is {right!r})", loss == right)
    _goes_on_from(case, model, first)


def _interrupted(case: Case, loader: Any = None, **when: int) -> None:
    case.train(AdamNet, loader or case.loader(_EPOCH), callbacks=[_every(case, **when)], **_OPTIONS)


@habit(right=_RESUMED, trusted_phases="first")
def resume_after_epoch(case: Case) -> None:
    """Resumes from the end of an epoch, in new processes."""
    _interrupted(case, every_n_epochs=1)


@resume_after_epoch.then()
def _(case: Case) -> None:
    _resume(case, "epoch=0-step=4.ckpt", "epoch 1 batch 0")


@habit(right=_RESUMED, trusted_phases="first", warning="your dataloader is not resumable")
def resume_in_epoch(case: Case) -> None:
    """Resumes from the middle of an epoch, in new processes, with a plain DataLoader and a DistributedSampler."""
    _interrupted(case, every_n_train_steps=6)


@resume_in_epoch.then()
def _(case: Case) -> None:
    _resume(case, "epoch=1-step=6.ckpt", "epoch 1 batch 2")


class _KeepsPosition(DataLoader[Any]):
    """A loader with the protocol that Lightning asks for."""

    given = skipped = 0

    def __iter__(self) -> Any:
        self.given, self.skipped = self.skipped, 0
        for batch in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["given"] % len(self)


def _positioned(case: Case) -> _KeepsPosition:
    rows = case.rows(_EPOCH)
    return _KeepsPosition(rows, batch_size=case.batch_size, sampler=case.sampler(rows))


@habit(right=_RESUMED, trusted_phases="first")
def resume_in_epoch_stateful(case: Case) -> None:
    """Resumes from the middle of an epoch, in new processes, with a DataLoader that has a state_dict."""
    _interrupted(case, _positioned(case), every_n_train_steps=6)


@resume_in_epoch_stateful.then()
def _(case: Case) -> None:
    _resume(case, "epoch=1-step=6.ckpt", "epoch 1 batch 2", _positioned(case))


def _train_and_save(case: Case) -> None:
    model = case.module(AdamNet)
    trainer = case.fit(model)
    trainer.save_checkpoint(case.saves / "model.ckpt")


def _load(case: Case) -> None:
    model = AdamNet.load_from_checkpoint(case.saves / "model.ckpt", map_location="cpu")
    case.note_outputs(model)


@habit(right="the outputs of one process")
def save_and_load(case: Case) -> None:
    """Calls trainer.save_checkpoint, and Module.load_from_checkpoint on all ranks."""
    _train_and_save(case)
    _load(case)


@habit(right="the outputs of one process")
def load_on_one(case: Case) -> None:
    """Saves on all ranks, and calls Module.load_from_checkpoint in one process without a strategy."""
    _train_and_save(case)


@load_on_one.then(ranks="one", strategy="none")
def _(case: Case) -> None:
    _load(case)


@habit(right="the outputs of one process")
def torch_load(case: Case) -> None:
    """Saves on all ranks, and reads the file with torch.load(path)['state_dict'] in one process."""
    _train_and_save(case)


@torch_load.then(ranks="one", strategy="none")
def _(case: Case) -> None:
    model = AdamNet()
    model.load_state_dict(torch.load(case.saves / "model.ckpt", map_location="cpu", weights_only=False)["state_dict"])
    case.note_outputs(model)


def _continue(case: Case) -> None:
    model = case.module(AdamNet)
    case.fit(model, case.loader(_EPOCH), ckpt_path=case.saves / "epoch=0-step=4.ckpt", **_OPTIONS)
    _goes_on_from(case, model, "epoch 1 batch 0")


@habit(trusted_phases="first")
def resume_on_one(case: Case) -> None:
    """Saves on all ranks, and resumes on one with the same strategy."""
    _interrupted(case, every_n_epochs=1)


@resume_on_one.then(ranks="one")
def _(case: Case) -> None:
    _continue(case)


@habit(trusted_phases="first")
def resume_plain(case: Case) -> None:
    """Saves on all ranks, and resumes in one process with a plain Trainer."""
    _interrupted(case, every_n_epochs=1)


@resume_plain.then(ranks="one", strategy="none")
def _(case: Case) -> None:
    _continue(case)


@habit(trusted_phases="first", strategy="ddp")
def resume_from_ddp(case: Case) -> None:
    """Trains and saves under DDP, and resumes under the strategy."""
    _interrupted(case, every_n_epochs=1)


@resume_from_ddp.then()
def _(case: Case) -> None:
    _continue(case)


class _KeepsOwn(AdamNet):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(float(len(self.history)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["history"] = {"list": self.history, "tensor": torch.tensor(self.history)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = checkpoint["history"]["list"]
        self.loaded = checkpoint["history"]["tensor"]


@habit(right="what was saved")
def own_values(case: Case) -> None:
    """Keeps values of its own in checkpoints, by on_save_checkpoint and on_load_checkpoint."""
    trainer = case.fit(case.module(_KeepsOwn))
    trainer.save_checkpoint(case.saves / "model.ckpt")


@own_values.then()
def _(case: Case) -> None:
    model = case.module(_KeepsOwn)
    trainer = case.fit(model, max_epochs=2, ckpt_path=case.saves / "model.ckpt")
    case.note("tensor", model.loaded)
    case.note("list", model.history)
    case.note("step", trainer.global_step)


class _PlannedError(Exception):
    """Raised by the habit itself."""


class _Fails(AdamNet):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            raise _PlannedError


@habit(right="the outputs of one process after as many steps")
def checkpoint_on_exception(case: Case) -> None:
    """Fails on all ranks with OnExceptionCheckpoint, and loads what it has saved without a strategy."""
    saving = callbacks.OnExceptionCheckpoint(case.saves, "failed")
    with suppress(_PlannedError):
        case.fit(case.module(_Fails), callbacks=[saving], enable_checkpointing=True)


@checkpoint_on_exception.then(ranks="one", strategy="none")
def _(case: Case) -> None:
    case.note_outputs(AdamNet.load_from_checkpoint(case.saves / "failed.ckpt", map_location="cpu"))


# --- a kill -----------------------------------------------------------------------------------------------------------


class _Large(AdamNet):
    """Large enough that a save takes a while."""

    def build(self) -> None:
        super().build()
        self.wide = nn.Sequential(nn.Linear(WIDTH, 1500), nn.Linear(1500, 1500), nn.Linear(1500, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.wide(x))


class _Saves(callbacks.Callback):
    """Saves after every epoch to one path; from the second save on the phase may be killed."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.strategy.barrier()
            self.case.arm()
            time.sleep(_LOOK_S)
        trainer.save_checkpoint(self.case.saves / "last.ckpt")


_LOOK_S = 0.3  # in which the suite sees what is there before the save


@habit(
    right="a checkpoint is there, and the run goes on as one process without an interruption",
    trusted_phases="first",
    killed_rank=0,
)
def killed_in_save(case: Case) -> None:
    """Saves to one path after every epoch; rank 0 is killed (SIGKILL) in the second save; resumes from that path."""
    case.train(_Large, case.loader(2), callbacks=[_Saves(case)], max_epochs=4)


@killed_in_save.then(loses_data=True)
def _(case: Case) -> None:
    model = case.module(_Large)
    case.fit(model, case.loader(2), ckpt_path=case.saves / "last.ckpt", max_epochs=4)
    _goes_on_from(case, model, "epoch 1 batch 0", "epoch 2 batch 0")
