"""``offload.delay_after``: every update after the warm-up is applied one step late (ZeRO-Offload, section 5.2)."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.zero.step.update import _ChunkUpdate
from tests.dist.ranks import Net, assert_close, batches, mean_over_ranks, on_ranks, trainer_of, weights

pytestmark = pytest.mark.wide

STEPS = 8
WARM_UP = 3


class Delayed(Net):
    """Validation reads the weights that training has reached."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []

    def validation_step(self, batch: Any, i: int) -> None:
        self.validated.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def reference(global_data: list[tuple[Tensor, Tensor]]) -> tuple[list[float], dict[str, Tensor], float]:
    """One process, plain torch: gradients at the weights shown, steps on the weights kept apart."""
    shown, kept = Delayed(), Delayed()
    optimizer = kept.configure_optimizers()
    losses: list[float] = []
    for step, batch in enumerate(global_data, start=1):
        loss = shown.loss(batch)
        losses.append(loss.item())
        shown.zero_grad()
        loss.backward()
        before = {k: v.clone() for k, v in kept.state_dict().items()}
        for p, q in zip(kept.parameters(), shown.parameters(), strict=True):
            p.grad = q.grad.clone()
        optimizer.step()
        shown.load_state_dict(kept.state_dict() if step <= WARM_UP else before)
    return losses, kept.state_dict(), kept.loss(global_data[0]).item()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@on_ranks(2)
def test_is_a_delay_of_one_step(rank: int, world_size: int, stage: int, tier: str, tmp_path: Any) -> None:
    """Losses, and after training all updates; trusted run: two models in plain torch, one a step behind."""
    data = list(batches(numel=STEPS * 8, batch_size=4))
    pairs = [data[2 * i : 2 * i + 2] for i in range(STEPS)]  # what Lightning's sampler would not give: the same batches
    whole = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs]
    losses, expected, validated = reference(whole)
    module = Delayed()
    strategy = ZeROStrategy(
        stage,
        sharding={"min_unit_numel": 0},
        offload={"optimizer": tier, "nvme_path": str(tmp_path), "delay_after": WARM_UP},
    )
    trainer = trainer_of(strategy, max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0)
    loaders = [DataLoader(b, batch_size=None) for b in ([pair[rank] for pair in pairs], [whole[0]])]  # type: ignore[arg-type]
    trainer.fit(module, *loaders)
    assert_close(mean_over_ranks(module.losses), losses, "losses")
    assert_close(weights(module), expected, "weights")
    assert_close(module.validated, [validated], "validation sees every update")


class Looks(Delayed):
    """User code that reads the memory of a parameter in every step, and may have written to it."""

    def loss(self, batch: Any) -> Tensor:
        for p in self.parameters():
            p.untyped_storage()
        return super().loss(batch)


def fit(module: Delayed, **options: Any) -> Delayed:
    offload = {"optimizer": "cpu", "delay_after": WARM_UP}
    strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, offload=offload)
    trainer_of(strategy, max_epochs=1, **options).fit(module, batches(STEPS * 8, 4))
    return module


@on_ranks(2)
def test_no_update_is_lost_if_memory_was_read(rank: int, world_size: int) -> None:
    """While the masters are ahead of the parameters, a difference between the two is no write of the user's."""
    plain, looks = fit(Delayed()), fit(Looks())
    assert looks.losses == plain.losses
    assert_close(weights(looks), weights(plain), "weights", 0.0)


class Waits(Callback):
    """Holds every delayed update back until the next forward and backward are over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.over.set()
        self.in_time: list[bool] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if WARM_UP <= trainer.global_step < STEPS - 1:
            self.over.clear()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.over.set()

    def update(self, job: Any) -> None:
        self.in_time.append(self.over.wait(timeout=5.0))
        _UPDATE(job)


_UPDATE = _ChunkUpdate.update


@on_ranks(2)
def test_an_update_runs_while_the_next_step_computes(rank: int, world_size: int) -> None:
    """The next forward and backward do not wait for it."""
    waits = Waits()
    with mock.patch.object(_ChunkUpdate, "update", lambda job: waits.update(job)):
        fit(Delayed(), callbacks=[waits])
    assert len(waits.in_time) >= STEPS
    assert all(waits.in_time)
