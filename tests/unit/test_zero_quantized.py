"""Frozen weights in 4 and 8 bits, on one rank: what is quantized, and that training is plain torch's with rounded weights."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import PrecisionConfig, ZeROConfig
from ls_strategy.engine import Engine
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.ops.quantized import rounded
from ls_strategy.zero.flat.quantized import QuantizedFlat
from ls_strategy.zero.setup.frozen import quantized_params
from tests.unit.one_rank import adamw, engine_on, steps, weights

FORMS = ("nf4", "int4", "int8")
WIDTH, RANK = 40, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "host": {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
}


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, as LoRA adds it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.a = nn.Linear(width, RANK, bias=False)
        self.b = nn.Linear(RANK, width, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def network(width: int = WIDTH, blocks: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(Adapted(width)) for _ in range(blocks)))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def engine_of(model: nn.Module, form: str | None = "nf4", **options: Any) -> Engine:
    return engine_on(model, [adamw(trained(model))], precision={"frozen": form}, **options)


def round_frozen(model: nn.Module, form: str) -> nn.Module:
    """The reference: a copy in which the frozen matrices were rounded."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Adapted):
                module.base.weight.copy_(rounded(module.base.weight.reshape(-1), form).view(WIDTH, WIDTH))  # type: ignore[arg-type]
    return model


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_training_is_that_of_rounded_weights(options: str, form: str) -> None:
    """Adapters get the gradients of the dequantized weights, bit for bit."""
    model = network()
    trusted = round_frozen(model, form)
    expected = steps(engine_of(trusted, None, **OPTIONS[options]))
    result = steps(engine_of(model, form, **OPTIONS[options]))
    assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize("options", OPTIONS)
def test_stored_bytes_are_those_of_the_plan(options: str) -> None:
    model = network(64)
    engine = engine_of(model, **OPTIONS[options])
    steps(engine)
    (_, quantized) = split(engine)
    assert len(quantized) == 3
    assert all(f.master.nbytes == 64 * 64 * 17 // 32 for f in quantized)  # 4.25 bits
    assert all(f.full.untyped_storage().size() == 0 for f in quantized)
    planned = engine.plan.state_bytes()
    measured = engine.memory_bytes()
    assert measured["masters"] + measured["parameters"] == planned["masters"] + planned["parameters"]


def split(engine: Engine) -> tuple[list[Any], list[QuantizedFlat]]:
    quantized = [f for f in engine.flats if isinstance(f, QuantizedFlat)]
    return [f for f in engine.flats if not isinstance(f, QuantizedFlat)], quantized
