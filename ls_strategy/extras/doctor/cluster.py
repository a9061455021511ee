"""Check the job's environment variables, from SLURM and from launchers, for consistency."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping

from ls_strategy.distributed.launch import slurm_check, slurm_job
from ls_strategy.distributed.launch.rendezvous import check_port
from ls_strategy.errors import PlanError
from ls_strategy.extras.doctor.finding import Finding, one_line, run

_NUMBERS = (
    "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES",
    "SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK",
)  # fmt: skip
_NEEDED = ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_PROCID")
_TIMEOUT_S = 15.0


def slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the job, its variables, and SLURM's commands."""
    given = {name: value for name, value in environ.items() if name.startswith("SLURM_")}
    if "SLURM_JOB_ID" not in given:
        leftover = [name for name in _NUMBERS if name in given]
        if leftover:
            cure = f"Lightning takes a process with SLURM_NTASKS for a task of a job: unset {' '.join(leftover)}."
            yield Finding("job", f"none, but {', '.join(leftover)} set", "problem", cure)
        else:
            yield Finding("job", "not in a SLURM job")
        yield sinfo(in_job=False)
        return
    problems = list(variables(given))
    yield from problems
    if not problems:
        yield from geometry(given)
    yield sinfo(in_job=True)


def variables(given: Mapping[str, str]) -> Iterator[Finding]:
    """Report variables that are missing or malformed."""
    fresh = "Start from a fresh job, or unset SLURM's variables if this shell is not in a job."
    for name in _NUMBERS:
        value = given.get(name, "0")
        if not value.isdecimal():
            yield Finding("variables", f"{name}={value!r} is not a number", "problem", fresh)
    missing = [name for name in _NEEDED if not given.get(name)]
    if "SLURM_NNODES" in missing and given.get("SLURM_JOB_NUM_NODES"):
        missing.remove("SLURM_NNODES")
    if missing:
        cure = f"Request --nodes and --ntasks-per-node in the batch script. {fresh}"
        yield Finding("variables", f"{', '.join(missing)} missing in job {given['SLURM_JOB_ID']}", "problem", cure)


def geometry(given: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the numbers of tasks and nodes with each other and with a Trainer of that size."""
    step = "SLURM_STEP_" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_"
    tasks = int(given.get("SLURM_STEP_NUM_TASKS") or given["SLURM_NTASKS"])
    nodes = int(given.get("SLURM_STEP_NUM_NODES") or given.get("SLURM_NNODES") or given["SLURM_JOB_NUM_NODES"])
    listed = given.get(f"{step}TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE") or ""
    per_node = slurm_check.parse_tasks_per_node(listed)
    state = f"job {given['SLURM_JOB_ID']}, task {given['SLURM_PROCID']} of {tasks} on {nodes} nodes"
    beyond = int(given["SLURM_PROCID"]) >= tasks
    if beyond or (per_node and (sum(per_node) != tasks or len(per_node) != nodes)):
        cure = "Variables of two jobs or steps are mixed: start with srun in the job itself, and do not export them."
        state += "" if beyond else f", but TASKS_PER_NODE={listed} lists others"
        yield Finding("job", state, "problem", cure)
        return
    yield Finding("job", state)
    devices = per_node[0] if per_node else max(tasks // max(nodes, 1), 1)
    launched = step == "SLURM_STEP_"
    for problem in slurm_check.check(given, devices=devices, num_nodes=nodes):
        # A process that srun did not start is not a task. Training can still be started with srun.
        what, _, cure = problem.partition(". ")
        yield Finding("start", what, "problem" if launched else "note", cure or "Request as many as the Trainer has.")
    if slurm_job.is_interactive(given):
        cure = "Start one process per node without srun, or give the job a name other than bash and interactive."
        yield Finding("job name", f"{given['SLURM_JOB_NAME']!r}: Lightning ignores SLURM in such a job", "note", cure)


def sinfo(*, in_job: bool) -> Finding:
    """Check that SLURM's commands exist and answer."""
    program = shutil.which("sinfo")
    if program is None:
        if not in_job:
            return Finding("commands", "no sinfo: this host is in no SLURM cluster")
        cure = "Add SLURM's commands to PATH: preemption needs squeue for the time limit, and scontrol to requeue."
        return Finding("commands", "in a job, but there is no sinfo", "note", cure)
    cure = "The controller may be down (scontrol ping), or slurm.conf may be missing: ask the administrators."
    output, error = run([program, "-h", "-o", "%P %D %t"], _TIMEOUT_S)
    if error:
        return Finding("commands", f"sinfo failed: {error}", "problem" if in_job else "note", cure)
    rows = [" ".join(line.split()) for line in output.splitlines()]
    return Finding("commands", f"sinfo: partition, nodes, state: {'; '.join(rows[:5])}{'; ...' if rows[5:] else ''}")


def launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the variables that ``torchrun`` and others set, and the port of rank 0."""
    numbers = {name: environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT") if name in environ}
    unset = f"Unset them unless a launcher set them for this process: unset {' '.join(numbers)}"
    wrong = [f"{name}={value!r}" for name, value in numbers.items() if not value.isdecimal()]
    if wrong:
        yield Finding("variables", f"{', '.join(wrong)}: not a number", "problem", unset)
        return
    if int(numbers.get("RANK", 0)) >= int(numbers.get("WORLD_SIZE", 1)) and "RANK" in numbers:
        value = f"RANK={numbers['RANK']} of WORLD_SIZE={numbers.get('WORLD_SIZE', 'unset')}"
        yield Finding("variables", value, "problem", unset)
    else:
        yield Finding("variables", ", ".join(f"{k}={v}" for k, v in numbers.items()) or "none set")
    if "MASTER_PORT" in numbers:
        yield port(environ.get("MASTER_ADDR", "127.0.0.1"), int(numbers["MASTER_PORT"]))


def port(address: str, number: int) -> Finding:
    """Check that rank 0 could listen on the port, if it is on this host."""
    if address not in ("localhost", socket.gethostname()) and not address.startswith("127."):
        return Finding("MASTER_PORT", f"{number} on {address}, which is another host or an address of this one")
    try:
        check_port(address, number, 0)
    except PlanError as error:
        cure = "Set MASTER_PORT to a free port on every rank, unset it, or end the process that uses it."
        return Finding("MASTER_PORT", one_line(str(error)), "problem", cure)
    return Finding("MASTER_PORT", f"{number} is free")
