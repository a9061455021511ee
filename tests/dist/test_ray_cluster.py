"""`RayZeROStrategy` on a cluster of Ray on this host: reports, another number of workers, dead workers, errors, trials.

One driver runs all of it, in a process of its own with a time limit; tests look at what it left.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.testing import spawn
from tests.dist import ray_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[2]
LIMIT_S = 2400
"""Three minutes where nothing else runs; Ray starts many processes."""


FOLDERS: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _removed() -> Iterator[None]:
    pytest.importorskip("ray.train", exc_type=ImportError)  # here: collecting the tests would import all of Ray
    yield
    for folder in FOLDERS:
        shutil.rmtree(folder)


def new_folder() -> Path:
    """A folder for all tests of this module."""
    FOLDERS.append(Path(tempfile.mkdtemp(prefix="ls_ray_")))
    return FOLDERS[-1]


@functools.cache
def driven() -> tuple[Path, dict[str, Any]]:
    """The folder of the driver's runs, and what it saw of each."""
    folder = new_folder()
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
    environment = {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.ray_program", str(folder)],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = driver.wait(LIMIT_S)
        finally:
            if driver.poll() is None:
                driver.send_signal(signal.SIGTERM)  # Ray ends its processes
                driver.wait(30)
    text = (folder / "log").read_text()
    assert status == 0, text[-5000:]
    return folder, json.loads((folder / "driver.json").read_text())


def results(name: str, ranks: int) -> list[dict[str, Any]]:
    folder, seen = driven()
    assert "error" not in seen[name], f"{seen[name]}\n{(folder / 'log').read_text()[-5000:]}"
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(ranks)]


@functools.cache
def trusted(ranks: int, epochs: int, resume: str | None = None, save: str | None = None) -> list[dict[str, Any]]:
    """The same run on a Trainer's own ranks."""
    config: dict[str, Any] = {"folder": "", "name": "own", "epochs": epochs, "resume": resume}
    if save is not None:
        config["save"] = save
    return spawn(ray_program.own_ranks, ranks, config, init_process_group=False, timeout_s=170)


@functools.cache
def saved_by_two() -> str:
    path = str(new_folder() / "last.ckpt")
    trusted(2, 2, save=path)
    return path


def same(ours: dict[str, Any], other: dict[str, Any]) -> None:
    assert ours["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(ours["weights"][k], v) for k, v in other["weights"].items())
    assert other["weights"]


def test_two_workers_compute_the_bits_of_a_trainers_two_ranks() -> None:
    for ours, own in zip(results("first", 2), trusted(2, 2), strict=True):
        assert ours["world_size"] == 2
        assert ours["losses"] == own["losses"]
        assert len(ours["losses"]) == 2 * ray_program.STEPS
    same(results("first", 2)[0], trusted(2, 2)[0])


def test_every_case_computes_the_bits_of_a_trainers_two_ranks() -> None:
    own = spawn(ray_program.run_cases, 2, list(ray_program.CASES), init_process_group=False, timeout_s=170)
    for ours, other in zip(results("first", 2), own, strict=True):
        for name in ray_program.CASES:
            assert ours["cases"][name]["losses"] == other[name]["losses"], name
    for name in ray_program.CASES:
        same(results("first", 2)[0]["cases"][name], own[0][name])


def test_a_run_resized_to_one_worker_resumes_as_checkpoints_define() -> None:
    (ours,) = results("second", 1)
    assert Path(ours["from"]).parent.name.startswith("checkpoint_epoch=000001_step=000000008")
    assert sorted(ours["losses"]) == list(range(8, 16))
    (own,) = trusted(1, 4, resume=saved_by_two())
    assert ours["losses"] == own["losses"]
    same(ours, own)


def test_ray_keeps_what_was_reported_and_no_copy() -> None:
    folder, seen = driven()
    kept = sorted(p.name for p in (folder / "storage" / "resized").glob("checkpoint_epoch*"))
    assert kept == ["checkpoint_epoch=000003_step=000000016"], "num_to_keep=1"
    assert seen["second"]["checkpoint"] == str(folder / "storage" / "resized" / kept[0])
    assert seen["second"]["metrics"]["step"] == 16
    assert "loss" in seen["second"]["metrics"]
    names = {p.name for p in (folder / "storage" / "resized" / kept[0] / "checkpoint.ckpt").iterdir()}
    assert "manifest.json" in names, "the folder that ranks wrote is the one that Ray knows"


def test_a_worker_that_was_killed_starts_again_and_resumes() -> None:
    folder, _ = driven()
    assert (folder / "killed.done").exists()
    ours = results("killed", 2)
    assert Path(ours[0]["from"]).parent.name == "checkpoint_epoch=000000_step=000000004"
    for mine, own in zip(ours, trusted(2, 3), strict=True):
        assert mine["losses"] == {step: own["losses"][step] for step in range(4, 12)}
    same(ours[0], trusted(2, 3)[0])


def test_an_error_of_a_worker_arrives_in_the_driver() -> None:
    _, seen = driven()
    assert "a wrong batch on rank 1" in seen["raised"]["error"] + seen["raised"]["traceback"]


def test_what_cannot_work_in_a_train_function_is_an_error_with_the_cure() -> None:
    for each in results("first", 2):
        assert each["refused"]["plain"].startswith("PlanError: Got ZeROStrategy in a train function of Ray Train")
        assert "RayZeROStrategy" in each["refused"]["plain"]
        assert "aliases without _notebook" in each["refused"]["notebook"]
        assert "RayReportCallback" in each["refused"]["elastic"]


def test_trials_at_once_share_no_port_and_no_file(tmp_path: Path) -> None:
    one, two = results("trial0", 2), results("trial1", 2)
    assert one[0]["port"] == one[1]["port"]
    assert two[0]["port"] == two[1]["port"]
    assert one[0]["port"] != two[0]["port"]
    assert len({each["pid"] for each in (*one, *two)}) == 4
    for mine, other in zip(one, two, strict=True):
        assert mine["losses"] == other["losses"] == {k: v for k, v in mine["losses"].items() if k < ray_program.STEPS}
    same(one[0], two[0])
    config = {"folder": "", "name": "own", "epochs": 1, "options": ray_program.on_nvme(str(tmp_path))}
    same(one[0], spawn(ray_program.own_ranks, 2, config, init_process_group=False, timeout_s=170)[0])
