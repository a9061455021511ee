"""A module that ZeROStrategy has trained is the user's: backward by hand, other strategies, gradients of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.ranks import WIDTH, Block, Net, assert_close, batches, fit, on_ranks, samples, weights


class BlocksOnly(Net):
    """The first unit gets the data itself, which need no gradient: nothing in backward marks its end."""

    def build(self) -> None:
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def gradients(module: Net) -> dict[str, Tensor]:
    """Two backward passes by hand, without an optimizer."""
    for seed in (5, 6):
        module.loss(samples(4, seed)).backward()
    found = {name: p.grad.clone() if p.grad is not None else torch.zeros(1) for name, p in module.named_parameters()}
    module.zero_grad()
    return found


@pytest.mark.parametrize("kind", [Net, pytest.param(BlocksOnly, marks=pytest.mark.wide)])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.wide), 3])
@on_ranks(2)
def test_a_backward_by_hand_and_a_fit_of_ddp_after_a_fit(
    rank: int, world_size: int, stage: int, kind: type[Net]
) -> None:
    """The first gradients are not an engine's any more, although its hooks stay at stage 3."""
    module, fresh = kind(), kind()
    fit(stage, module).test(module, batches(), verbose=False)
    fresh.load_state_dict(weights(module))
    assert_close(gradients(module), gradients(fresh), "gradients by hand")
    module.losses.clear()
    fit("ddp", module)
    fit("ddp", fresh)
    assert_close(module.losses, fresh.losses, "losses of DDP")
    assert_close(weights(module), weights(fresh), "weights of DDP")
    fit(stage, module)
    fit(stage, fresh)
    assert_close(module.losses, fresh.losses, "losses of a fit after it")


class ByHand(Net):
    """Some parameters are stepped by an optimizer that Lightning does not know, inside of a step or after it."""

    inside = False

    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.blocks.append(Block())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.extra(x))

    def configure_optimizers(self) -> Any:
        own = [*self.extra.parameters(), *self.blocks[-1].parameters()]
        # Torch's fused updates do not count in `_version`.
        self.__dict__["optimizer"] = torch.optim.AdamW(own, lr=1e-2, eps=1e-4, fused=True)
        others = {id(p) for p in self.parameters()} - {id(p) for p in own}
        return torch.optim.SGD([p for p in self.parameters() if id(p) in others], lr=0.05)

    def update(self) -> None:
        for p in self.__dict__["optimizer"].param_groups[0]["params"]:
            p.grad = torch.full(p.shape, 0.01)
        self.__dict__["optimizer"].step()
        self.__dict__["optimizer"].zero_grad()

    def training_step(self, batch: Any, i: int) -> Any:
        loss = self.noted_loss(batch)
        if self.inside:
            self.update()
            loss = self.loss(batch)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.inside:
            self.update()


class ByHandInside(ByHand):
    inside = True


@pytest.mark.parametrize("kind", [pytest.param(ByHand, marks=pytest.mark.wide), ByHandInside])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.wide), 3])
@on_ranks(2)
def test_fused_updates_of_the_users_own_are_kept(rank: int, world_size: int, stage: int, kind: type[ByHand]) -> None:
    module, expected = kind(), kind()
    fit(stage, module)
    fit("ddp", expected)
    assert_close(module.losses, expected.losses, "losses")
    assert_close(weights(module), weights(expected), "weights")


class BesideTheirs(Net):
    """An optimizer that Lightning does not know steps what the configured one is about to step, some of it gathered."""

    def configure_optimizers(self) -> Any:
        self.__dict__["own"] = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, fused=True)
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.__dict__["own"].step()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.wide), 3])
@on_ranks(2)
def test_fused_updates_before_the_step_of_the_same_parameters_are_kept(rank: int, world_size: int, stage: int) -> None:
    module, expected = BesideTheirs(), BesideTheirs()
    fit(stage, module, max_steps=3)
    fit("ddp", expected, max_steps=3)
    assert_close(module.losses, expected.losses, "losses")
    assert_close(weights(module), weights(expected), "weights")
