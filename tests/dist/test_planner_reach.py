"""The longest samples and the largest micro-batch that the planner foretells for a limit are those that ranks hold."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.config import RecomputeConfig, ZeROConfig, nested
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.forecast import Run as PlannedRun
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.reach import Reach, Reaches
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Module, Run
from tests.dist.ranks import quiet
from tests.dist.test_planner_experts import Begin
from tests.live_bytes import LiveBytes
from tests.trainers import bare_trainer

pytestmark = pytest.mark.wide

RANKS, LENGTH, SAMPLES = 2, 64, 2
LIMIT = 24_000_000
SHAPE: dict[str, Any] = {"num_layers": 3, "width": 96, "num_heads": 4, "vocab_size": 64, "block_size": 2048}
CANDIDATES = (Candidate(1), Candidate(3, recompute=RecomputeConfig(policy="full")))
IDS = [candidate.name for candidate in CANDIDATES]


class Sized(Module):
    """Trains on samples of any length, and any number of them. No hook looks at gradients."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step

    def __init__(self, samples: int, tokens: int) -> None:
        super().__init__(Run({}, SHAPE))
        self.samples, self.tokens = samples, tokens

    def train_dataloader(self) -> DataLoader:
        tokens = torch.randint(0, SHAPE["vocab_size"], (2 * self.samples, self.tokens))
        return DataLoader(TensorDataset(tokens, tokens), batch_size=self.samples)


def measure(rank: int, world_size: int, runs: list[tuple[Candidate, int, int]]) -> list[int]:
    """Return the peak bytes of every run: candidate, samples, tokens."""
    quiet()
    found = []
    for candidate, samples, tokens in runs:
        strategy = ZeROStrategy(**nested({**candidate.arguments(), "sharding.min_unit_numel": 0}))
        with LiveBytes() as live:
            bare_trainer(
                strategy, world_size, max_epochs=1, use_distributed_sampler=False, callbacks=[Begin(live)]
            ).fit(Sized(samples, tokens))
        found.append(live.peak)
    return found


@functools.cache
def foretold() -> list[Reach]:
    module = Sized(SAMPLES, LENGTH)
    module.configure_model()
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    run = PlannedRun(config=ZeROConfig(sharding={"min_unit_numel": 0}))
    asked = Question(module, [module.configure_optimizers()], resolve_precision("32-true"), [tokens, tokens], run)
    hardware = Hardware(
        ranks=RANKS, ranks_per_node=RANKS, device="cpu", device_memory=LIMIT, reserved_share=0, reserved_bytes=0
    )
    with asked.forecaster() as forecaster:
        reaches = Reaches(forecaster, hardware)
        return [reaches.of(candidate) for candidate in CANDIDATES]


@functools.cache
def measured() -> list[dict[tuple[int, int], int]]:
    """Return peaks by samples and tokens, for every candidate."""
    runs = [
        (candidate, *size) for candidate, reach in zip(CANDIDATES, foretold(), strict=True) for size in sizes(reach)
    ]
    ranks = spawn(measure, RANKS, runs, init_process_group=False, timeout_s=170)
    peaks = [max(each) for each in zip(*ranks, strict=True)]
    found: list[dict[tuple[int, int], int]] = [{} for _ in CANDIDATES]
    for (candidate, *size), peak in zip(runs, peaks, strict=True):
        found[CANDIDATES.index(candidate)][size[0], size[1]] = peak
    return found


def sizes(reach: Reach) -> list[tuple[int, int]]:
    more_tokens, more_samples = -(-reach.tokens * 11 // 10), -(-reach.samples * 11 // 10)
    return [
        (SAMPLES, LENGTH), (SAMPLES, reach.tokens), (SAMPLES, more_tokens), (reach.samples, LENGTH),
        (more_samples, LENGTH),
    ]  # fmt: skip


@pytest.mark.parametrize("index", range(len(CANDIDATES)), ids=IDS)
def test_what_fits_is_foretold_within_a_tenth(index: int) -> None:
    """What is foretold fits, and what is longer or larger by a tenth does not."""
    _, longest, longer, largest, larger = (measured()[index][size] for size in sizes(foretold()[index]))
    assert longest <= 1.01 * LIMIT < longer
    assert largest <= 1.01 * LIMIT < larger


@pytest.mark.parametrize("index", range(len(CANDIDATES)), ids=IDS)
def test_the_bytes_of_a_token_are_foretold_within_a_tenth(index: int) -> None:
    reach = foretold()[index]
    now, longest, *_ = (measured()[index][size] for size in sizes(reach))
    assert reach.token_bytes == pytest.approx((longest - now) / (reach.tokens - LENGTH) / SAMPLES, rel=0.1)


def test_the_models_own_limit_is_known() -> None:
    module = Sized(SAMPLES, LENGTH)
    module.configure_model()
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    asked = Question(
        module, [module.configure_optimizers()], resolve_precision("32-true"), [tokens, tokens], PlannedRun()
    )
    with asked.forecaster() as forecaster:
        reaches = Reaches(forecaster, Hardware(ranks=RANKS, device="cpu", device_memory=LIMIT))
        assert reaches.accepts(SHAPE["block_size"])
        assert not reaches.accepts(SHAPE["block_size"] + 1)
