"""The batch script of a training run: a template and its values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from ls_strategy.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLAIN = re.compile(r"[^\s\"'\\`$;&|<>]+")
_CONSTRAINT = re.compile(r"[^\s\"'\\`$]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run for SLURM. Texts for SLURM are passed on unchanged."""

    name: str
    """Name of the job and of its files."""

    command: Sequence[str]
    """What every task runs. Words are quoted, except ``raw``."""

    raw: Sequence[str] = ()
    """Unquoted words for variables of the job, such as ``--trainer.devices=$SLURM_NTASKS_PER_NODE``."""

    nodes: int = 1
    tasks_per_node: int = 1
    """One process per task."""

    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    """None: the cluster's default."""

    time: str | None = None
    """``minutes`` or ``days-hours:minutes:seconds``. None: the partition's default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    array: str | None = None
    """``0-7`` or ``0-7%2``: independent runs, identified by ``$SLURM_ARRAY_TASK_ID``."""

    mail_user: str | None = None
    signal_lead_s: int = 120
    """Seconds between SIGUSR1 and the time limit. SLURM may send it up to a minute earlier."""

    setup: Sequence[str] = ()
    """Lines of bash that run first: ``module load cuda``."""

    env: Sequence[tuple[str, str]] = ()
    """Variables of every task. They override the script's own."""

    python: str = "python"
    folder: str = "slurm"
    """Folder of the script and the logs, relative to where the job is submitted."""

    script: str = "job.sbatch"
    """Path of the script, for its first comment."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"Got --name {self.name!r}. Use letters, digits, dot, dash and underscore: it is also a file name."
            )
        counts = {
            "nodes": self.nodes,
            "tasks-per-node": self.tasks_per_node,
            "cpus-per-task": 1 if self.cpus_per_task is None else self.cpus_per_task,
            "signal-lead-s": self.signal_lead_s,
        }
        for option, value in counts.items():
            if value < 1:
                raise ConfigError(f"Got --{option} {value}. Give a number of at least 1.")
        if self.gpus_per_node < 0:
            raise ConfigError(f"Got --gpus-per-node {self.gpus_per_node}. Give 0 or the number of GPUs.")
        for option in ("time", "partition", "account", "qos", "constraint", "array", "mail_user"):
            value, allowed = getattr(self, option), _CONSTRAINT if option == "constraint" else _PLAIN
            if value is not None and not allowed.fullmatch(value):
                raise ConfigError(f"Got --{option.replace('_', '-')} {value!r}. Give one word without quotes.")
        for name, value in self.env:
            if not _VARIABLE.fullmatch(name) or "\n" in value:
                raise ConfigError(f"Got --env {name}={value}. Give NAME=VALUE in one line.")


def render(job: Job) -> str:
    """Return the script's text."""
    template = files("ls_strategy.slurm").joinpath("template.sbatch").read_text(encoding="utf-8")
    values = {
        "SCRIPT": shlex.quote(job.script),
        "DIRECTIVES": "\n".join(f"#SBATCH --{option}={value}" for option, value in _directives(job)),
        "SIGNAL_LEAD": str(job.signal_lead_s),
        "LOG_ID": "%A_%a" if job.array else "%j",
        "FOLDER": job.folder,
        "SETUP": "\n".join(["", *job.setup, ""]) if job.setup else "",
        "PYTHON": shlex.quote(job.python),
        "ENV": "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.env),
        "COMMAND": " \\\n  ".join(_lines(job)),
    }
    return re.sub(r"@([A-Z_]+)@", lambda m: values[m[1]], template)


def _directives(job: Job) -> list[tuple[str, str]]:
    options: list[tuple[str, object]] = [
        ("job-name", job.name),
        ("nodes", job.nodes),
        ("ntasks-per-node", job.tasks_per_node),
        ("gpus-per-node", job.gpus_per_node or None),
        ("cpus-per-task", job.cpus_per_task),
        ("time", job.time),
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("constraint", job.constraint),
        ("array", job.array),
        ("mail-user", job.mail_user),
        ("mail-type", "END,FAIL,REQUEUE,TIME_LIMIT_80" if job.mail_user else None),
    ]
    return [(option, str(value)) for option, value in options if value is not None]


def _lines(job: Job) -> list[str]:
    """Return the command with one option per line."""
    lines: list[str] = []
    for word in job.command:
        if lines and (not word.startswith("--") or lines[-1].endswith(" -m")):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return [*lines, *job.raw]
