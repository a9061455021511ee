"""Folders of SLURM jobs: a requeued job goes on in its own, and no job writes into another's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy import ZeROStrategy
from ls_strategy.distributed.launch.slurm_job import own_folder, start_time

NOW = time.time()


def environ(start: float = NOW - 100, restarts: int = 0) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "train", "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_JOB_START_TIME": str(int(start)),
    }  # fmt: skip


def make(parent: Path, name: str, age_s: float = 0.0) -> None:
    (parent / name).mkdir()
    os.utime(parent / name, (NOW - age_s, NOW - age_s))


def test_the_first_start_takes_a_folder_that_nobody_has(tmp_path: Path) -> None:
    assert own_folder(str(tmp_path), "job_12", environ()) == "job_12"
    make(tmp_path, "job_12", age_s=5000)
    assert own_folder(str(tmp_path), "job_12", environ()) == "job_12-1"
    make(tmp_path, "job_12-1", age_s=4000)
    assert own_folder(str(tmp_path), "job_12", environ()) == "job_12-2"


def test_a_second_trainer_of_the_same_start_stays_in_the_folder(tmp_path: Path) -> None:
    make(tmp_path, "job_12", age_s=5000)
    make(tmp_path, "job_12-1", age_s=50)
    assert own_folder(str(tmp_path), "job_12", environ()) == "job_12-1"


def test_a_requeued_job_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    assert own_folder(str(tmp_path), "job_12", environ(restarts=1)) == "job_12"
    make(tmp_path, "job_12", age_s=5000)
    assert own_folder(str(tmp_path), "job_12", environ(restarts=1)) == "job_12"
    make(tmp_path, "job_12-1", age_s=4000)
    assert own_folder(str(tmp_path), "job_12", environ(restarts=2)) == "job_12-1"


def test_a_job_that_does_not_know_its_start_takes_no_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue
    make(tmp_path, "job_12")
    variables = {k: v for k, v in environ().items() if "START" not in k}
    assert start_time(variables) is None
    assert own_folder(str(tmp_path), "job_12", variables) == "job_12-1"


def test_remote_folders_are_not_looked_at() -> None:
    assert own_folder("s3://bucket/logs", "job_12", environ()) == "job_12"


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_default_logger_does_not_continue_the_version_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """Job 12 after a dozen local runs; and job 12 once more, requeued."""
    (tmp_path / "lightning_logs" / "version_12").mkdir(parents=True)
    for name, value in environ(start=time.time() - 5, restarts=restarts).items():
        monkeypatch.setenv(name, value)
    folders = []
    for _ in range(2):
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=ZeROStrategy(1), default_root_dir=tmp_path, max_steps=2,
            log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(BoringModel())
        folders.append(Path(str(trainer.log_dir)).name)
        trainer.fit_loop.max_epochs = 2
        trainer.test(BoringModel(), verbose=False)
        assert Path(str(trainer.log_dir)).name == folders[-1]
    assert folders == ["job_12", "job_12"]
    assert list((tmp_path / "lightning_logs" / "version_12").iterdir()) == []
