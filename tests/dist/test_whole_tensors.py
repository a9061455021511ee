"""Optimizers that need whole tensors, at every stage and on every tier: as in one process.

The trusted run is one process with the ranks' gradients, averaged in the same order (`one_process`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from ls_strategy.zero.step.owner import owner_updater
from tests.dist.ranks import assert_close, fit, global_batches, quiet, weights
from tests.dist.whole_optimizers import MAKE, STEPS, Trained, one_process
from tests.marks import wide

LIMIT = 1e-5
TIERS = ("device", "cpu", "nvme")
ALL = [(case, stage, tier) for case in MAKE for stage in (1, 2, 3) for tier in TIERS]
SOME = [(case, 1 + i % 3, TIERS[(i + i // 3) % 3]) for i, case in enumerate(MAKE)]
HALF = STEPS // 2
FEW = [("Muon and AdamW", 2, "nvme"), ("Adafactor", 3, "cpu"), ("Shampoo", 1, "device")]
FEW_STEPS = 6  # `Trained.late` has a gradient from the fourth on


def strategy(stage: int, tier: str, folder: str) -> ZeROStrategy:
    options: dict[str, Any] = {"sharding.min_unit_numel": 0}
    if tier != "device":
        options |= {"offload.optimizer": tier, "offload.nvme_path": folder}
        options |= {"offload.parameters": tier} if stage == 3 else {}
    return ZeROStrategy(stage, **nested(options))


def as_in_one_process(
    rank: int, world_size: int, cases: list[tuple[str, int, str]], folder: str, steps: int = STEPS
) -> None:
    quiet()
    expected = {case: one_process(case, world_size, steps)[0] for case in sorted({case for case, _, _ in cases})}
    for case, stage, tier in cases:
        module = Trained(case)
        data = global_batches(rank, world_size, steps)
        bucket = owner_updater.BUCKET if stage == 1 else 150  # several tensors, or one
        with mock.patch.object(owner_updater, "BUCKET", bucket):
            fit(strategy(stage, tier, folder), module, data, use_distributed_sampler=False, max_epochs=1)
        assert_close(weights(module), expected[case], f"{case}, stage {stage}, {tier}", LIMIT)


@pytest.mark.parametrize(
    ("world_size", "cases", "steps"),
    [(2, FEW, FEW_STEPS), wide(1, SOME, STEPS), wide(2, SOME, STEPS)],
    ids=["2-few", "1-some", "2-some"],
)
def test_a_run_in_shards_is_the_run_in_one_process(
    world_size: int, cases: list[tuple[str, int, str]], steps: int, tmp_path: Path
) -> None:
    spawn(as_in_one_process, world_size, cases, str(tmp_path), steps, init_process_group=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_stages_and_tiers_are_the_run_in_one_process(world_size: int, tmp_path: Path) -> None:
    spawn(as_in_one_process, world_size, ALL, str(tmp_path), init_process_group=False, timeout_s=600)


OWNED = {"Adafactor": ("row_var", "col_var"), "Shampoo": ("left", "right"),
         "SOAP": ("left", "right", "left_basis", "right_basis")}  # fmt: skip


def states_here(rank: int, world_size: int) -> dict[str, Any]:
    """By case: names of the states of every parameter on this rank after a step, and those of one process."""
    quiet()
    found: dict[str, Any] = {}
    for case in OWNED:
        module = Trained(case)
        data = global_batches(rank, world_size, 1)
        trainer = fit(strategy(3, "device", ""), module, data, use_distributed_sampler=False, max_epochs=1)
        here = trainer.strategy.require_engine().optimizers[0].sharded.state_tensors()
        alone = [v for o in one_process(case, world_size, 1)[1] for s in o.state.values() for v in s.values()]
        numel = sum(v.numel() for v in alone if isinstance(v, Tensor) and v.dim())
        shapes = sorted(tuple(v.shape) for v in alone if isinstance(v, Tensor) and v.dim())
        found[case] = (sorted(tuple(v.shape) for v in here if v.dim()), shapes, numel)
    return found


def test_factored_states_are_with_one_rank() -> None:
    """All ranks together have every state of one process once, and no rank has all of them."""
    by_rank = spawn(states_here, 2, init_process_group=False)
    for case in OWNED:
        together = sorted(shape for found in by_rank for shape in found[case][0])
        assert together == by_rank[0][case][1], case
        assert all(0 < len(found[case][0]) < len(together) for found in by_rank)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def half(rank: int, world_size: int, second: bool) -> DataLoader:
    data, mine = global_batches(rank, world_size, STEPS), 12 // world_size
    rows = range(HALF * mine, STEPS * mine) if second else range(HALF * mine)
    return DataLoader(Subset(data.dataset, rows), batch_size=mine)


class Resumed(Trained):
    """Keeps the states that it begins with."""

    states: Any = None

    def on_train_start(self) -> None:
        self.states = states_of(self.trainer)


def train_half(rank: int, world_size: int, case: str, ours: ZeROStrategy, ckpt: str | None) -> tuple[Any, Resumed]:
    module = Resumed(case)
    module.calls = 0 if ckpt is None else HALF
    data = half(rank, world_size, ckpt is not None)
    options: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": 1 if ckpt is None else 2}
    return fit(ours, module, data, ckpt, **options), module


def states_of(trainer: Any) -> list[Any]:
    """Full states on rank 0, twice: reading them changes nothing."""
    first = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]
    second = [trainer.strategy.optimizer_state(o) for o in trainer.optimizers]
    for a, b in zip(first, second, strict=True):
        assert_states(a["state"], b["state"])
    return first


def assert_states(found: dict[int, Any], expected: dict[int, Any], limit: float = 0.0) -> None:
    expected = {i: state for i, state in expected.items() if state}  # SGD without momentum has empty ones
    found = {i: state for i, state in found.items() if state}
    assert found.keys() == expected.keys(), f"states of {list(found)} instead of {list(expected)}"
    for i, state in expected.items():
        assert found[i].keys() == state.keys()
        for k, v in state.items():
            if isinstance(v, Tensor):
                assert_close(found[i][k], v, f"{k} of {i}", limit)
            else:
                assert found[i][k] == v


def save(
    rank: int, world_size: int, path: str, form: str, cases: list[str]
) -> tuple[list[Any], dict[str, dict[str, Tensor]]]:
    """Half of a run of every case; the other half at once, as in a run that was not interrupted."""
    quiet()
    states, ends = [], {}
    for case in cases:
        ours = ZeROStrategy(2, **nested({"sharding.min_unit_numel": 0, "checkpoint.format": form}))
        trainer, _ = train_half(rank, world_size, case, ours, None)
        trainer.save_checkpoint(f"{path}/{case}.ckpt")
        states.append(states_of(trainer))
        ends[case] = one_process(case, world_size)[0]
    return states, ends


def resume(rank: int, world_size: int, path: str, layout: tuple[int, str], states: Any, ends: Any) -> None:
    """States are those that were saved, and the rest of the run ends where the run in one process does."""
    quiet()
    for case, expected in zip(ends, states, strict=True):
        _, module = train_half(rank, world_size, case, strategy(*layout, path), f"{path}/{case}.ckpt")
        for ours, saved in zip(module.states, expected, strict=True):
            if rank == 0:
                assert_states(ours["state"], saved["state"])
        if world_size == 2 or "Muon" not in case:  # whose iteration in bf16 shows the order of a sum
            assert_close(weights(module), ends[case], f"{case} on {world_size} ranks at {layout}", LIMIT)


LAYOUTS = [(2, (3, "cpu")), (3, (1, "device")), (1, (2, "nvme")), (2, (2, "device"))]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("form", "layout", "cases"),
    [
        ("sharded", LAYOUTS[0], ["Shampoo"]),
        wide("sharded", LAYOUTS[0], ["Muon and AdamW", "Shampoo"]),
        *(pytest.param("sharded", layout, list(MAKE), marks=pytest.mark.slow) for layout in LAYOUTS),
        *(pytest.param("file", layout, list(MAKE), marks=pytest.mark.slow) for layout in LAYOUTS[1:]),
    ],
)
def test_checkpoints_go_to_other_layouts(form: str, layout: Any, cases: list[str], tmp_path: Path) -> None:
    saved = spawn(save, 2, str(tmp_path), form, cases, init_process_group=False)
    ranks, at = layout
    spawn(resume, ranks, str(tmp_path), at, *saved[0], init_process_group=False)
