"""A task of SkyPilot.

When a cloud announces that it takes a machine back, SkyPilot runs the task's hook there. The hook sends SIGTERM to
torchrun, which sends it to every rank, and waits for its end.
"""

from __future__ import annotations

import shlex
from typing import Any

from ls_strategy.errors import ConfigError
from ls_strategy.extras.clouds.run import Run, to_yaml
from ls_strategy.extras.clouds.torchrun import in_lines

_PORT = 29400
_RESTARTS = 3  # of the job after errors: the nodes that stay also end with one when the ranks have saved


def render(run: Run, *, gpu_type: str | None, spot: bool, path: str) -> str:
    """Return the task as YAML.

    Args:
        run: what it starts.
        gpu_type: SkyPilot's name of the accelerator; needed with GPUs.
        spot: whether machines may be taken back.
        path: of the file, for its first comment.

    Raises:
        ConfigError: there is no type for the GPUs.
    """
    resources: dict[str, Any] = {}
    if run.gpus_per_node:
        if gpu_type is None:
            raise ConfigError(
                f"Got --to skypilot with --gpus-per-node {run.gpus_per_node} without their type. Add --gpu-type, for "
                "example --gpu-type H100; `sky gpus list` has the names."
            )
        resources["accelerators"] = {gpu_type: run.gpus_per_node}
    elif gpu_type is not None:
        raise ConfigError(f"Got --gpu-type {gpu_type} without GPUs. Add --gpus-per-node.")
    if run.cpus_per_rank is not None:
        resources["cpus"] = f"{run.cpus_per_rank * run.ranks_per_node}+"
    if run.image is not None:
        resources["image_id"] = f"docker:{run.image}"
    resources |= {"use_spot": spot, "job_recovery": {"max_restarts_on_errors": _RESTARTS}}
    document: dict[str, Any] = {
        "name": run.name,
        "num_nodes": run.nodes,
        "workdir": ".",
        "resources": resources,
        "envs": run.variables,
    }
    if run.storage is not None:
        document["file_mounts"] = {run.storage.path: {"source": run.storage.source, "mode": "MOUNT"}}
    if run.setup:
        document["setup"] = "\n".join(["set -e", *run.setup, ""])
    document |= {"run": _script(run), "config": {"hooks": [_hook(run)]}}
    comment = f"Written by `ls-strategy submit --to skypilot`. To start the run: sky jobs launch {shlex.quote(path)}"
    return to_yaml(document, comment)


def _script(run: Run) -> str:
    options = [
        f"--nnodes={run.nodes}",
        f"--nproc-per-node={run.ranks_per_node}",
        f"--master-port={_PORT}",
    ]
    raw = ['--node-rank="$SKYPILOT_NODE_RANK"', '--master-addr="$master"']
    words = run.launch("python", *options)
    return "\n".join(
        [
            "set -e",
            "master=${SKYPILOT_NODE_IPS%%$'\\n'*}  # rank 0 is on the first node",
            f"echo $$ > {_pid_file(run)}  # for the hook; exec keeps the number",
            f"exec {in_lines(words, raw)}",
            "",
        ]
    )


def _hook(run: Run) -> dict[str, Any]:
    lines = [
        f"pid=$(cat {_pid_file(run)}) || exit 0",
        'kill -TERM "$pid" || exit 0',
        'while kill -0 "$pid" 2>/dev/null; do sleep 1; done',
        "",
    ]
    return {"run": "\n".join(lines), "events": ["preemption"], "timeout": run.seconds_to_save}


def _pid_file(run: Run) -> str:
    return f"/tmp/ls-strategy-{run.name}.pid"
