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
    command: Sequence[str]  # what every task runs. Words are quoted, except ``raw``.
    # Unquoted words for variables of the job, such as ``--trainer.devices=$SLURM_NTASKS_PER_NODE``.
    raw: Sequence[str] = ()
    nodes: int = 1
    tasks_per_node: int = 1  # one process per task
    gpus_per_node: int = 0
    cpus_per_task: int | None = None  # none: the cluster's default
    time: str | None = None  # ``minutes`` or ``days-hours:minutes:seconds``. None: the partition's default.
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    array: str | None = None  # ``0-7`` or ``0-7%2``: independent runs, identified by ``$SLURM_ARRAY_TASK_ID``
    mail_user: str | None = None
    signal_lead_s: int = 120  # seconds between SIGUSR1 and the time limit. SLURM may send it up to a minute earlier.
    setup: Sequence[str] = ()  # lines of bash that run first: ``module load cuda``
    env: Sequence[tuple[str, str]] = ()  # variables of every task. They override the script's own.
    python: str = "python"
    folder: str = "slurm"  # folder of the script and the logs, relative to where the job is submitted
    script: str = "job.sbatch"  # path of the script, for its first comment
    # The fewest nodes that the job may continue on when nodes fail; ``torchrun`` starts the processes. None: `srun`
    # starts them, and a failed node ends the job.
    elastic: int | None = None

    def __post_init__(self) -> None:
        if self.elastic is not None and not 1 <= self.elastic <= self.nodes:
            raise ConfigError(
                f"Got --elastic {self.elastic} and --nodes {self.nodes}. Give the fewest nodes to continue on, from 1 "
                f"to {self.nodes}."
            )
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


_SRUN = """
# `exec`: signals and scancel reach srun itself, and its status becomes the job's. A rank that fails ends the others.
exec srun --kill-on-bad-exit=1 --output="$logs/rank-%t.log" --open-mode=append \\
  @COMMAND@
""".strip()

_TORCHRUN = """
# One agent per node starts the ranks, and starts them again on the nodes that are left. Agents share no store with the
# ranks: it would keep the addresses of ranks that have ended. The job's first node is where agents meet, so that one
# must last. SIGUSR1 is for the ranks.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=@THREADS@ logs
rm -f "$logs/complete"
status=0
srun --no-kill --kill-on-bad-exit=0 --output="$logs/node-%n.log" --open-mode=append \\
  bash -c 'trap "" USR1; export PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)); "$@" && touch "$logs/complete"' agent \\
  @COMMAND@ || status=$?
# To srun a node that was lost is a failure, even if the others have completed the run.
if [[ -e $logs/complete ]]; then exit 0; fi
exit "$status"
""".strip()

_RESTARTS = 20  # of each agent. An error of the program repeats as often.


def _launcher(job: Job) -> list[str]:
    """Return the lines between Python and the program's ``-m module`` that start the ranks of one node."""
    return [
        "-m torch.distributed.run",
        f"--nnodes={job.elastic}:{job.nodes}",
        f"--nproc-per-node={job.tasks_per_node}",
        f"--max-restarts={_RESTARTS}",
        "--rdzv-backend=c10d",
        '--rdzv-id="$job"',
        '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
    ]


def render(job: Job) -> str:
    """Return the script's text."""
    template = files("ls_strategy.extras.slurm").joinpath("template.sbatch").read_text(encoding="utf-8")
    values = {
        "SCRIPT": shlex.quote(job.script),
        "DIRECTIVES": "\n".join(f"#SBATCH --{directive}" for directive in _directives(job)),
        "SIGNAL_LEAD": str(job.signal_lead_s),
        "LOG_ID": "%A_%a" if job.array else "%j",
        "FOLDER": job.folder,
        "SETUP": "\n".join(["", *job.setup, ""]) if job.setup else "",
        "PYTHON": shlex.quote(job.python),
        "ENV": "".join(f"export {name}={shlex.quote(value)}\n" for name, value in job.env),
        "COMMAND": " \\\n  ".join(_lines(job)),
        "THREADS": str(job.cpus_per_task or 1),
    }
    template = template.replace("@LAUNCH@", _SRUN if job.elastic is None else _TORCHRUN)
    return re.sub(r"@([A-Z_]+)@", lambda m: values[m[1]], template)


def _directives(job: Job) -> list[str]:
    options: list[tuple[str, object]] = [
        ("job-name", job.name),
        ("nodes", job.nodes),
        ("ntasks-per-node", job.tasks_per_node if job.elastic is None else 1),
        ("gpus-per-node", job.gpus_per_node or None),
        ("cpus-per-task", job.cpus_per_task and job.cpus_per_task * (1 if job.elastic is None else job.tasks_per_node)),
        ("time", job.time),
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("constraint", job.constraint),
        ("array", job.array),
        ("mail-user", job.mail_user),
        ("mail-type", "END,FAIL,REQUEUE,TIME_LIMIT_80" if job.mail_user else None),
    ]
    found = [f"{option}={value}" for option, value in options if value is not None]
    return found if job.elastic is None else [*found, "no-kill"]


def _lines(job: Job) -> list[str]:
    lines: list[str] = []
    for word in job.command:
        if lines and (not word.startswith("--") or lines[-1].endswith(" -m")):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    if job.elastic is None:
        return [*lines, *job.raw]
    python, _, program = lines[0].partition(" ")
    return [python, *_launcher(job), program, *lines[1:], *job.raw]
