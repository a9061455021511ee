"""What SLURM says against what the Trainer says."""

from __future__ import annotations

import pytest

from ls_strategy.distributed.launch.slurm_check import check, parse_tasks_per_node, require
from ls_strategy.errors import PlanError


def job(nodes: int = 2, per_node: int = 4, *, step: bool = True, **changes: str | None) -> dict[str, str]:
    """The variables of a task that srun started, as SLURM sets them."""
    tasks = str(nodes * per_node)
    shape = f"{per_node}(x{nodes})" if nodes > 1 else str(per_node)
    environ: dict[str, str | None] = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_NTASKS": tasks,
        "SLURM_NTASKS_PER_NODE": str(per_node), "SLURM_NNODES": str(nodes), "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_TASKS_PER_NODE": shape,
    }  # fmt: skip
    if step:
        environ |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_NUM_NODES": str(nodes)}
        environ["SLURM_STEP_TASKS_PER_NODE"] = shape
    return {k: v for k, v in (environ | changes).items() if v is not None}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        job(),
        job(1, 8, step=False, TORCHELASTIC_RUN_ID="1"),
        job(1, 8, step=False, SLURM_JOB_NAME="bash"),
        job(2, 4, SLURM_GPUS_ON_NODE="4", CUDA_VISIBLE_DEVICES="0,1,2,3"),
    ],
    ids=["no SLURM", "srun", "torchrun", "shell", "GPUs"],
)
def test_nothing_is_wrong(environ):
    assert check(environ, devices=4, num_nodes=2, gpus=True) == []
    require(environ, devices=4, num_nodes=2, gpus=True)


def test_one_process_in_a_job_of_one_task():
    assert check(job(1, 1, step=False), devices=1, num_nodes=1) == []


@pytest.mark.parametrize(
    ("environ", "cures"),
    [
        (job(step=False), ["srun python"]),
        (job(2, 4, SLURM_JOB_NAME="interactive"), ["export SLURM_JOB_NAME=train"]),
        (job(2, 8), ["devices=8", "--ntasks-per-node=4"]),
        (job(3, 4), ["num_nodes=3", "--nodes=2"]),
        (job(1, 2), ["devices=2", "num_nodes=1"]),
        (job(SLURM_STEP_TASKS_PER_NODE="4,3", SLURM_STEP_NUM_TASKS="7"), ["--nodes=2 --ntasks-per-node=4"]),
        (job(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)"), ["devices=1"]),
        (
            job(SLURM_STEP_TASKS_PER_NODE=None, SLURM_TASKS_PER_NODE=None, SLURM_STEP_NUM_TASKS="3"),
            ["without --ntasks"],
        ),
        (job(SLURM_NTASKS_PER_NODE=None), ["--ntasks-per-node=4"]),
        (job(SLURM_GPUS_ON_NODE="2"), ["--gpus-per-node=4"]),
        (job(CUDA_VISIBLE_DEVICES="0"), ["--gpu-bind=none"]),
    ],
    ids=["no srun", "interactive", "devices", "nodes", "both", "uneven", "srun -n", "tasks", "ntasks", "gpus", "bound"],
)
def test_each_inconsistency_is_named_with_its_cure(environ, cures):
    problems = check(environ, devices=4, num_nodes=2, gpus=True)
    assert problems
    for cure in cures:
        assert any(cure in p for p in problems), problems
    with pytest.raises(PlanError) as error:
        require(environ, devices=4, num_nodes=2, gpus=True)
    assert all(p in str(error.value) for p in problems)


def test_gpus_of_a_job_that_trains_on_the_cpu():
    environ = job(SLURM_GPUS_ON_NODE="2", CUDA_VISIBLE_DEVICES="0,1")
    with pytest.raises(PlanError, match=r"2 GPUs on this node, but the Trainer runs on the CPU.*accelerator='gpu'"):
        require(environ, devices=4, num_nodes=2, gpus=False)
    assert check(environ | {"CUDA_VISIBLE_DEVICES": ""}, devices=4, num_nodes=2, gpus=False) == []
    assert check(environ, devices=4, num_nodes=2) == []
    assert check(job(), devices=4, num_nodes=2, gpus=False) == []


@pytest.mark.parametrize(("text", "expected"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2", [1, 2]), ("", [])])
def test_the_short_form_of_tasks_per_node(text, expected):
    assert parse_tasks_per_node(text) == expected
