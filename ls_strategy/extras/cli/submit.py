"""``ls-strategy submit CONFIG...``: run a recipe on a SLURM cluster; `submit_elsewhere` has the other targets."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ls_strategy.errors import StateError
from ls_strategy.extras.cli import arguments, job_program, submit_elsewhere

FOLDER = "slurm"


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``submit`` subcommand."""
    parser = subcommands.add_parser(
        "submit",
        help="run a LightningCLI program on a SLURM cluster, or write its job for Kubeflow, SkyPilot or torchrun",
        usage="ls-strategy submit CONFIG [CONFIG ...] [options] [-- options of the program]",
        description="Write a batch script into ./slurm, submit it, and print how to watch the job. The job runs in "
        "the current folder, with the Python that runs this command. Trainer(num_nodes, devices) are set to the "
        "job's, and with --gpus-per-node accelerator=gpu. "
        "PreemptionHandler is added to the callbacks: the job saves before its time limit, is requeued, and "
        "continues. Array tasks have separate logs and checkpoints: loggers and PreemptionHandler name them by job. "
        "If you set a ModelCheckpoint's dirpath, include $SLURM_ARRAY_TASK_ID in it. With --to another target, the "
        "file of the job is written to ./kubeflow, ./skypilot or ./torchrun, and nothing is submitted.",
    )
    parser.add_argument("config", nargs="+", help="YAML files of the program; later files override earlier ones")
    parser.add_argument(
        "--module",
        type=arguments.line,
        help="program to run as python -m MODULE (default: recipes.gpt for recipes/gpt/configs/x.yaml)",
    )
    parser.add_argument(
        "--name",
        type=arguments.line,
        help="name of the job (default: the last part of --module, and the last config's name)",
    )
    parser.add_argument("--nodes", type=arguments.integer(), default=1, help="default: %(default)s")
    parser.add_argument(
        "--gpus-per-node",
        type=arguments.integer(0, 1024),
        default=0,
        help="GPUs per node, with one process each (default: none, train on the CPU)",
    )
    parser.add_argument(
        "--tasks-per-node", type=arguments.integer(), help="processes per node (default: --gpus-per-node, or 1)"
    )
    parser.add_argument("--cpus-per-task", type=arguments.integer(), help="cores per process (default: the cluster's)")
    parser.add_argument(
        "--time", type=arguments.line, help="time limit, MINUTES or D-HH:MM:SS (default: the partition's)"
    )
    _add_what_sbatch_takes(parser)
    submit_elsewhere.add_options(parser)
    _add_what_the_processes_get(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the script without writing or submitting it")
    parser.set_defaults(run=run, extra=[])
    arguments.keep_what_follows_two_dashes(parser)


def _add_what_the_processes_get(parser: argparse.ArgumentParser) -> None:
    """Add options of how the processes are started and ended."""
    parser.add_argument(
        "--elastic",
        type=arguments.integer(),
        nargs="?",
        const=1,
        metavar="MIN",
        help="continue on as few as MIN nodes (default: 1) when nodes fail: torchrun starts the processes, and "
        "ElasticTraining is added to the callbacks",
    )
    parser.add_argument(
        "--signal-lead-s",
        type=arguments.integer(most=86400),
        default=120,
        metavar="SECONDS",
        help="time between the signal and the end; must exceed a validation and a save (default: %(default)s)",
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment of every process; repeatable"
    )
    parser.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="bash line at the start of the script; repeatable"
    )


def _add_what_sbatch_takes(parser: argparse.ArgumentParser) -> None:
    """Add options that are written to the script's header unchanged."""
    parser.add_argument("--partition", type=arguments.line)
    parser.add_argument("--account", type=arguments.line)
    parser.add_argument("--qos", type=arguments.line)
    parser.add_argument("--constraint", type=arguments.line, help="features that nodes must have")
    parser.add_argument(
        "--array",
        type=arguments.line,
        metavar="0-7[%2]",
        help="submit independent jobs, distinguished by $SLURM_ARRAY_TASK_ID",
    )
    parser.add_argument(
        "--mail-user", type=arguments.line, metavar="ADDRESS", help="receives mail at end, failure and requeue"
    )


def run(args: argparse.Namespace) -> int:
    """Write and submit the script, and print how to watch the job."""
    from ls_strategy.extras.slurm.script import Job, render

    submit_elsewhere.check_target(args)
    if args.to != "slurm":
        return submit_elsewhere.run(args)
    program = job_program.Program(args)
    script = Path(FOLDER) / f"{program.name}-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    devices = '"$SLURM_NTASKS_PER_NODE"' if args.elastic is None else program.tasks
    job = Job(
        name=program.name,
        command=[sys.executable, "-m", program.module, *program.words],
        raw=['--trainer.num_nodes="$SLURM_JOB_NUM_NODES"', f"--trainer.devices={devices}", *program.version],
        nodes=args.nodes,
        tasks_per_node=program.tasks,
        gpus_per_node=args.gpus_per_node,
        cpus_per_task=args.cpus_per_task,
        time=args.time,
        partition=args.partition,
        account=args.account,
        qos=args.qos,
        constraint=args.constraint,
        array=args.array,
        mail_user=args.mail_user,
        signal_lead_s=args.signal_lead_s,
        elastic=args.elastic,
        setup=args.setup,
        env=program.env,
        python=sys.executable,
        folder=FOLDER,
        script=str(script),
    )
    text = render(job)
    if args.dry_run:
        print(text, end="")
        return 0
    job_id = _write_and_submit(script, text)
    log = f"{FOLDER}/{program.name}-{job_id}{'_*' if args.array else ''}"
    print(f"submitted {script} as job {job_id}\n")
    first = "rank-0.log" if args.elastic is None else "node-0.log"
    _say_how_to_watch(job_id, f"{log}.log {log}/{first}", job_program.log_folder(program.trainer))
    return 0


def _write_and_submit(script: Path, text: str) -> str:
    """Write the script to a new file and submit it; return the job's number.

    Raises:
        StateError: there is no SLURM here.
    """
    if shutil.which("sbatch") is None:
        raise StateError("sbatch is not on the PATH. Submit from a login node of the cluster, or use --dry-run.")
    job_program.write_new(script, text)
    return submit(script)


def _say_how_to_watch(job_id: str, log: str, curves: str | Path) -> None:
    print(f"  state       squeue -j {job_id}")
    print(f"  output      tail -F {log}")
    print(f"  curves      tensorboard --logdir {curves}")
    print(f"  end it      scancel {job_id}")


def submit(script: Path) -> str:
    """Submit the script to SLURM, and return the job's id.

    Raises:
        StateError: sbatch failed; with its message.
    """
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StateError(f"sbatch rejected {script}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip().split(";")[0]  # with several clusters: id;cluster
