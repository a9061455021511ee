"""Gathered units have memory of their own, in which addresses repeat: on a simulated device, and as torch allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import cuda_runtime
from tests.marks import wide
from tests.simulated_device.device import run
from tests.simulated_device.gathers import SWITCH, addresses, kept, places

HOST = {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "cpu"}
NVME = {"optimizer": "nvme", "parameters": "nvme"}

SIZES = "of several sizes, with validation between"

CASES: dict[str, tuple[Any, ...]] = {
    "blocks of one size": ({"stage": 3}, {}, 4),
    SIZES: ({"stage": 3}, {}),
    "accumulation": ({"stage": 3}, {"accumulate_grad_batches": 2, "max_steps": 10}, 4),
    "no prefetch": ({"stage": 3, "sharding": {"prefetch_units": 0}}, {}, 4),
    "prefetch of three": ({"stage": 3, "sharding": {"prefetch_units": 3}}, {}, 6),
    "recomputation": ({"stage": 3, "activations": {"checkpointing": "full"}}, {}, 4),
    "gathered in 16 bits": ({"stage": 3}, {"precision": "bf16-mixed"}, 4),
    "gathered in 8 bits": ({"stage": 3, "sharding": {"quantized_gathers": "int8"}}, {}, 4),
    "parameters on the host": ({"stage": 3, "offload": HOST}, {"precision": "bf16-true"}, 4),
    "parameters on a drive": ({"stage": 3, "offload": NVME}, {}, 4),
}


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered units have memory of their own, which has to be asked for."""
    monkeypatch.setenv(SWITCH, "1")


def repeat(steps: list[list[int]], period: int = 1) -> bool:
    """Return whether steps have the same addresses, from the third on.

    What a step gathers first, validation before it may have left.
    """
    later = steps[2:]
    shared = [min(map(len, later[phase::period])) for phase in range(period)]
    return min(shared) > 0 and all(
        one[-shared[n % period] :] == later[n % period][-shared[n % period] :] for n, one in enumerate(later)
    )


@pytest.mark.parametrize("name", [SIZES, *(wide(name) for name in CASES if name != SIZES)])
def test_addresses_repeat(name: str) -> None:
    """With the memory and the bits of a fit whose gathers are allocated among all other tensors."""
    options, trainer, *blocks = CASES[name]
    found = run(addresses, options, trainer, *blocks)
    without = run(addresses, options, trainer, *(blocks or [0]), "0").result
    period = trainer.get("accumulate_grad_batches", 1)
    assert found.hazards == []
    assert len(found.result["steps"]) == 20
    assert repeat(found.result["steps"], period)
    assert not repeat(without["steps"], period)
    assert found.result["peak"] <= without["peak"]
    assert found.result["losses"] == without["losses"]
    assert all(torch.equal(value, without["weights"][name]) for name, value in found.result["weights"].items())
    if blocks:
        addresses_of_blocks, at_once = places(found.result["log"])
        assert addresses_of_blocks == at_once


def test_a_view_that_user_code_keeps_never_shows_another_unit() -> None:
    found = run(kept)
    assert found.hazards == []
    assert found.result == [True] * 12


@pytest.mark.wide
def test_addresses_repeat_where_backward_gathers_inside_a_node() -> None:
    found = run(addresses, {"stage": 3, "sharding": {"hpz": 2}}, {"max_steps": 6}, 4, ranks=4)
    assert found.hazards == []
    assert found.result["from nodes"]
    assert repeat(found.result["steps"])


on_cuda = pytest.mark.skipif(not cuda_runtime.is_available(), reason="torch is built without CUDA, or has a GPU")


@on_cuda
@pytest.mark.parametrize("factor", [wide(1), 1 << 10])
def test_addresses_repeat_as_torch_allocates(factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small blocks, which torch packs into 2 MiB, and with large ones; other tensors change in size."""
    log = run(addresses, *CASES[SIZES]).result
    given = {"program": "replay", "log": log["log"], "marks": log["marks"], "factor": factor}
    found = cuda_runtime.call("tests.cuda_runtime.replay", given, tmp_path)
    monkeypatch.setenv(SWITCH, "0")
    without = cuda_runtime.call("tests.cuda_runtime.replay", given, tmp_path)
    assert repeat(found["steps"])
    assert not repeat(without["steps"])
    if factor > 1:
        assert found["reserved"] <= 1.05 * without["reserved"]


@on_cuda
def test_what_is_idle_in_the_pool_is_lent_and_what_is_missing_is_taken_elsewhere(tmp_path: Path) -> None:
    assert cuda_runtime.call("tests.cuda_runtime.replay", {"program": "out of memory"}, tmp_path) == {
        "gathered": 300,
        "in pools": [1, 0],
        "lent": 900,
        "gathered again": 900,
        "refused": True,
        "kept by a view": True,
        "left": 0,
    }


@on_cuda
def test_each_gpu_has_a_pool_of_its_own_whatever_the_thread_uses(tmp_path: Path) -> None:
    found = cuda_runtime.call("tests.cuda_runtime.replay", {"program": "other device"}, tmp_path)
    assert found == {"same address": True, "in pools": [0, 1], "current": 0}
