"""The SLURM job this process runs in: its name, its end, its state, and how to requeue it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_PATIENCE_S = 30.0
"""How long a SLURM command may take; a busy controller needs a few seconds."""


def is_interactive(environ: Mapping[str, str]) -> bool:
    """Whether the job is one that Lightning takes for an interactive shell: it ignores SLURM there."""
    return environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def job_id(environ: Mapping[str, str]) -> str | None:
    """Name of the batch job for ``scontrol``, ``123`` or ``123_4`` in an array.

    Returns:
        None outside SLURM and in interactive jobs, which cannot be requeued.
    """
    if "SLURM_JOB_ID" not in environ or is_interactive(environ):
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


def restarts(environ: Mapping[str, str]) -> int:
    """How many times the job was requeued before."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def end_time(environ: Mapping[str, str]) -> float | None:
    """When SLURM will end the job, in seconds since 1970; None where there is no limit, or none can be found out."""
    name = job_id(environ)
    if name is None:
        return None
    # Newer releases say it in the environment; older ones must be asked.
    text = environ.get("SLURM_JOB_END_TIME") or _ask(["squeue", "-h", "-j", name, "-o", "%e"], SLURM_TIME_FORMAT="%s")
    try:
        seconds = float(text or "")
    except ValueError:  # NONE, N/A
        return None
    return seconds if seconds > 0 else None


def start_time(environ: Mapping[str, str]) -> float | None:
    """When SLURM started the job this time, in seconds since 1970; None outside of it, and where it does not say."""
    name = job_id(environ)
    if name is None:
        return None
    text = environ.get("SLURM_JOB_START_TIME") or _ask(["squeue", "-h", "-j", name, "-o", "%S"], SLURM_TIME_FORMAT="%s")
    try:
        return float(text or "")
    except ValueError:
        return None


def own_folder(parent: str, name: str, environ: Mapping[str, str]) -> str:
    """Name of this job's folder in ``parent``: ``name``, or ``name-1`` and so on where that is another job's.

    Numbers of jobs come again, on another cluster or after a new installation. A folder that was there before the job
    was started for the first time is another's; a job that was requeued goes on in its own, which is the last one.

    Args:
        parent: a folder, or a URL, in which nothing is looked up.
        name: what says which job it is.
        environ: of this process.
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
    """Whether SLURM counts the job as running: not once it was cancelled, ran out of time or is being requeued."""
    name = job_id(environ)
    return name is not None and _ask(["squeue", "-h", "-j", name, "-o", "%T"]) == "RUNNING"


def requeue(environ: Mapping[str, str]) -> str | None:
    """Put the job back into the queue. SLURM ends its processes at once, so save first.

    Returns:
        None if SLURM accepted it, else why not.
    """
    name = job_id(environ)
    if name is None:
        return "this process does not run in a SLURM batch job"
    command = ["scontrol", "requeue", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    return None if done.returncode == 0 else f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}"


def _ask(command: list[str], **extra: str) -> str | None:
    """Output of a SLURM command; None if there is none."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
            env={**os.environ, **extra},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
