"""Optimizer states of tensor classes that cannot be copied, or viewed as bytes: one error on all ranks at a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.errors import CheckpointError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import Net, fit, on_ranks


class Packed(Tensor):
    """As torchao's states: a wrapper that knows few operations."""

    inside: Tensor

    @staticmethod
    def __new__(cls: Any, values: Tensor) -> Packed:
        self = Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        self.inside = values
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "Packed()"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].inside)
        raise NotImplementedError(str(func))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Packed, (self.inside,)


class Packs(Optimizer):
    """SGD with a packed state."""

    whole_tensors = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            self.state[p]["packed"] = Packed(p.detach().clone().to(torch.int8))
            p.add_(p.grad, alpha=-0.01)
        return loss


class Trains(Net):
    def configure_optimizers(self) -> Any:
        return Packs(self.parameters(), {})


@pytest.mark.parametrize("checkpoint", ["file", "sharded"])
@on_ranks(2)
def test_a_save_is_an_error_with_the_cure_on_all_ranks(
    rank: int, world_size: int, checkpoint: Any, tmp_path: Path
) -> None:
    trainer: Any = fit(ZeROStrategy(3, checkpoint=checkpoint), Trains(), max_epochs=1)
    with pytest.raises((StateError, CheckpointError), match=r"of the class Packed.*precision.moments='int8'"):
        trainer.save_checkpoint(tmp_path / "saved")
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
