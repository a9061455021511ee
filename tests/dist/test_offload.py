"""Offload changes where states rest and nothing else: every tier trains to the same bits as no offload at all."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace

import pytest

from ls_strategy.config import TierConfig
from ls_strategy.testing import spawn
from tests.marks import few_or_all, slow
from tests.models import Case, Result, run_all, same_bits

TIMEOUT_S = 170
NORM = {"clip": "norm", "clip_at": 0.05}
VALUE = {"clip": "value", "clip_at": 0.01}

TIERS = {
    "cpu": {"offload.optimizer": "cpu"},
    "half": {"offload.optimizer": TierConfig(tier="cpu", ratio=0.5)},
    "blocking": {"offload.optimizer": "cpu", "sharding.overlap_step": False},
    "param": {"offload.optimizer": "cpu", "offload.parameters": "cpu"},
    "only_param": {"offload.parameters": "cpu"},
    "nvme": {"offload.optimizer": "nvme"},
    "nvme_param": {"offload.optimizer": "nvme", "offload.parameters": "nvme"},
    "mixed": {
        "offload.optimizer": TierConfig(tier="nvme", ratio=0.6),
        "offload.gradients": TierConfig(tier="cpu"),
        "offload.parameters": TierConfig(tier="cpu", ratio=0.5),
    },
}

# Hooks that look at gradients switch off what must not happen behind their back: each row with and without them.
ROWS = {
    "plain": Case(traits=("private",)),
    "seen": Case(traits=("tied",), **NORM),
    "clipped": Case(traits=("private", "uneven", "frozen"), accumulate=3, **NORM),
    "sgd": Case(optimizer="sgd", traits=("private", "frozen", "empty"), accumulate=3),
    "value": Case(optimizer="sgd", traits=("private", "unused", "buffers"), **VALUE),
    "guest": Case(traits=("private", "unused_here", "uneven")),
    "two": Case(optimizer="two", traits=("uneven", "unused", "tied"), accumulate=3, **NORM),
    "bf16": Case(traits=("private", "tied"), precision="bf16-true"),
    "bf16_clipped": Case(traits=("private",), precision="bf16-true", accumulate=3, **NORM),
    "bf16_guest": Case(traits=("private", "unused", "unused_here", "frozen"), precision="bf16-true"),
    "fp16": Case(traits=("private",), precision="16-true", **NORM),
    "fp16_mixed": Case(traits=("tied",), precision="16-mixed"),
}

Group = tuple[Result, ...]

FEW: dict[tuple[str, int], tuple[str, ...]] = {
    ("bf16_clipped", 1): ("cpu", "nvme"),
    ("value", 2): ("half", "blocking"),
    ("guest", 3): ("nvme_param", "mixed"),
    ("two", 3): ("param", "only_param"),
}
"""``(row, stage) -> tiers``: every stage, tier, optimizer and clip; `test_parity_precision` has every precision."""


def tiers_of(stage: int) -> tuple[str, ...]:
    """Those that the stage has."""
    return tuple(name for name, options in TIERS.items() if stage == 3 or "offload.parameters" not in options)


Rows = tuple[tuple[str, int, tuple[str, ...]], ...]
"""Rows, each with a stage and tiers."""


@functools.cache
def results(world_size: int, rows: Rows, steps: int = 8) -> dict[tuple[str, int, str | None], Group]:
    """``(row, stage, tier) -> result of every rank``; tier None is the run without offload."""
    with tempfile.TemporaryDirectory() as folder:
        keys: list[tuple[str, int, str | None]] = []
        cases: list[Case] = []
        for row, stage, tiers in rows:
            case = replace(ROWS[row], steps=steps, fused=None).at(stage)
            keys.append((row, stage, None))
            cases.append(case)
            for name in tiers:
                keys.append((row, stage, name))
                cases.append(replace(case, options=(("offload.nvme_path", folder), *TIERS[name].items())))
        ranks = spawn(run_all, world_size, cases, init_process_group=False, timeout_s=TIMEOUT_S)
    return dict(zip(keys, zip(*ranks, strict=True), strict=True))


def assert_as_without_offload(group: dict[tuple[str, int, str | None], Group], row: str, stage: int) -> None:
    """Losses of all ranks, weights and gradient norms; trusted run: the same stage without offload."""
    trusted = group[row, stage, None]
    assert len(trusted[0].losses) >= 4
    tiers = [tier for name, at, tier in group if (name, at) == (row, stage) and tier is not None]
    assert tiers
    for name in tiers:
        ours = group[row, stage, name]
        assert all(map(same_bits, trusted, ours)), name
        assert [r.norms for r in trusted] == [r.norms for r in ours], name


@pytest.mark.parametrize(("row", "stage"), FEW)
def test_tiers_train_to_the_same_bits(row: str, stage: int) -> None:
    assert_as_without_offload(results(2, tuple((*key, tiers) for key, tiers in FEW.items()), 4), row, stage)


@pytest.mark.wide
@pytest.mark.parametrize("stage", [slow(1), 2, slow(3)])
@pytest.mark.parametrize("world_size", [slow(1), 2])
@pytest.mark.parametrize("row", ROWS)
def test_every_tier_trains_to_the_same_bits(world_size: int, stage: int, row: str) -> None:
    rows = tuple((name, stage, tiers_of(stage)) for name in ROWS)
    assert_as_without_offload(results(world_size, rows), row, stage)


@pytest.mark.wide
@pytest.mark.parametrize("tiers", few_or_all(("param", "mixed"), tuple(TIERS)))
def test_parameters_on_every_tier_with_some_that_are_not_stepped(tiers: tuple[str, ...]) -> None:
    """Stage 3 in 16 bits: what no update writes keeps its value, also where parameters are kept beside the masters."""
    group = results(2, (("bf16_guest", 3, tiers),), 4)
    for name in tiers:
        assert all(map(same_bits, group["bf16_guest", 3, None], group["bf16_guest", 3, name])), name
