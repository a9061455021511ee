"""Threads for offloaded states under torchrun, which leaves each rank one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ls_strategy.tiers import threads as threads_module
from ls_strategy.tiers.threads import use_share_of_cores

GPU = torch.device("cuda", 1)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was set, last; a machine of 32 cores."""
    now = [1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[-1])
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    monkeypatch.setattr(threads_module, "CGROUP", Path("/nowhere"))
    return now


def test_a_rank_of_torchrun_uses_its_share(threads: list[int]) -> None:
    assert use_share_of_cores(GPU, TORCHRUN) == threads[-1] == 7
    assert use_share_of_cores(GPU, TORCHRUN) == 0, "once"


def test_the_limit_of_a_container_counts(threads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than it may run at a time would be stopped for most of it."""
    (tmp_path / "cpu.max").write_text("1600000 100000\n")
    monkeypatch.setattr(threads_module, "CGROUP", tmp_path)
    assert use_share_of_cores(GPU, TORCHRUN) == threads[-1] == 3


@pytest.mark.parametrize(
    ("device", "environ"),
    [
        (torch.device("cpu"), TORCHRUN),
        (GPU, {}),
        (GPU, {"OMP_NUM_THREADS": "1"}),
        (GPU, TORCHRUN | {"OMP_NUM_THREADS": "2"}),
        (GPU, TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}),
    ],
    ids=["the CPU computes the model", "no launcher", "set by the user", "another number", "no core is left"],
)
def test_otherwise_they_stay(threads: list[int], device: torch.device, environ: dict[str, str]) -> None:
    assert use_share_of_cores(device, environ) == 0
    assert threads == [1]
