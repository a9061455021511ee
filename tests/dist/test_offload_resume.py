"""A checkpoint says nothing of tiers: what one saved, every other resumes, and the next losses are the same bits."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from ls_strategy.testing import spawn
from tests.dist.test_offload import TIERS
from tests.marks import few_or_all
from tests.models import Case, PrivateNet, loader, quiet, trainer_of

EPOCH = 4
"""Steps."""

CHANGES: dict[int, list[tuple[str | None, str | None]]] = {
    2: [(None, "cpu"), ("cpu", "nvme"), ("nvme", None), ("half", "blocking")],
    3: [(None, "param"), ("param", "nvme_param"), ("nvme_param", "cpu"), ("mixed", "only_param"), ("nvme", None)],
}


def case_of(stage: int, tier: str | None, moments: str, folder: str) -> Case:
    options = {"offload.nvme_path": folder, "precision.moments": moments, **({} if tier is None else TIERS[tier])}
    return Case(stage=stage, traits=("private", "tied"), fused=None, steps=EPOCH, options=tuple(options.items()))


def fit(case: Case, world_size: int, epochs: int, ckpt: Path | None = None) -> tuple[pl.Trainer, PrivateNet]:
    module = PrivateNet(case)
    trainer = trainer_of(case, world_size)
    trainer.fit_loop.max_epochs = epochs
    trainer.fit(module, loader(case, world_size), ckpt_path=ckpt)
    return trainer, module


def weights_of(trainer: pl.Trainer) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}


Changes = list[tuple[str | None, str | None]]


def resume(rank: int, world_size: int, stage: int, moments: str, changes: Changes) -> list[str]:
    """What differs, for every change of tier between two epochs; trusted run: two epochs without a change."""
    quiet()
    problems: list[str] = []
    root = Path(tempfile.gettempdir())
    for number, (before, after) in enumerate(changes):
        folder = root / f"resume-{world_size}-{stage}-{moments}-{number}"
        folder.mkdir(exist_ok=True)
        trainer, trusted = fit(case_of(stage, before, moments, str(folder)), world_size, 2)
        expected = weights_of(trainer)
        trainer, first = fit(case_of(stage, before, moments, str(folder)), world_size, 1)
        trainer.save_checkpoint(folder / "saved.ckpt")  # after the fit: the states are still there
        trainer, second = fit(case_of(stage, after, moments, str(folder)), world_size, 2, folder / "saved.ckpt")
        if first.result.losses + second.result.losses != trusted.result.losses:
            problems.append(f"{before} to {after}: losses")
        actual = weights_of(trainer)
        if actual.keys() != expected.keys() or not all(torch.equal(actual[k], expected[k]) for k in expected):
            problems.append(f"{before} to {after}: weights")
    return problems


def assert_resumes(world_size: int, stage: int, moments: str, changes: Changes) -> None:
    for problems in spawn(resume, world_size, stage, moments, changes, init_process_group=False, timeout_s=120):
        assert problems == []


@pytest.mark.wide
def test_resume_on_another_tier_at_stage_3(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert_resumes(2, 3, "bf16", [("param", "nvme_param"), ("mixed", None)])


@pytest.mark.wide
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_on_another_tier(world_size: int, stage: int, moments: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert_resumes(world_size, stage, moments, CHANGES[stage])


def states(rank: int, world_size: int, folder: str, tiers: tuple[str | None, ...]) -> dict[str, Any]:
    """The optimizer state of a checkpoint, by tier."""
    quiet()
    result: dict[str, Any] = {}
    for tier in tiers:
        case = case_of(3, tier, "fp32", folder)
        trainer, _ = fit(replace(case, options=(*case.options, ("checkpoint.format", "file"))), world_size, 1)
        trainer.save_checkpoint(Path(folder) / "saved.ckpt")
        if rank == 0:
            result[str(tier)] = torch.load(Path(folder) / "saved.ckpt", weights_only=False)
    return result


@pytest.mark.parametrize("tiers", few_or_all((None, "nvme"), (None, "cpu", "nvme", "mixed")))
def test_the_optimizer_state_is_torchs_own(tiers: tuple[str | None, ...], tmp_path: Any) -> None:
    """The same on every tier, and a plain AdamW loads it."""
    saved = spawn(states, 2, str(tmp_path), tiers, init_process_group=False, timeout_s=120)[0]
    trusted = saved.pop("None")["optimizer_states"][0]
    for tier, checkpoint in saved.items():
        state = checkpoint["optimizer_states"][0]
        assert state["state"].keys() == trusted["state"].keys(), tier
        for index, entries in trusted["state"].items():
            for name, value in entries.items():
                assert torch.equal(torch.as_tensor(state["state"][index][name]), torch.as_tensor(value)), (tier, name)
    plain = PrivateNet(case_of(3, None, "fp32", ""))
    plain.load_state_dict(saved["nvme"]["state_dict"])
    optimizer = plain.configure_optimizers()
    optimizer.load_state_dict(copy.deepcopy(saved["nvme"]["optimizer_states"][0]))
    assert {int(s["step"]) for s in optimizer.state.values()} == {EPOCH}
