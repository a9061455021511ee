"""Loops written with Fabric compute what Fabric's own DDP makes of them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ls_strategy.testing import spawn
from tests.dist import fabric_ranks

pytestmark = pytest.mark.wide

BOUND = 1e-6  # equal up to the order of sums
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"accumulate": 2, "max_norm": 0.3, "optimizer": "sgd"},
    "no no_sync": {"accumulate": 2, "no_sync": False, "clip_val": 0.02},
    "apart": {"apart": True, "max_norm": 0.02, "norm_type": float("inf"), "zero_by_module": True},
    "closure": {"closure": True, "method": True},
    "compiled": {"compile": True, "steps": 8},
    "compiled inside": {"compile": False, "steps": 8},
}
STRATEGIES = ("zero1", "zero2", "zero3", "zero3_offload", "zero3, small units")
FEWER: dict[str, tuple[str, ...]] = {"zero0": ("plain",), "zero3, recompute": ("plain", "clip")}
FEWER |= {name: ("compiled", "compiled inside") for name in ("zero1", "zero3, small units")}
SEVERAL = ("ddp", "zero1", "zero2", "zero3", "zero3, small units")
"""Strategies that train more than one module."""
PAIRS = [
    *((name, case) for case in list(CASES)[:5] for name in STRATEGIES),
    *((n, c) for n, cs in FEWER.items() for c in cs),
]


@functools.cache
def trained() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """``(strategy, case) -> result of every rank``, of one start of two ranks."""
    keys = [*(("ddp", case) for case in CASES), *PAIRS]
    jobs = [("train", name, {"case": CASES[case]}) for name, case in keys]
    for what in ("adversarial", "distillation"):
        keys += [(name, what) for name in SEVERAL]
        jobs += [(what, name, {}) for name in SEVERAL]
    ranks = spawn(fabric_ranks.run, 2, jobs, init_process_group=False, timeout_s=170)
    return dict(zip(keys, map(list, zip(*ranks, strict=True)), strict=True))


def check(ours: dict[str, Any], trusted: dict[str, Any], bound: float = BOUND) -> None:
    assert ours["losses"] == pytest.approx(trusted["losses"], rel=bound)
    assert ours.get("norms", []) == pytest.approx(trusted.get("norms", []), rel=bound)
    assert ours.get("evaluated", 0) == pytest.approx(trusted.get("evaluated", 0), rel=10 * bound)
    assert ours["weights"].keys() == trusted["weights"].keys()
    for key, value in trusted["weights"].items():
        assert float((ours["weights"][key] - value).abs().max()) <= bound * 10, key


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_loop_gives_the_losses_and_weights_of_ddp(name: str, case: str) -> None:
    for ours, trusted in zip(trained()[name, case], trained()["ddp", case], strict=True):
        check(ours, trusted)
        assert len(set(trusted["losses"])) == len(trusted["losses"]) >= 8


@pytest.mark.parametrize("name", SEVERAL[1:])
def test_a_teacher_without_an_optimizer_in_the_graph(name: str) -> None:
    for ours, trusted in zip(trained()[name, "distillation"], trained()["ddp", "distillation"], strict=True):
        check(ours, trusted)
        assert ours["held"] == 0, "no optimizer state"
        assert ours["teacher"]


@pytest.mark.parametrize("name", SEVERAL[1:])
def test_two_modules_with_losses_through_both(name: str) -> None:
    for ours, trusted in zip(trained()[name, "adversarial"], trained()["ddp", "adversarial"], strict=True):
        check(ours, trusted)


# --- checkpoints -----------------------------------------------------------------------------------------------------

RESUMED = ("ddp", "zero2", "zero3, small units", "zero3_offload")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """What two ranks computed after their save, and what three computed after loading that."""
    folder = tmp_path_factory.mktemp("fabric")
    names = ("zero3, small units", "zero2, file", "ddp")
    jobs = [("saves", name, {"path": str(folder / name)}) for name in names]
    saved = dict(zip(names, spawn(fabric_ranks.run, 2, jobs, init_process_group=False)[0], strict=True))
    keys = [(name, resumed) for name in names for resumed in RESUMED if name != "ddp" or "small" in resumed]
    jobs = [("resumes", resumed, {"path": str(folder / name), "raw": str(folder / "raw.pt")}) for name, resumed in keys]
    found = spawn(fabric_ranks.run, 3, jobs, init_process_group=False)[0]
    assert (folder / names[0]).is_dir()
    assert (folder / names[1]).is_file()
    return saved, dict(zip(keys, found, strict=True))


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [*((saved, resumed) for saved in ("zero3, small units", "zero2, file") for resumed in RESUMED),
     ("ddp", "zero3, small units")],
)  # fmt: skip
def test_another_world_size_and_strategy_goes_on(checkpoints: Any, saved: str, resumed: str) -> None:
    before, after = checkpoints[0][saved], checkpoints[1][saved, resumed]
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-5)
    for key, value in before["weights"].items():
        assert float((after["weights"][key] - value).abs().max()) <= 1e-5, key
    assert (after["step"], after["rest"], after["notes"]) == (4, ["notes"], [0, 1, 2])
    assert "'nonsense'" in after["missing"]
    assert after["changed"] == ["first"], "a filtered checkpoint"
    assert after["raw"]


# --- precision -------------------------------------------------------------------------------------------------------


@functools.cache
def in_16_bit() -> dict[tuple[str, str], Any]:
    keys = [(name, p) for p in ("32-true", "bf16-mixed", "bf16-true") for name in ("ddp", "zero1", "zero3_offload")]
    jobs = [("train", name, {"case": {"precision": p, "steps": 12, "max_norm": 0.5}}) for name, p in keys]
    jobs += [("train_fp16", name, {}) for name in ("zero1", "zero3")]
    ranks = spawn(fabric_ranks.run, 2, jobs, init_process_group=False, timeout_s=170)
    return dict(zip([*keys, ("zero1", "fp16"), ("zero3", "fp16")], ranks[0], strict=True))


def errors(found: dict[str, Any], exact: dict[str, Any]) -> float:
    return sum(abs(a - b) for a, b in zip(found["losses"], exact["losses"], strict=True))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["zero1", "zero3_offload"])
def test_16_bit_is_as_near_to_fp32_as_ddp_is(name: str, precision: str) -> None:
    found = in_16_bit()
    exact = found["ddp", "32-true"]
    assert errors(found["ddp", precision], exact) > 0
    assert errors(found[name, precision], exact) <= 2 * errors(found["ddp", precision], exact)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_fp16_scales_the_loss_and_skips_an_overflow_on_all_ranks(name: str) -> None:
    found = in_16_bit()[name, "fp16"]
    assert found["scale"] == [2.0**8, 2.0**7, 2.0**7]
    assert found["moved"] == [False, True]
    assert "cannot be clipped" in found["refused"]


# --- what is refused, and memory -------------------------------------------------------------------------------------


def test_what_cannot_work_is_an_error_with_the_cure() -> None:
    found = spawn(fabric_ranks.refusals, 2, init_process_group=False)[0]
    assert "planning a fit requires a Trainer" in found["zero_auto"]
    assert "Use ls_strategy.ZeROFabricStrategy" in found["trainer's"]
    assert "Use ls_strategy.ZeROStrategy" in found["fabric's"]
    assert "Set strategy='zero3'" in found["misspelt"]
    assert "fabric.setup_module(model)" in found["foreign optimizer"]
    assert "nn.ModuleDict" in found["two modules in fp16"]
    assert "what self.optimizers() or fabric.setup() returns" in found["bare step"]
    assert 'checkpoint="file"' in found["two modules in a folder"]
    assert "fabric.setup() has not returned" in found["no_sync of a bare module"]
    assert "has no option 'parallel'" in found["parallel"]
    assert "fabric.backward" in found["loss.backward"]


def test_no_rank_holds_a_full_model_that_init_module_builds() -> None:
    for found in spawn(fabric_ranks.built_on_meta, 2, init_process_group=False):
        assert found["meta"] == {"zero2": False, "zero3": True}
        assert found["losses"][0] == found["losses"][1]
        assert found["held"] <= 0.6 * found["full"]


# --- the other package -----------------------------------------------------------------------------------------------


def test_a_program_that_imports_only_lightning_fabric(tmp_path: Path) -> None:
    inherited = {k: v for k, v in os.environ.items() if k != "LS_STRATEGY_LIGHTNING"}
    command = [sys.executable, "-m", "tests.dist.fabric_ranks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=inherited)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rank_1.json").read_text())
    assert not found["other"], "lightning was imported"
    assert found["zero1"] == pytest.approx(found["ddp"], rel=BOUND)
    assert found["zero3_offload"] == pytest.approx(found["ddp"], rel=BOUND)
