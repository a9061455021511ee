"""What the planner foretells of models with experts, for every ZeRO stage, is what real ranks hold and send.

No router has values to choose by in a plan, so all experts get equally many rows. Real routers choose otherwise: a rank
computes as many rows all the same, unless it drops some.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.config import RecomputeConfig, ZeROConfig, nested
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.forecast import Forecast
from ls_strategy.extras.planner.forecast import Run as PlannedRun
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.moe.feed_forward import GatedFeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from recipes.gpt.network import GPT, GPTConfig
from tests.dist.parallel_runs import Module, Run
from tests.dist.ranks import quiet
from tests.dist.test_planner import Begin
from tests.live_bytes import LiveBytes
from tests.trainers import bare_trainer

pytestmark = pytest.mark.wide

RANKS, SAMPLES = 2, 4
SHAPE: dict[str, Any] = {"num_layers": 2, "width": 64, "num_heads": 4, "vocab_size": 64, "block_size": 64}
GROUPED: dict[str, Any] = {"num_experts": 4, "ffn": 192, "k": 2, "drop_tokens": False}
FULL = RecomputeConfig(policy="full")


class Plain(nn.Module):
    """An expert that runs by itself, not with all others as one product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


@dataclass(frozen=True)
class Planned:
    """One run."""

    name: str
    candidate: Candidate
    precision: str = "32-true"
    experts: tuple[tuple[str, Any], ...] = tuple(GROUPED.items())
    plain: bool = False
    """Whether experts are `Plain`."""

    drops: float = 0.0
    """Share of the peak that the plan may be above the measured peak, for what a router drops."""

    def __str__(self) -> str:
        return self.name


def options(**changes: Any) -> tuple[tuple[str, Any], ...]:
    return tuple({**GROUPED, **changes}.items())


RUNS = (
    Planned("grouped", Candidate(1)),
    Planned("grouped, 16 bit, sharded", Candidate(3), "bf16-true"),
    Planned("recomputed", Candidate(2, recompute=FULL)),
    Planned("alone", Candidate(1), plain=True),
    Planned("alone, 16 bit, sharded", Candidate(3), "bf16-true", plain=True),
    Planned("half is dropped", Candidate(1), experts=options(k=1, drop_tokens=True, capacity_factor=0.5)),
    Planned("some is dropped", Candidate(1), experts=options(drop_tokens=True), drops=0.1),
)


class Sparse(Module):
    """No hook of the module looks at gradients."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step

    def __init__(self, planned: Planned) -> None:
        super().__init__(Run({}, SHAPE, dict(planned.experts)))
        self.plain = planned.plain

    def configure_model(self) -> None:
        more = {k: v for k, v in (self.run.experts or {}).items() if k != "ffn"}

        def build(config: GPTConfig) -> MoE:
            expert = Plain if self.plain else GatedFeedForward
            return MoE(config.width, lambda: expert(config.width, GROUPED["ffn"]), **more)

        with mock.patch("recipes.gpt.network.SwiGLU", build):
            self.model = GPT(GPTConfig(**SHAPE))

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, SHAPE["vocab_size"], (2 * SAMPLES, SHAPE["block_size"]), generator=generator)
        return DataLoader(TensorDataset(tokens, tokens), batch_size=SAMPLES)


def measure(rank: int, world_size: int) -> list[tuple[int, int]]:
    """For every run: peak in bytes, and bytes sent in the last step."""
    quiet()
    found = []
    for planned in RUNS:
        torch.manual_seed(0)
        strategy = ZeROStrategy(**nested({**planned.candidate.arguments(), "sharding.min_unit_numel": 0}))
        with LiveBytes() as live:
            begin = Begin(live)
            options = {"precision": planned.precision, "callbacks": [begin]}
            trainer = bare_trainer(strategy, world_size, max_epochs=1, use_distributed_sampler=False, **options)
            trainer.fit(Sparse(planned))
        found.append((live.peak, begin.sent[-1] - begin.sent[-2]))
    return found


@functools.cache
def measured() -> list[list[tuple[int, int]]]:
    return spawn(measure, RANKS, init_process_group=False, timeout_s=170)


def foretold(planned: Planned) -> Forecast:
    module = Sparse(planned)
    module.configure_model()
    tokens = torch.zeros(SAMPLES, SHAPE["block_size"], dtype=torch.long)
    run = PlannedRun(config=ZeROConfig(sharding={"min_unit_numel": 0}))
    precision = resolve_precision(planned.precision)
    with Question(module, [module.configure_optimizers()], precision, [tokens, tokens], run).forecaster() as forecaster:
        return forecaster.forecast(planned.candidate, Hardware(ranks=RANKS, device="cpu"))


@pytest.mark.parametrize("index", range(len(RUNS)), ids=map(str, RUNS))
def test_experts_are_foretold(index: int) -> None:
    planned = RUNS[index]
    forecast = foretold(planned)
    for peak, sent in (rank[index] for rank in measured()):
        told = forecast.peak.device + forecast.peak.cpu
        assert 0.98 * peak <= told <= (1.02 + planned.drops) * peak, (told, peak)
        assert forecast.traffic.sent == sent
