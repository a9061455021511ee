"""Optimizers that need whole tensors, at every stage and on every tier: as in one process.

The trusted run is one process with the ranks' gradients, averaged in the same order (`one_process`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import assert_close, fit, global_batches, quiet, weights
from tests.dist.whole_optimizers import MAKE, STEPS, Trained, one_process

LIMIT = 1e-5
TIERS = ("device", "cpu", "nvme")
ALL = [(case, stage, tier) for case in MAKE for stage in (1, 2, 3) for tier in TIERS]
SOME = [(case, 1 + i % 3, TIERS[(i + i // 3) % 3]) for i, case in enumerate(MAKE)]


def strategy(stage: int, tier: str, folder: str) -> ZeROStrategy:
    options: dict[str, Any] = {"sharding.min_unit_numel": 0}
    if tier != "device":
        options |= {"offload.optimizer": tier, "offload.nvme_path": folder}
        options |= {"offload.parameters": tier} if stage == 3 else {}
    return ZeROStrategy(stage, **nested(options))


def as_in_one_process(rank: int, world_size: int, cases: list[tuple[str, int, str]], folder: str) -> None:
    quiet()
    expected = {case: one_process(case, world_size)[0] for case in sorted({case for case, _, _ in cases})}
    for case, stage, tier in cases:
        module = Trained(case)
        data = global_batches(rank, world_size, STEPS)
        fit(strategy(stage, tier, folder), module, data, use_distributed_sampler=False, max_epochs=1)
        assert_close(weights(module), expected[case], f"{case}, stage {stage}, {tier}", LIMIT)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_in_shards_is_the_run_in_one_process(world_size: int, tmp_path: Path) -> None:
    spawn(as_in_one_process, world_size, SOME, str(tmp_path), init_process_group=False)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_stages_and_tiers_are_the_run_in_one_process(world_size: int, tmp_path: Path) -> None:
    spawn(as_in_one_process, world_size, ALL, str(tmp_path), init_process_group=False, timeout_s=600)
