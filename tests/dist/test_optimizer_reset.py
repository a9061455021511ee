"""`load_state_dict` removes the states that it does not get, as in torch: the next update starts afresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import Lion, ZeROStrategy
from ls_strategy.testing import spawn
from tests.marks import few_or_all
from tests.models import Curve, quiet
from tests.trainers import bare_trainer

RESET_AT = 4
OPTIMIZERS = {
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr),
    "adam": lambda params, lr: torch.optim.Adam(params, lr),
    "lion": lambda params, lr: Lion(params, lr),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
}
Cases = tuple[tuple[int, str, str, str], ...]
"""Stage, optimizer, tier, moments."""

FEW: Cases = (
    (0, "adamw", "device", "fp32"),
    (1, "adamw", "device", "int8"),
    (2, "lion", "nvme", "fp32"),
    (3, "adam", "cpu", "fp32"),
    (3, "momentum", "device", "fp32"),
)
CASES: Cases = (
    *((stage, "adamw", "device", "fp32") for stage in (0, 1, 2, 3)),
    *((3, name, "device", "fp32") for name in ("adam", "lion", "momentum")),
    *((2, name, "nvme", "fp32") for name in ("adamw", "lion")),
    (3, "adamw", "cpu", "fp32"),
    (1, "adamw", "device", "bf16"),
    (1, "adamw", "device", "int8"),
    (2, "adamw", "nvme", "int8"),
)


class Net(Curve):
    """Sees the same batch on all ranks and in all steps."""

    def __init__(self, optimizer: str, *, keeps: tuple[int, ...] | None = None) -> None:
        """``keeps``: the parameters whose states stay when others are reset. None: no reset."""
        super().__init__(lambda params: OPTIMIZERS[optimizer](params, self.lr))
        self.lr = 1e-2
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.keeps = keeps

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) - x.roll(1, -1)).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.keeps is None or self.global_step != RESET_AT:
            return
        optimizers: Any = self.optimizers()
        optimizer = optimizers.optimizer
        full: Any = (
            optimizer.state_dict()
            if self.trainer.strategy.__class__.__module__.startswith("lightning")
            else self.trainer.strategy.optimizer_state(optimizer)
        )
        full = self.trainer.strategy.broadcast(full)
        optimizer.load_state_dict({**full, "state": {i: s for i, s in full["state"].items() if i in self.keeps}})


def fit(module: Net, strategy: Any, devices: int, steps: int, **options: Any) -> Tensor:
    data = TensorDataset(torch.randn(8 * steps, 5, generator=torch.Generator().manual_seed(1))[:8].repeat(steps, 1))
    trainer = bare_trainer(strategy, devices, max_steps=steps, use_distributed_sampler=False, **options)
    trainer.fit(module, DataLoader(data, batch_size=8))
    return torch.stack(module.losses)


def strategy_of(stage: Any, tier: str, moments: str, folder: str) -> ZeROStrategy:
    offload = {} if tier == "device" else {"optimizer": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
    return ZeROStrategy(stage=stage, offload=offload, precision={"moments": moments})


def resets(rank: int, world_size: int, folder: str, cases: Cases) -> list[tuple[Tensor, Tensor]]:
    quiet()
    result = []
    for stage, optimizer, tier, moments in cases:
        reset = Net(optimizer, keeps=())
        losses = fit(reset, strategy_of(stage, tier, moments, folder), world_size, 2 * RESET_AT)
        again = Net(optimizer)
        fit(again, strategy_of(stage, tier, moments, folder), world_size, RESET_AT)
        expected = fit(again, strategy_of(stage, tier, moments, folder), world_size, RESET_AT)  # a new optimizer
        result.append((losses, expected))
    return result


@pytest.mark.dist
@pytest.mark.parametrize("cases", few_or_all(FEW, (*FEW, *CASES)))
def test_without_states_the_next_update_is_that_of_a_new_optimizer(cases: Cases, tmp_path: Path):
    results = spawn(resets, 2, str(tmp_path), cases, init_process_group=False)
    trusted = {name: fit(Net(name, keeps=()), "auto", 1, 2 * RESET_AT) for name in {case[1] for case in cases}}
    for ranks in zip(*results, strict=True):
        assert all(torch.equal(*losses) for losses in ranks)
    for case, (losses, _) in zip(cases, results[0], strict=True):
        if case[3] == "fp32":
            torch.testing.assert_close(losses, trusted[case[1]], rtol=1e-5, atol=0, msg=str(case))


def parts(rank: int, world_size: int) -> list[Tensor]:
    quiet()
    return [fit(Net("adamw", keeps=(0, 3)), ZeROStrategy(stage=stage), world_size, 2 * RESET_AT) for stage in (1, 3)]


@pytest.mark.dist
def test_states_of_some_parameters_may_be_removed():
    trusted = fit(Net("adamw", keeps=(0, 3)), "auto", 1, 2 * RESET_AT)
    for losses in spawn(parts, 2, init_process_group=False)[0]:
        torch.testing.assert_close(losses, trusted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_the_search_of_a_learning_rate_leaves_no_states(optimizer: str, tmp_path: Path):
    curves = []
    for strategy in ("auto", "zero1", "zero3"):
        finder = LearningRateFinder(num_training_steps=4, early_stop_threshold=None)
        options = {"callbacks": [finder], "default_root_dir": tmp_path}
        curves.append(fit(Net(optimizer), strategy, 1, RESET_AT, **options)[-RESET_AT:])
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(curves[2], curves[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, 0.1), "optimizer 8.0 MiB, together 16.0 MiB"),
        (lambda p: torch.optim.SGD(p, 0.1), "optimizer 0.0 MiB, together 8.0 MiB"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "optimizer 4.0 MiB, together 12.0 MiB"),
        (lambda p: torch.optim.RMSprop(p, 0.1), "not counted: optimizer states that the first step creates"),
    ],
    ids=["adamw", "sgd", "momentum", "rmsprop"],
)
def test_the_log_has_the_memory_of_this_optimizer(make: Any, expected: str, tmp_path: Path):
    class Wide(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(1024, 1024, bias=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.wide(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return make(self.parameters())

        def on_train_start(self) -> None:
            strategy: Any = self.trainer.strategy
            text = strategy.require_engine().describe()
            assert expected in text, text

    trainer = bare_trainer("zero1", max_steps=1, default_root_dir=tmp_path)
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(4, 1024)), batch_size=4))
