"""`RayZeROStrategy` in train functions of Ray, in Ray's local mode: no cluster is started (see test_ray_cluster.py)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from ls_strategy.testing import spawn
from tests.dist import ray_program

pytest.importorskip("ray.train", exc_type=ImportError)
pytestmark = pytest.mark.wide


@functools.cache
def trained() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results of every case on two ranks: of Ray's local mode, and of a Trainer's own ranks."""
    names = list(ray_program.CASES)
    config = {"cases": names}
    ours = spawn(ray_program.in_local_mode, 2, ray_program.train_cases, config, init_process_group=False, timeout_s=170)
    trusted = spawn(ray_program.run_cases, 2, names, init_process_group=False, timeout_s=170)
    return ours, trusted


@pytest.mark.parametrize("name", ray_program.CASES)
def test_a_train_function_computes_the_bits_of_a_trainers_own_ranks(name: str) -> None:
    ours, trusted = trained()
    for mine, other in zip(ours, trusted, strict=True):
        assert mine[name]["world_size"] == 2
        assert mine[name]["losses"] == other[name]["losses"]
        assert len(set(other[name]["losses"])) >= 4
        assert mine[name]["weights"].keys() == other[name]["weights"].keys()
        assert all(torch.equal(mine[name]["weights"][k], v) for k, v in other[name]["weights"].items())
    assert trusted[0][name]["weights"]
