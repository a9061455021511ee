"""At a Python prompt and in a notebook, aliases start ranks in the way that works there, or say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy import ZeROStrategy, device
from ls_strategy.errors import PlanError

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_steps": 2, "limit_val_batches": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lightning takes this process for interactive."""
    for module in (
        "lightning.fabric.utilities.imports", "lightning.fabric.connector",
        "lightning.pytorch.trainer.connectors.accelerator_connector",
    ):  # fmt: skip
        monkeypatch.setattr(f"{module}._IS_INTERACTIVE", True)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_ddp_is_refused_here() -> None:
    """So the tests below can fail."""
    with pytest.raises(Exception, match="not compatible with an interactive"):
        pl.Trainer(strategy="ddp", devices=1, **QUIET)


@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
def test_one_rank_trains_in_this_process(strategy: str) -> None:
    trainer, model = pl.Trainer(strategy=strategy, devices=1, **QUIET), BoringModel()
    before = model.layer.weight.detach().clone()
    trainer.fit(model)
    assert trainer.strategy.launcher is None
    assert trainer.global_step == 2
    assert not torch.equal(before, model.layer.weight)
    # Lightning would take it for the launcher's, and wait for other ranks in the next Trainer.
    assert "LOCAL_RANK" not in os.environ


def test_one_rank_after_another() -> None:
    model = BoringModel()
    for strategy in ("zero2", "zero3"):
        trainer = pl.Trainer(strategy=strategy, devices=1, **QUIET)
        trainer.fit(model)
        assert trainer.test(model, verbose=False)
    assert torch.isfinite(model.layer.weight).all()


@pytest.mark.parametrize("strategy", ["zero1", ZeROStrategy(3)], ids=["alias", "object"])
def test_several_ranks_are_forked(strategy: str | ZeROStrategy) -> None:
    launcher = pl.Trainer(strategy=strategy, devices=2, **QUIET).strategy.launcher
    assert launcher is not None
    assert launcher.is_interactive_compatible


@pytest.mark.parametrize("devices", [1, 2])
def test_a_fabric_does_the_same(devices: int) -> None:
    launcher = Fabric(accelerator="cpu", devices=devices, strategy="zero2").strategy.launcher
    assert launcher is None if devices == 1 else launcher.is_interactive_compatible


@pytest.mark.parametrize("strategy", ["zero3", "zero3_notebook"])
def test_ranks_of_a_process_that_uses_the_device_are_refused(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before one is started: each would fail, and the notebook would wait."""
    trainer = pl.Trainer(strategy=strategy, devices=2, **QUIET)
    monkeypatch.setattr(trainer.strategy, "parallel_devices", [torch.device("cuda", i) for i in range(2)])
    monkeypatch.setattr(device, "is_in_use", lambda: True)
    started: list[object] = []
    monkeypatch.setattr("torch.multiprocessing.start_processes", lambda *args, **options: started.append(args))
    with pytest.raises(PlanError, match=r"already uses cuda.*Restart the kernel.*Or set devices=1"):
        trainer.strategy.launcher.launch(print)
    assert not started


def test_ranks_on_the_host_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pl.Trainer(strategy="zero3", devices=2, **QUIET)
    monkeypatch.setattr(device, "is_in_use", lambda: True)

    def start(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.multiprocessing.start_processes", start)
    with pytest.raises(KeyboardInterrupt):
        trainer.strategy.launcher.launch(print)


def test_a_group_of_one_rank_does_not_reach_forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take it for theirs."""
    first, model = pl.Trainer(strategy="zero3", devices=1, **QUIET), BoringModel()
    first.fit(model)
    assert dist.is_initialized()

    def start(*args: object, **options: object) -> None:
        assert not dist.is_initialized()
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.multiprocessing.start_processes", start)
    with pytest.raises(KeyboardInterrupt):
        pl.Trainer(strategy="zero3", devices=2, **QUIET).strategy.launcher.launch(print)
    assert first.test(model, verbose=False)
