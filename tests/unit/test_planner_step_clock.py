"""The clock of a fit: what it counts, and that it leaves nothing behind."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.extras.callbacks.monitor import Monitor
from ls_strategy.extras.planner import step_clock
from ls_strategy.extras.planner.step_clock import StepClock, typical
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.spans import SpanRecorder

CPU = torch.device("cpu")


class Net(pl.LightningModule):
    """Sleeps in validation, and raises in a batch if it is told to."""

    def __init__(self, raises_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.raises_at = raises_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.raises_at:
            raise RuntimeError("as told")
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(module: Net, callbacks: list[Any], **options: Any) -> list[Any]:
    """Return the callbacks that are left."""
    data, validation = (DataLoader(TensorDataset(torch.zeros(n, 4)), batch_size=2) for n in (32, 2))
    trainer: Any = pl.Trainer(
        accelerator="cpu", devices=1, strategy=ZeROStrategy(1), max_epochs=1, logger=False, callbacks=callbacks,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, data, validation)
    return trainer.callbacks


@pytest.mark.parametrize("accumulate", [1, 2])
def test_phases_of_optimizer_steps_without_validation(accumulate: int):
    found: list[dict[str, float]] = []
    clock = StepClock(CPU, found.append)
    left = fit(Net(), [clock], val_check_interval=4, accumulate_grad_batches=accumulate)
    (seconds,) = found
    parts = sum(seconds[name] for name in ("forward", "backward", "optimizer", "rest"))
    assert parts == pytest.approx(seconds["step"])
    assert 0 < seconds["step"] < 0.1, "validation slept for longer"
    assert SpanRecorder.active is None
    assert clock not in left


def test_beside_a_monitor_steps_have_no_phases_and_the_monitor_keeps_its_recorder():
    found: list[dict[str, float]] = []
    monitor = Monitor()
    fit(Net(), [monitor, StepClock(CPU, found.append)], val_check_interval=4)
    (seconds,) = found
    assert set(seconds) == {"step"}
    assert 0 < seconds["step"] < 0.1
    assert "16 steps" in monitor._table.text()


def test_nothing_is_told_of_a_fit_that_failed_or_was_short():
    found: list[dict[str, float]] = []
    callbacks: list[Any] = [StepClock(CPU, found.append)]
    module: Any = Net(raises_at=10)
    with pytest.raises(RuntimeError, match="as told"):
        fit(module, callbacks)
    assert callbacks[0] not in module.trainer.callbacks
    fit(Net(), [StepClock(CPU, found.append)], max_steps=4)
    assert not found
    assert SpanRecorder.active is None


def test_only_the_first_steps_are_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_clock, "STEPS", 4)
    found: list[dict[str, float]] = []
    clock = StepClock(CPU, found.append)

    class Later(pl.Callback):
        """Looks whether anything is recorded in the end."""

        active: Any = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.active = SpanRecorder.active

    later = Later()
    fit(Net(), [clock, later], limit_val_batches=0)
    assert later.active is None
    assert len(clock._samples) == 4
    assert len(found) == 1


def test_disturbed_steps_do_not_count():
    samples = [{"step": 1.0, "forward": 0.5}] * 3 + [{"step": 9.0, "forward": 8.0}] * 2
    assert typical(samples) == {"step": 1.0, "forward": 0.5}
