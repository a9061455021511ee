"""``ls-strategy submit --to``: the file of a job for Kubeflow Trainer, SkyPilot or torchrun."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments, job_program

TARGETS = ("slurm", "kubeflow", "skypilot", "torchrun")

_ONLY_SLURM = ("time", "partition", "account", "qos", "constraint", "array", "mail_user")
_ONLY: dict[str, tuple[str, ...]] = {
    "image": ("kubeflow", "skypilot"),
    "storage": ("kubeflow", "skypilot"),
    "runtime": ("kubeflow",),
    "gpu_type": ("skypilot",),
    "spot": ("skypilot",),
    "endpoint": ("torchrun",),
}
"""Options with the targets that have them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--to`` and what only other targets than SLURM take."""
    parser.add_argument(
        "--to",
        choices=TARGETS,
        default="slurm",
        help="slurm submits the job; for the others the file of the job is written, and the command that starts it is "
        "printed (default: %(default)s)",
    )
    parser.add_argument("--image", type=arguments.line, help="container image (kubeflow, skypilot)")
    parser.add_argument(
        "--storage",
        type=arguments.line,
        metavar="SOURCE:/path",
        help="what outlives the machines, and where the processes see it: a volume claim (kubeflow), the address of a "
        "bucket (skypilot). The Trainer's default_root_dir is set to a folder in it",
    )
    parser.add_argument(
        "--runtime", type=arguments.line, help="training runtime (kubeflow; torch-distributed unless given)"
    )
    parser.add_argument("--gpu-type", type=arguments.line, metavar="NAME", help="such as H100 (skypilot)")
    parser.add_argument("--spot", action="store_true", help="use machines that may be taken back (skypilot)")
    parser.add_argument(
        "--endpoint", type=arguments.line, metavar="HOST:PORT", help="where nodes meet, on one of them (torchrun)"
    )


def check_target(args: argparse.Namespace) -> None:
    """Refuse options that the target does not have.

    Raises:
        ConfigError: with the targets that have it.
    """
    wrong = {name: ("slurm",) for name in _ONLY_SLURM} if args.to != "slurm" else {}
    wrong |= {name: targets for name, targets in _ONLY.items() if args.to not in targets}
    for name, targets in wrong.items():
        if getattr(args, name):
            raise ConfigError(
                f"Got --{name.replace('_', '-')} with --to {args.to}, but it is for --to {' and '.join(targets)}. "
                "Omit it."
            )
    if args.elastic is not None and args.to in ("kubeflow", "skypilot"):
        raise ConfigError(
            f"Got --elastic with --to {args.to}, which restarts a job on as many nodes as before. Omit it: the job "
            "continues from what PreemptionHandler saved. --to slurm and --to torchrun continue on fewer nodes."
        )


def run(args: argparse.Namespace) -> int:
    """Write the file of the job and print how to start it."""
    program = job_program.Program(args)
    module, name = program.module, program.name
    if args.name is None and args.to == "kubeflow":
        name = name.lower().replace("_", "-").replace(".", "-")
    path = Path(args.to) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.{'sh' if args.to == 'torchrun' else 'yaml'}"
    text = _render(args, program, name, str(path))
    if args.to == "kubeflow" and args.image is None:
        print(
            "note: no --image is given, so Kubernetes uses the image of the runtime. It has torch, but neither your "
            f"program ({module}) nor ls_strategy unless you put them there. Give --image registry/name:tag.",
            file=sys.stderr,
        )
    if args.dry_run:
        print(text, end="")
        return 0
    job_program.write_new(path, text)
    print(f"wrote {path}\n")
    for what, command in _next_steps(args, name, shlex.quote(str(path))).items():
        print(f"  {what:<11} {command}")
    return 0


def _render(args: argparse.Namespace, program: job_program.Program, name: str, path: str) -> str:
    from ls_strategy.extras.clouds import kubeflow, skypilot, torchrun
    from ls_strategy.extras.clouds.run import Run, Storage

    if args.to != "torchrun":
        _check_paths(program.configs, args.to)
    storage = None if args.storage is None else Storage.parse(args.storage)
    job = Run(
        name=name,
        module=program.module,
        arguments=[
            *program.words,
            f"--trainer.num_nodes={args.nodes}",
            f"--trainer.devices={program.tasks}",
            *_root_option(args, program.trainer, name, storage),
            *(option.replace('"job_$job"', name) for option in program.version),
        ],
        nodes=args.nodes,
        ranks_per_node=program.tasks,
        gpus_per_node=args.gpus_per_node,
        cpus_per_rank=args.cpus_per_task,
        env=program.env,
        setup=args.setup,
        seconds_to_save=args.signal_lead_s,
        storage=storage,
        image=args.image,
    )
    if args.to == "kubeflow":
        return kubeflow.render(job, runtime=args.runtime or "torch-distributed", path=path)
    if args.to == "skypilot":
        return skypilot.render(job, gpu_type=args.gpu_type, spot=args.spot, path=path)
    return torchrun.render(job, python=sys.executable, endpoint=args.endpoint, elastic=args.elastic, path=path)


def _check_paths(configs: Sequence[Path], to: str) -> None:
    for config in configs:
        if config.is_absolute() or ".." in config.parts:
            raise ConfigError(
                f"Got {str(config)!r} with --to {to}, but the job runs on other machines, in a copy of the current "
                "folder. Give a path inside it."
            )


def _root_option(args: argparse.Namespace, trainer: dict[str, Any], name: str, storage: Any) -> list[str]:
    """Return the option that puts checkpoints and logs where they outlive the machines."""
    value, _ = job_program.given("default_root_dir", trainer, args.extra)
    if storage is None:
        if value is None and args.to != "torchrun":
            print(
                "note: checkpoints are written to the machine's own disk and are lost with it. Add --storage, or set "
                "trainer.default_root_dir to a folder that lasts.",
                file=sys.stderr,
            )
        return []
    if value is not None and not str(value).startswith(storage.path):
        print(
            f"note: trainer.default_root_dir={value} is not in --storage {args.storage}; checkpoints go where "
            "the Trainer has them.",
            file=sys.stderr,
        )
    return [] if value is not None else [f"--trainer.default_root_dir={storage.path.rstrip('/')}/{name}"]


def _next_steps(args: argparse.Namespace, name: str, path: str) -> dict[str, str]:
    if args.to == "kubeflow":
        return {
            "start it": f"kubectl apply -f {path}",
            "state": f"kubectl get trainjob {name}",
            "output": f"kubectl logs -f --prefix -l jobset.sigs.k8s.io/jobset-name={name}",
            "end it": f"kubectl delete trainjob {name}",
        }
    if args.to == "skypilot":
        return {
            "start it": f"sky jobs launch {path}",
            "state": "sky jobs queue",
            "output": f"sky jobs logs --name {name}",
            "end it": f"sky jobs cancel --name {name}",
        }
    where = "" if args.nodes == 1 else f"  (on each of {args.nodes} nodes)"
    return {"start it": f"bash {path}{where}"}
