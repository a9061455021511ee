"""The SLURM job of this process, as the environment and SLURM's commands describe it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ls_strategy.distributed.launch import slurm_job

BATCH = {"SLURM_JOB_ID": "7"}

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Put a program in the place of one of SLURM's commands; there is none without."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        (BATCH, "7"),
        ({**BATCH, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2"),
        ({**BATCH, "SLURM_JOB_NAME": "bash"}, None),
        ({**BATCH, "SLURM_JOB_NAME": "interactive"}, None),
    ],
    ids=["no job", "job", "array", "shell", "interactive"],
)
def test_the_name_of_the_job(environ: dict[str, str], name: str | None) -> None:
    assert slurm_job.job_id(environ) == name


@pytest.mark.parametrize(("count", "restarts"), [(None, 0), ("", 0), ("3", 3)])
def test_the_number_of_restarts(count: str | None, restarts: int) -> None:
    assert slurm_job.restarts({} if count is None else {"SLURM_RESTART_COUNT": count}) == restarts


def test_the_end_is_in_the_environment() -> None:
    assert slurm_job.end_time({**BATCH, "SLURM_JOB_END_TIME": "1700000000"}) == 1700000000.0


def test_older_releases_are_asked_for_the_end(program: Program) -> None:
    program("squeue", 'test "$* $SLURM_TIME_FORMAT" = "-h -j 7 -o %e %s" && echo 1700000000')
    assert slurm_job.end_time(BATCH) == 1700000000.0


def test_older_releases_are_asked_for_the_start(program: Program) -> None:
    program("squeue", 'test "$* $SLURM_TIME_FORMAT" = "-h -j 7 -o %S %s" && echo 1600000000')
    assert slurm_job.start_time(BATCH) == 1600000000.0


@pytest.mark.parametrize("answer", ["N/A", "NONE", "", "0"])
def test_a_job_without_a_limit_has_no_end(program: Program, answer: str) -> None:
    program("squeue", f"echo {answer}")
    assert slurm_job.end_time(BATCH) is None


def test_without_commands_the_end_is_unknown(program: Program) -> None:
    assert slurm_job.end_time(BATCH) is None


def test_outside_of_a_job_nothing_is_asked(program: Program) -> None:
    program("squeue", "echo 1700000000")
    assert (slurm_job.end_time({}), slurm_job.start_time({}), slurm_job.is_running({})) == (None, None, False)


@pytest.mark.parametrize(("script", "running"), [("echo RUNNING", True), ("echo COMPLETING", False), ("exit 1", False)])
def test_whether_the_job_runs(program: Program, script: str, running: bool) -> None:
    program("squeue", script)
    assert slurm_job.is_running(BATCH) == running


def test_a_requeue_that_is_accepted(program: Program, tmp_path: Path) -> None:
    program("scontrol", f'echo "$@" > {tmp_path}/called')
    assert slurm_job.requeue(BATCH) is None
    assert (tmp_path / "called").read_text() == "requeue 7\n"


def test_a_requeue_that_is_refused_says_why(program: Program) -> None:
    program("scontrol", 'echo "Requested operation is disabled" >&2; exit 1')
    assert slurm_job.requeue(BATCH) == "scontrol requeue 7: Requested operation is disabled"


def test_a_requeue_without_the_command_says_why(program: Program) -> None:
    assert "No such file" in str(slurm_job.requeue(BATCH))


def test_a_requeue_outside_of_a_job_says_why() -> None:
    assert "not run in a SLURM batch job" in str(slurm_job.requeue({}))
