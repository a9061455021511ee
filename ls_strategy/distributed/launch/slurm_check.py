"""Check that SLURM and the Trainer agree on the job, before any process waits for another."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ls_strategy.distributed.launch.slurm_job import is_interactive
from ls_strategy.errors import PlanError


def require(environ: Mapping[str, str], *, devices: int, num_nodes: int, gpus: bool | None = None) -> None:
    """Raise all problems that `check` finds.

    Raises:
        PlanError: Each inconsistency with its cure.
    """
    problems = check(environ, devices=devices, num_nodes=num_nodes, gpus=gpus)
    if problems:
        raise PlanError("SLURM and the Trainer do not agree:\n" + "\n".join(f"- {p}" for p in problems))


def check(environ: Mapping[str, str], *, devices: int, num_nodes: int, gpus: bool | None = None) -> list[str]:
    """Return the inconsistencies between SLURM's variables and the Trainer, each with its cure.

    Empty outside SLURM, and under ``torchrun``, which connects the ranks itself.

    Args:
        environ: Environment of this process.
        devices: Processes per node in the Trainer.
        num_nodes: Nodes in the Trainer.
        gpus: Whether each process uses a GPU. None skips the check of GPUs.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_NTASKS" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return []
    # Only srun sets this variable. The batch script has all others, including SLURM_PROCID.
    in_step = "SLURM_STEP_NUM_TASKS" in environ
    tasks = int(environ["SLURM_STEP_NUM_TASKS"] if in_step else environ["SLURM_NTASKS"])
    if is_interactive(environ):
        return _interactive(environ, tasks) if in_step else []
    if not in_step and tasks > 1:
        return [
            f"the job has SLURM_NTASKS={tasks} tasks, and this process was started without srun, so it would wait for "
            f"{tasks - 1} ranks that are never started. Write `srun python ...` in the batch script. To start the "
            "ranks with torchrun, request --ntasks-per-node=1."
        ]
    problems = _geometry(environ, tasks, devices, num_nodes, in_step=in_step)
    if gpus is not None:
        problems += _gpus(environ, devices) if gpus else _idle_gpus(environ)
    return problems


def _interactive(environ: Mapping[str, str], tasks: int) -> list[str]:
    if tasks == 1:
        return []
    name = environ["SLURM_JOB_NAME"]
    return [
        f"srun started {tasks} tasks in a job named {name!r}. Lightning takes a job of that name for a shell and "
        f"ignores SLURM, so this would be {tasks} separate runs. Start one process without srun, which starts the "
        "others of its node, or rename the job: `export SLURM_JOB_NAME=train` before srun."
    ]


def _geometry(environ: Mapping[str, str], tasks: int, devices: int, num_nodes: int, *, in_step: bool) -> list[str]:
    step = "SLURM_STEP_" if in_step else "SLURM_"
    listed = environ.get(f"{step}TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    per_node = parse_tasks_per_node(listed)
    nodes = int(environ.get(f"{step}NUM_NODES") or environ.get("SLURM_JOB_NUM_NODES") or environ["SLURM_NNODES"])
    problems: list[str] = []
    if len(set(per_node)) > 1:
        problems.append(
            f"nodes have different numbers of tasks ({listed}), but a Trainer has the same number of devices on all. "
            f"Request --nodes={num_nodes} --ntasks-per-node={devices} instead of --ntasks={tasks}."
        )
    elif per_node and per_node[0] != devices:
        problems.append(
            f"srun starts {per_node[0]} tasks per node, but the Trainer has devices={devices}. "
            f"Set devices={per_node[0]}, or request --ntasks-per-node={devices}."
        )
    if nodes != num_nodes:
        problems.append(
            f"the job runs on {nodes} nodes, but the Trainer has num_nodes={num_nodes}. "
            f"Set num_nodes={nodes}, or request --nodes={num_nodes}."
        )
    if not problems and tasks != devices * num_nodes:
        problems.append(
            f"srun starts {tasks} tasks, but the Trainer has devices={devices} * num_nodes={num_nodes}. "
            f"Request --nodes={num_nodes} --ntasks-per-node={devices}, without --ntasks."
        )
    # Without the variable, every process of a larger job would take itself for rank 0.
    if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in environ:
        problems.append(f"--ntasks-per-node is missing, but Lightning needs it. Request --ntasks-per-node={devices}.")
    return problems


def _gpus(environ: Mapping[str, str], devices: int) -> list[str]:
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal() and int(on_node) < devices:
        return [
            f"the job has {on_node} GPUs on this node, but the Trainer has devices={devices}. "
            f"Request --gpus-per-node={devices}, or set devices={on_node} and --ntasks-per-node={on_node}."
        ]
    if visible and len(visible.split(",")) < devices:
        return [
            f"a task sees only the GPUs {visible} (CUDA_VISIBLE_DEVICES), but the Trainer picks one of {devices} by "
            f"local rank. Request --gpus-per-node={devices} instead of --gpus-per-task, or add --gpu-bind=none to srun."
        ]
    return []


def _idle_gpus(environ: Mapping[str, str]) -> list[str]:
    """Report GPUs of a job that trains on the CPU. An empty ``CUDA_VISIBLE_DEVICES`` means that this is intended."""
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if not on_node.isdecimal() or int(on_node) == 0 or environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    return [
        f"the job has {on_node} GPUs on this node, but the Trainer runs on the CPU. Set accelerator='gpu' (in YAML "
        "trainer.accelerator), request no GPUs, or `export CUDA_VISIBLE_DEVICES=` to use the CPU."
    ]


def parse_tasks_per_node(text: str) -> list[int]:
    """Parse SLURM's short form of the tasks per node: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    result: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        result += [int(count)] * int(times or 1)
    return result
