"""Whether SLURM's idea of the job and the Trainer's agree: asked before any process waits for another."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ls_strategy.errors import PlanError
from ls_strategy.slurm.job import is_interactive


def require(environ: Mapping[str, str], *, devices: int, num_nodes: int, gpus: bool | None = None) -> None:
    """Raise what `check` finds, all at once.

    Raises:
        PlanError: each inconsistency with its cure.
    """
    problems = check(environ, devices=devices, num_nodes=num_nodes, gpus=gpus)
    if problems:
        raise PlanError("SLURM and the Trainer do not agree:\n" + "\n".join(f"- {p}" for p in problems))


def check(environ: Mapping[str, str], *, devices: int, num_nodes: int, gpus: bool | None = None) -> list[str]:
    """What is inconsistent between the variables of SLURM and the Trainer, each with its cure.

    Args:
        environ: of this process.
        devices: processes per node as the Trainer has them.
        num_nodes: nodes as the Trainer has them.
        gpus: whether the processes use one GPU each; None leaves GPUs out of account.

    Returns:
        Empty outside SLURM, and under ``torchrun``, which tells the ranks about each other by itself.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_NTASKS" not in environ or "TORCHELASTIC_RUN_ID" in environ:
        return []
    # Only srun sets this one; the batch script has the other variables of the job, SLURM_PROCID included.
    in_step = "SLURM_STEP_NUM_TASKS" in environ
    tasks = int(environ["SLURM_STEP_NUM_TASKS"] if in_step else environ["SLURM_NTASKS"])
    if is_interactive(environ):
        return _interactive(environ, tasks) if in_step else []
    if not in_step and tasks > 1:
        return [
            f"the job has SLURM_NTASKS={tasks} tasks, and this process was started without srun, so it would wait for "
            f"{tasks - 1} ranks that nobody starts. Write `srun python ...` in the batch script; or, to start the "
            "ranks by torchrun, ask for --ntasks-per-node=1."
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
        f"srun started {tasks} tasks in a job named {name!r}. Lightning takes such a job for a shell and ignores "
        f"SLURM, so this would be {tasks} separate runs. Start one process without srun, which starts the others of "
        "its node; or give the job another name: `export SLURM_JOB_NAME=train` before srun."
    ]


def _geometry(environ: Mapping[str, str], tasks: int, devices: int, num_nodes: int, *, in_step: bool) -> list[str]:
    step = "SLURM_STEP_" if in_step else "SLURM_"
    listed = environ.get(f"{step}TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    per_node = parse_tasks_per_node(listed)
    nodes = int(environ.get(f"{step}NUM_NODES") or environ.get("SLURM_JOB_NUM_NODES") or environ["SLURM_NNODES"])
    problems: list[str] = []
    if len(set(per_node)) > 1:
        problems.append(
            f"nodes have different numbers of tasks ({listed}), a Trainer has the same number of devices on all. "
            f"Ask for --nodes={num_nodes} --ntasks-per-node={devices} in place of --ntasks={tasks}."
        )
    elif per_node and per_node[0] != devices:
        problems.append(
            f"srun starts {per_node[0]} tasks per node, the Trainer has devices={devices}. "
            f"Set devices={per_node[0]}, or ask for --ntasks-per-node={devices}."
        )
    if nodes != num_nodes:
        problems.append(
            f"the job runs on {nodes} nodes, the Trainer has num_nodes={num_nodes}. "
            f"Set num_nodes={nodes}, or ask for --nodes={num_nodes}."
        )
    if not problems and tasks != devices * num_nodes:
        problems.append(
            f"srun starts {tasks} tasks, the Trainer has devices={devices} * num_nodes={num_nodes}. "
            f"Ask for --nodes={num_nodes} --ntasks-per-node={devices}, without --ntasks."
        )
    # With one task left in the environment, processes of a bigger job would take themselves for rank 0 each.
    if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in environ:
        problems.append(f"--ntasks-per-node was not given, which Lightning needs. Ask for --ntasks-per-node={devices}.")
    return problems


def _gpus(environ: Mapping[str, str], devices: int) -> list[str]:
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal() and int(on_node) < devices:
        return [
            f"the job has {on_node} GPUs on this node, the Trainer has devices={devices}. "
            f"Ask for --gpus-per-node={devices}, or set devices={on_node} and --ntasks-per-node={on_node}."
        ]
    if visible and len(visible.split(",")) < devices:
        return [
            f"a task sees only the GPUs {visible} (CUDA_VISIBLE_DEVICES), the Trainer picks one of {devices} by the "
            f"rank on the node. Ask for --gpus-per-node={devices} in place of --gpus-per-task, or add --gpu-bind=none "
            "to srun."
        ]
    return []


def _idle_gpus(environ: Mapping[str, str]) -> list[str]:
    """GPUs of a job that trains on the CPU; none if an empty ``CUDA_VISIBLE_DEVICES`` says that this is meant."""
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if not on_node.isdecimal() or int(on_node) == 0 or environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    return [
        f"the job has {on_node} GPUs on this node, and the Trainer runs on the CPU. Set accelerator='gpu' (in YAML "
        "trainer.accelerator), or ask for no GPUs; `export CUDA_VISIBLE_DEVICES=` says that the CPU is meant."
    ]


def parse_tasks_per_node(text: str) -> list[int]:
    """Tasks of each node from SLURM's short form: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    result: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        result += [int(count)] * int(times or 1)
    return result
