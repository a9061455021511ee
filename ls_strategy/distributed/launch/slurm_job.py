"""The SLURM job of this process: its name, end time and state, and requeueing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_TIMEOUT_S = 30.0
"""Timeout of a SLURM command. A busy controller needs a few seconds."""


def is_interactive(environ: Mapping[str, str]) -> bool:
    """Return whether Lightning takes the job for an interactive shell, in which it ignores SLURM."""
    return environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def job_id(environ: Mapping[str, str]) -> str | None:
    """Return the batch job's name for ``scontrol``: ``123``, or ``123_4`` in an array.

    None outside SLURM and in interactive jobs, which cannot be requeued.
    """
    if "SLURM_JOB_ID" not in environ or is_interactive(environ):
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often the job was requeued."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def end_time(environ: Mapping[str, str]) -> float | None:
    """Return when SLURM will end the job, in seconds since 1970. None if there is no limit or it is unknown."""
    seconds = _time(environ, "SLURM_JOB_END_TIME", "%e")
    return seconds if seconds is not None and seconds > 0 else None


def start_time(environ: Mapping[str, str]) -> float | None:
    """Return when SLURM started the job this time, in seconds since 1970. None if unknown."""
    return _time(environ, "SLURM_JOB_START_TIME", "%S")


def _time(environ: Mapping[str, str], variable: str, field: str) -> float | None:
    name = job_id(environ)
    if name is None:
        return None
    try:
        return float(environ.get(variable) or _queued(name, field) or "")  # older releases do not set the variable
    except ValueError:  # NONE, N/A
        return None


def own_folder(parent: str, name: str, environ: Mapping[str, str]) -> str:
    """Return the name of this job's folder in ``parent``: ``name``, or ``name-1`` etc. if that belongs to another job.

    Job numbers repeat, on another cluster or after a new installation. A folder that is older than the job's first
    start belongs to another job. A requeued job continues in its own folder, which is the last one.

    Args:
        parent: A folder, or a URL, which is not searched.
        name: Identifies the job.
        environ: Environment of this process.
    """
    if "://" in parent:
        return name
    again, start = restarts(environ), start_time(environ)
    chosen = name
    for number in range(1, 1000):
        folder = Path(parent, chosen)
        following = f"{name}-{number}"
        if not folder.exists():
            break
        if again:
            if not Path(parent, following).exists():
                break
        elif start is not None and folder.stat().st_mtime >= start:
            break
        chosen = following
    return chosen


def is_running(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM counts the job as running: False once it is cancelled, timed out or being requeued."""
    name = job_id(environ)
    return name is not None and _queued(name, "%T") == "RUNNING"


def requeue(environ: Mapping[str, str]) -> str | None:
    """Requeue the job. SLURM ends its processes at once, so save first.

    Returns:
        None if SLURM accepted it, otherwise the reason.
    """
    name = job_id(environ)
    if name is None:
        return "this process does not run in a SLURM batch job"
    command = ["scontrol", "requeue", name]
    output, error = _run(command)
    return f"{' '.join(command)}: {error}" if output is None else None


def _queued(name: str, field: str) -> str | None:
    """Return a field of the job from squeue, with times in seconds since 1970, or None if squeue failed."""
    return _run(["squeue", "-h", "-j", name, "-o", field], SLURM_TIME_FORMAT="%s")[0]


def _run(command: list[str], **extra: str) -> tuple[str | None, str]:
    """Run a SLURM command. Return its output and "", or None and the error."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env={**os.environ, **extra}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return (None, (done.stderr or done.stdout).strip()) if done.returncode else (done.stdout.strip(), "")
