"""What the environment says about the job: variables of SLURM and of launchers, and whether they fit together."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping

from ls_strategy.distributed.rendezvous import check_port
from ls_strategy.doctor.finding import Finding, one_line
from ls_strategy.errors import PlanError
from ls_strategy.slurm import job, preflight

_NUMBERS = (
    "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES",
    "SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK",
)  # fmt: skip
_NEEDED = ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_PROCID")
_PATIENCE_S = 15.0


def slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The job, its variables, and whether SLURM's commands answer."""
    given = {name: value for name, value in environ.items() if name.startswith("SLURM_")}
    if "SLURM_JOB_ID" not in given:
        leftover = [name for name in _NUMBERS if name in given]
        if leftover:
            cure = f"Lightning takes a process with SLURM_NTASKS for a task of a job: unset {' '.join(leftover)}."
            yield Finding("job", f"none, and {', '.join(leftover)} set", "problem", cure)
        else:
            yield Finding("job", "not in a job of SLURM")
        yield sinfo(in_job=False)
        return
    wrong = list(variables(given))
    yield from wrong
    if not any(finding.state == "problem" for finding in wrong):
        yield from geometry(given)
    yield sinfo(in_job=True)


def variables(given: Mapping[str, str]) -> Iterator[Finding]:
    """Each variable by itself."""
    fresh = "Start from a fresh job, or unset the variables of SLURM in this shell if it is in none."
    for name in _NUMBERS:
        value = given.get(name, "0")
        if not value.isdecimal():
            yield Finding("variables", f"{name}={value!r} is no number", "problem", fresh)
    missing = [name for name in _NEEDED if not given.get(name)]
    if "SLURM_NNODES" in missing and given.get("SLURM_JOB_NUM_NODES"):
        missing.remove("SLURM_NNODES")
    if missing:
        cure = f"Ask for --nodes and --ntasks-per-node in the batch script. {fresh}"
        yield Finding("variables", f"{', '.join(missing)} missing in job {given['SLURM_JOB_ID']}", "problem", cure)


def geometry(given: Mapping[str, str]) -> Iterator[Finding]:
    """Numbers of tasks and nodes against each other, and against what a Trainer of that size would check."""
    step = "SLURM_STEP_" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_"
    tasks = int(given.get("SLURM_STEP_NUM_TASKS") or given["SLURM_NTASKS"])
    nodes = int(given.get("SLURM_STEP_NUM_NODES") or given.get("SLURM_NNODES") or given["SLURM_JOB_NUM_NODES"])
    listed = given.get(f"{step}TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE") or ""
    per_node = preflight.parse_tasks_per_node(listed)
    state = f"job {given['SLURM_JOB_ID']}, task {given['SLURM_PROCID']} of {tasks} on {nodes} nodes"
    if int(given["SLURM_PROCID"]) >= tasks:
        cure = "Variables of two jobs or steps are mixed: start by srun in the job itself, and export none of them."
        yield Finding("job", state, "problem", cure)
        return
    if per_node and (sum(per_node) != tasks or len(per_node) != nodes):
        cure = "Variables of two jobs or steps are mixed: start by srun in the job itself, and export none of them."
        yield Finding("job", f"{state}, where TASKS_PER_NODE={listed} lists others", "problem", cure)
        return
    yield Finding("job", state)
    devices = per_node[0] if per_node else max(tasks // max(nodes, 1), 1)
    launched = step == "SLURM_STEP_"
    for problem in preflight.check(given, devices=devices, num_nodes=nodes):
        # Outside of srun this process is no task, and starting training by srun is still possible.
        what, _, cure = problem.partition(". ")
        yield Finding("start", what, "problem" if launched else "note", cure or "Ask for as many as the Trainer has.")
    if job.is_interactive(given):
        cure = "Start one process per node without srun, or give the job another name than bash and interactive."
        yield Finding("job name", f"{given['SLURM_JOB_NAME']!r}: Lightning ignores SLURM in such a job", "note", cure)


def sinfo(*, in_job: bool) -> Finding:
    """Whether SLURM's commands are here, and answer."""
    program = shutil.which("sinfo")
    if program is None:
        if not in_job:
            return Finding("commands", "no sinfo: this host is in no SLURM cluster")
        cure = "Add SLURM's commands to PATH: preemption asks squeue for the time limit, and scontrol to requeue."
        return Finding("commands", "in a job, and there is no sinfo", "note", cure)
    cure = "The controller may be down (scontrol ping), or slurm.conf be missing here: ask the administrators."
    state = "problem" if in_job else "note"
    try:
        command = [program, "-h", "-o", "%P %D %t"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("commands", f"sinfo does not answer: {one_line(str(error))}", state, cure)
    if done.returncode:
        return Finding("commands", f"sinfo failed: {one_line(done.stderr or done.stdout)}", state, cure)
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    return Finding("commands", f"sinfo: partition, nodes, state: {'; '.join(rows[:5])}{'; ...' if rows[5:] else ''}")


def launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that ``torchrun`` and others set, and the port that rank 0 would listen on."""
    numbers = {name: environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT") if name in environ}
    unset = f"Unset them unless a launcher set them for this process: unset {' '.join(numbers)}"
    wrong = [f"{name}={value!r}" for name, value in numbers.items() if not value.isdecimal()]
    if wrong:
        yield Finding("variables", f"{', '.join(wrong)}: no number", "problem", unset)
        return
    if int(numbers.get("RANK", 0)) >= int(numbers.get("WORLD_SIZE", 1)) and "RANK" in numbers:
        value = f"RANK={numbers['RANK']} of WORLD_SIZE={numbers.get('WORLD_SIZE', 'unset')}"
        yield Finding("variables", value, "problem", unset)
    else:
        yield Finding("variables", ", ".join(f"{k}={v}" for k, v in numbers.items()) or "none set")
    if "MASTER_PORT" in numbers:
        yield port(environ.get("MASTER_ADDR", "127.0.0.1"), int(numbers["MASTER_PORT"]))


def port(address: str, number: int) -> Finding:
    """Whether rank 0 could listen on the port, where that is this host."""
    if address not in ("localhost", socket.gethostname()) and not address.startswith("127."):
        return Finding("MASTER_PORT", f"{number} on {address}, which is another host or an address of this one")
    try:
        check_port(address, number, 0)
    except PlanError as error:
        cure = "Set MASTER_PORT to a free port on every rank, or unset it; or end the process that has it."
        return Finding("MASTER_PORT", one_line(str(error)), "problem", cure)
    return Finding("MASTER_PORT", f"{number} is free")
