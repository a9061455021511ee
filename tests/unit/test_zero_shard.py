"""What an engine builds for its model: buffers of modules, and casts around modules in fp32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import PrecisionConfig
from ls_strategy.engine import Engine
from tests.unit.one_rank import engine_on


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.seen: list[torch.dtype] = []
        self.norm.register_forward_hook(lambda _m, args, _out: self.seen.append(args[0].dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Ranks:
    """A group of two, of which this process is ``rank``; rank 0 sends ones."""

    world_size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: list[int] = []

    def broadcast_(self, flat: Tensor, source: int = 0) -> None:
        self.sent.append(flat.numel())
        if self.rank:
            flat.fill_(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_are_those_of_rank_0_one_message_per_dtype(rank: int) -> None:
    model, comm = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2)), Ranks(rank)
    Engine.broadcast_buffers(SimpleNamespace(model=model, comm=comm))  # type: ignore[arg-type]
    assert sorted(comm.sent) == [2, 10]
    expected: Any = {0: [[0.0] * 3, [0.0] * 2], 1: [[1.0] * 3, [1.0] * 2]}
    assert [m.get_buffer("running_mean").tolist() for m in model] == expected[rank]


def test_a_module_in_fp32_gets_fp32_and_gives_16_bit() -> None:
    model = Normed()
    precision = PrecisionConfig(fp32_modules=("LayerNorm",))
    engine = engine_on(model, [], stage=0, trainer_precision="bf16-true", precision=precision)
    engine.begin_step()
    assert model(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model.seen == [torch.float32]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return x * self.scale.to(x.dtype) + self.shift


@pytest.mark.parametrize("stage", [0, 3])
def test_single_tensors_in_fp32_have_no_casts_around_their_module(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scaled())
    precision = PrecisionConfig(fp32_modules=("1.scale", "c*nt"))
    engine = engine_on(model, [], stage=stage, trainer_precision="bf16-true", precision=precision)
    engine.begin_step()
    assert model(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert model[1].seen == [torch.bfloat16]
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    assert {n for n, t in tensors.items() if t.dtype == torch.float32} == {"1.scale", "1.count"}


def test_a_detached_engine_leaves_no_casts() -> None:
    model = Normed()
    precision = PrecisionConfig(fp32_modules=("LayerNorm",))
    engine_on(model, [], stage=0, trainer_precision="bf16-true", precision=precision).detach()
    model(torch.randn(2, 4, dtype=torch.bfloat16))
    assert model.seen == [torch.bfloat16]


def test_buffers_are_cast_with_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("offset", torch.zeros(2))
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    engine_on(model, [], stage=0, trainer_precision="bf16-true")
    assert (model.get_buffer("offset").dtype, model.get_buffer("count").dtype) == (torch.bfloat16, torch.int64)
