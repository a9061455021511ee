"""States in 8 bits of an optimizer of another package: steps, checkpoints and other layouts, as under DDP."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.marks import few_or_all
from tests.models import Curve, quiet
from tests.optimizers import EachTensor
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist

BLOCK = 16


class EightBit(EachTensor):
    """SGD whose momentum is in codes of 8 bits with a scale per block, if a tensor has some blocks (bitsandbytes)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        in_codes = p.numel() >= 4 * BLOCK and p.numel() % BLOCK == 0
        momentum = self._decoded(state, p) if in_codes else self._in_fp32(state, p)
        p.sub_(momentum.mul_(0.9).add_(grad), alpha=group["lr"])
        if in_codes:
            self._encode(state, momentum)

    @staticmethod
    def _in_fp32(state: dict[str, Any], param: Tensor) -> Tensor:
        momentum = state.setdefault("m", torch.zeros_like(param, dtype=torch.float32))
        assert momentum.dtype == torch.float32  # which a kernel takes it for
        return momentum

    def state_dict(self) -> dict[str, Any]:
        result = super().state_dict()
        result["state"] = {k: {"quantized": dict(v)} for k, v in result["state"].items()}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put everything in place without torch."""
        given = copy.deepcopy(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        state: Any = defaultdict(dict)
        for i, values in given["state"].items():
            own = values.get("quantized", values)
            state[params[i]] = {k: v.to(params[i].device) for k, v in own.items()}
        groups = [dict(group) for group in given["param_groups"]]
        for group, own in zip(groups, self.param_groups, strict=True):
            group["params"] = own["params"]
        self.__setstate__({"state": state, "param_groups": groups})

    @staticmethod
    def _decoded(state: dict[str, Any], param: Tensor) -> Tensor:
        if not state:
            return torch.zeros_like(param)
        signed = state["m"].view(-1, BLOCK).to(param.dtype) - 128
        return (signed * state["scale"].unsqueeze(1)).view_as(param)

    @staticmethod
    def _encode(state: dict[str, Any], momentum: Tensor) -> None:
        blocks = momentum.view(-1, BLOCK)
        state["scale"] = blocks.abs().amax(1).clamp(min=1e-12) / 127
        state["m"] = ((blocks / state["scale"].unsqueeze(1)).round() + 128).to(torch.uint8).view_as(momentum)


class Coded(Curve):
    """Buffers with parameters of both kinds of states."""

    def __init__(self) -> None:
        super().__init__(EightBit)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(2))
        self.double()

    def loss(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = y + block(y)
        return (y - x.sin()).square().mean()


def fit(rank: int, world_size: int, strategy: Any, folder: Path, start: Path | None = None) -> list[Tensor]:
    """Return the last losses and the final weights of two epochs, saved after each, or of the second one alone."""
    module = Coded()
    data = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1 + rank))
    options = {"precision": "64-true", "max_epochs": 2, "use_distributed_sampler": False, "enable_checkpointing": True}
    saves = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = bare_trainer(strategy, world_size, callbacks=[saves], **options)
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4), ckpt_path=start)
    losses, *weights = module.results()
    return [losses[-3:], *weights]


STRATEGIES: list[dict[str, Any]] = [
    *({"stage": stage, "checkpoint": {"format": form}} for form in ("file", "sharded") for stage in (0, 1, 3)),
    {"stage": 2, "offload": {"optimizer": "cpu"}},
]


def curves(rank: int, world_size: int, strategies: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Return what was run, and its results. Every run is saved in the middle, and another one goes on from there."""
    quiet()
    found: list[Any] = []
    before = folder / "ddp"
    expected = fit(rank, world_size, "ddp", before)
    for i, options in enumerate(strategies):
        start, before = before / "epoch=0.ckpt", folder / str(i)
        found.append((f"{options}", fit(rank, world_size, ZeROStrategy(**options), before), expected))
        resumed = fit(rank, world_size, ZeROStrategy(**options), folder / f"{i}, resumed", start)
        found.append((f"{options}, from {start.parent.name}", resumed, expected))
    return found


@pytest.mark.parametrize("strategies", few_or_all([STRATEGIES[1], STRATEGIES[3]], STRATEGIES))
def test_low_bit_states_survive_checkpoints_and_other_layouts(strategies: list[dict[str, Any]], tmp_path: Path) -> None:
    for rank in spawn(curves, 2, strategies, tmp_path, init_process_group=False, timeout_s=200):
        for where, found, expected in rank:
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13, msg=lambda m, w=where: f"{w}: {m}")
