"""``ls-strategy submit CONFIG...``: run a recipe on a SLURM cluster; `submit_elsewhere` has the other targets."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ls_strategy.errors import ConfigError, StateError
from ls_strategy.extras.cli import arguments, submit_elsewhere

FOLDER = "slurm"
"""Folder of scripts and logs, in the current folder."""

HANDLER = "ls_strategy.PreemptionHandler"
ELASTIC = "ls_strategy.ElasticTraining"
_VERSIONED = ("TensorBoardLogger", "CSVLogger")


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
    parser.add_argument("--dry-run", action="store_true", help="print the script without writing or submitting it")
    parser.set_defaults(run=run, extra=[])
    keep_what_follows_two_dashes(parser)


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


def keep_what_follows_two_dashes(parser: argparse.ArgumentParser) -> None:
    """Parse the words after ``--``, options for the program, into ``extra``; argparse would take them for configs."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        argv = list(args)
        cut = argv.index("--") if "--" in argv else len(argv)
        namespace, unknown = parse(argv[:cut], namespace)
        namespace.extra = argv[cut + 1 :]
        return namespace, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    """Write and submit the script, and print how to watch the job."""
    from ls_strategy.extras.slurm.script import Job, render

    submit_elsewhere.check_target(args)
    if args.to != "slurm":
        return submit_elsewhere.run(args)
    configs = arguments.yaml_files(args.config)
    module = args.module or infer_module(configs[0])
    name = args.name or f"{module.rsplit('.', 1)[-1]}-{configs[-1].stem}"
    script = Path(FOLDER) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    trainer = trainer_options(configs)
    tasks = args.tasks_per_node or args.gpus_per_node or 1
    follow = accelerator_option(trainer, args.extra, args.gpus_per_node)
    check_geometry(trainer, args.extra, nodes=args.nodes, tasks=tasks)
    check_elastic(args.elastic, configs, args.extra, nodes=args.nodes, tasks=tasks)
    job = Job(
        name=name,
        command=[
            sys.executable, "-m", module, "fit",
            *(f"--config={c}" for c in configs),
            *handler_option(configs, args.extra, HANDLER),
            *(handler_option(configs, args.extra, ELASTIC) if args.elastic else []),
            *args.extra,
            *follow,
        ],
        raw=[
            '--trainer.num_nodes="$SLURM_JOB_NUM_NODES"',
            '--trainer.devices="$SLURM_NTASKS_PER_NODE"' if args.elastic is None else f"--trainer.devices={tasks}",
            *version_option(trainer, args.extra),
        ],
        nodes=args.nodes,
        tasks_per_node=tasks,
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
        env=[variable(text) for text in args.env],
        python=sys.executable,
        folder=FOLDER,
        script=str(script),
    )  # fmt: skip
    text = render(job)
    if args.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise StateError("sbatch is not on the PATH. Submit from a login node of the cluster, or use --dry-run.")
    write_new(script, text)
    job_id = submit(script)
    log = f"{FOLDER}/{name}-{job_id}_*" if args.array else f"{FOLDER}/{name}-{job_id}"
    print(f"submitted {script} as job {job_id}\n")
    first = "rank-0.log" if args.elastic is None else "node-0.log"
    _say_how_to_watch(job_id, f"{log}.log {log}/{first}", log_folder(trainer))
    return 0


def write_new(path: Path, text: str) -> None:
    """Write the file of a job, which may not exist: a job that is waiting could get another one's command.

    Raises:
        StateError: it exists.
    """
    path.parent.mkdir(exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise StateError(
            f"{path} exists: another job of this name was made in this second. Repeat the command, or give --name."
        ) from None


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


def infer_module(config: Path) -> str:
    """Return ``recipes.gpt`` for ``recipes/gpt/configs/x.yaml``.

    Raises:
        ConfigError: no folder above the file is a program.
    """
    for folder in config.parents:
        if (folder / "__main__.py").is_file() and not folder.is_absolute():
            return ".".join(folder.parts)
        if folder.is_absolute() and (folder / "__main__.py").is_file() and folder.is_relative_to(Path.cwd()):
            return ".".join(folder.relative_to(Path.cwd()).parts)
    raise ConfigError(f"Got {config}, but no folder above it has a __main__.py. Set --module package.program.")


def trainer_options(configs: Sequence[Path]) -> dict[str, Any]:
    """Return the ``trainer`` sections of the files; later files override earlier ones.

    Raises:
        ConfigError: a file is not valid YAML, or its section is not a mapping.
    """
    result: dict[str, Any] = {}
    for config in configs:
        result |= arguments.read_section(config, "trainer")
    return result


def handler_option(configs: Sequence[Path], extra: Sequence[str], callback: str) -> list[str]:
    """Return the option that adds a callback, unless it is configured already."""
    return [] if _is_named(callback.rsplit(".", 1)[-1], configs, extra) else [f"--trainer.callbacks+={callback}"]


def _is_named(name: str, configs: Sequence[Path], extra: Sequence[str]) -> bool:
    return any(name in text for text in (*extra, *(c.read_text(encoding="utf-8") for c in configs)))


def check_elastic(least: int | None, configs: Sequence[Path], extra: Sequence[str], *, nodes: int, tasks: int) -> None:
    """Reject a job that may continue on fewer nodes, and would train on other batches there.

    Raises:
        ConfigError: with the option to add.
    """
    if least is not None and least < nodes and not _is_named("virtual_ranks", configs, extra):
        raise ConfigError(
            f"Got --elastic {least} for {nodes} nodes without virtual ranks, but on fewer nodes the run would train on "
            f"other batches. Add `-- --trainer.strategy.init_args.parallel.virtual_ranks={nodes * tasks}`, or set "
            f"--elastic {nodes} to wait for as many nodes."
        )


def given(option: str, trainer: dict[str, Any], extra: Sequence[str]) -> tuple[Any, bool]:
    """Return what the program will use for ``trainer.<option>``, and whether its command line sets it."""
    import yaml

    value, explicit = trainer.get(option), False
    argv = list(extra)
    for i, word in enumerate(argv):
        name, equals, text = word.partition("=")
        if name != f"--trainer.{option}":
            continue
        text = text if equals else (argv[i + 1] if i + 1 < len(argv) else "")
        value, explicit = yaml.safe_load(text), True
    return value, explicit


def accelerator_option(trainer: dict[str, Any], extra: Sequence[str], gpus_per_node: int) -> list[str]:
    """Return the option that sets the accelerator to the job's.

    Raises:
        ConfigError: the command line asks for the CPU in a job with GPUs, or the files for a GPU in a job without.
    """
    value, explicit = given("accelerator", trainer, extra)
    on_cpu, on_gpu = str(value).lower() == "cpu", str(value).lower() in ("gpu", "cuda")
    if gpus_per_node and on_cpu and explicit:
        raise ConfigError(
            f"Got --gpus-per-node {gpus_per_node} and --trainer.accelerator=cpu, so the GPUs would be idle. Omit one "
            "of the two."
        )
    if not gpus_per_node and on_gpu and not explicit:
        raise ConfigError(
            f"Got trainer.accelerator={value} in the configuration and no --gpus-per-node, so the job would have no "
            "GPUs. Set --gpus-per-node N; or, if jobs get all GPUs of a node, `-- --trainer.accelerator=gpu`."
        )
    return ["--trainer.accelerator=gpu"] if gpus_per_node and not on_gpu else []


def check_geometry(trainer: dict[str, Any], extra: Sequence[str], *, nodes: int, tasks: int) -> None:
    """Reject a number of nodes or devices on the command line that differs from the job's; note one in the files.

    Raises:
        ConfigError: the command line contradicts the job.
    """
    for option, flag, number in (("num_nodes", "--nodes", nodes), ("devices", "--tasks-per-node", tasks)):
        value, explicit = given(option, trainer, extra)
        if value in (None, "auto", -1, number, str(number)):
            continue
        if explicit:
            raise ConfigError(
                f"Got --trainer.{option}={value} and a job with {flag} {number}, but the Trainer uses the job's value. "
                f"Set {flag} {value}, or omit --trainer.{option}."
            )
        print(
            f"note: the configuration has trainer.{option}={value}; the Trainer uses the job's {flag} {number}.",
            file=sys.stderr,
        )


def version_option(trainer: dict[str, Any], extra: Sequence[str]) -> list[str]:
    """Return the option that names the log folder by the job, so that a requeued job continues in it."""
    logger = trainer.get("logger")
    if not isinstance(logger, dict) or any(
        word.startswith("--trainer.logger") and "save_dir" not in word for word in extra
    ):
        return []
    known = str(logger.get("class_path", "")).rsplit(".", 1)[-1] in _VERSIONED
    fixed = "version" in (logger.get("init_args") or {})
    return ['--trainer.logger.init_args.version="job_$job"'] if known and not fixed else []


def log_folder(trainer: dict[str, Any]) -> str:
    """Return the folder of TensorBoard's logs."""
    logger = trainer.get("logger")
    named = (logger.get("init_args") or {}).get("save_dir") if isinstance(logger, dict) else None
    return str(named or f"{trainer.get('default_root_dir', '.')}/lightning_logs")


def variable(text: str) -> tuple[str, str]:
    """Return the name and the value of ``NAME=VALUE``.

    Raises:
        ConfigError: there is no value.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"Got --env {text}, but it must be NAME=VALUE.")
    return name, value
