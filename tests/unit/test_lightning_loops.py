"""How the steps of a run are run: every loop trains as a plain one does, also one of another package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ls_strategy import ZeROStrategy
from ls_strategy.lightning import loop
from ls_strategy.lightning.loop.call import StepCall
from ls_strategy.lightning.loop.join import JoinLoop
from ls_strategy.lightning.loop.plain import LoopParts, StepLoop
from ls_strategy.lightning.loop.virtual import VirtualLoop
from tests.trainers import bare_trainer

DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self.log("val", self.net(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=8)


class InHalves(StepLoop):
    """A loop of another package: the loss of a batch is the mean over its halves, whose activations are smaller."""

    steps = 0

    def train(self, call: StepCall) -> Any:
        call.engine.begin_step(sync_buffers_after=call.synchronises)
        losses = [call.step(half, *call.args[1:], **call.kwargs) for half in call.args[0].chunk(2)]
        call.engine.end_forward()
        self.steps += 1
        return sum(losses) / len(losses)


@pytest.fixture
def registered() -> Iterator[None]:
    def make(parts: LoopParts) -> StepLoop | None:
        return InHalves(parts) if parts.run.config.sharding.prefetch_units == 3 else None

    loop.LOOPS.insert(0, make)
    yield
    loop.LOOPS.remove(make)


STRATEGIES: dict[str, tuple[dict[str, Any], type[StepLoop]]] = {
    "plain": ({}, StepLoop),
    "join": ({"uneven": "join"}, JoinLoop),
    "virtual": ({"parallel": {"virtual_ranks": 1}}, VirtualLoop),
    "of another package": ({"sharding": {"prefetch_units": 3}}, InHalves),
}


def fitted(strategy: Any, **options: Any) -> tuple[list[Tensor], float, Any]:
    module = Module()
    trainer = bare_trainer(strategy, max_epochs=2, use_distributed_sampler=False, **options)
    trainer.fit(module)
    return [p.detach().clone() for p in module.parameters()], float(trainer.callback_metrics["val"]), trainer


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_loop_trains_as_one_device_does(name: str, accumulate: int) -> None:
    options, kind = STRATEGIES[name]
    expected, metric, _ = fitted("auto", accumulate_grad_batches=accumulate)
    found, logged, trainer = fitted(ZeROStrategy(2, **options), accumulate_grad_batches=accumulate)
    assert type(trainer.strategy.loop) is kind
    assert getattr(trainer.strategy.loop, "steps", 12) == 12
    assert logged == pytest.approx(metric, rel=1e-5)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
