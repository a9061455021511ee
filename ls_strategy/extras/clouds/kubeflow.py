"""A TrainJob of Kubeflow Trainer v2, for its runtime of torch.

The runtime's controller starts the container once per node, with torchrun's options in variables (``PET_...``). The
container's first process is torchrun: it gets SIGTERM when Kubernetes takes the node back, and sends it to every rank.
"""

from __future__ import annotations

import re
from typing import Any

from ls_strategy.errors import ConfigError
from ls_strategy.extras.clouds.run import Run, to_yaml

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
"""Of a DNS label, short enough for the names of pods that are made of it."""

_MANAGER = "ls-strategy.io/submit"
_AFTER_SAVING_S = 30  # seconds that torchrun and Kubernetes may take in addition


def render(run: Run, *, runtime: str, path: str) -> str:
    """Return the TrainJob as YAML.

    Args:
        run: what it starts.
        runtime: name of a ClusterTrainingRuntime for torch.
        path: of the file, for its first comment.

    Raises:
        ConfigError: the name is none for Kubernetes.
    """
    if not _NAME.fullmatch(run.name):
        raise ConfigError(
            f"Got --name {run.name!r}, but on Kubernetes a name has up to 42 small letters, digits and dashes, and "
            "begins with a letter. Give another one."
        )
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": run.name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": _trainer(run),
            "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": _patch(run)}],
        },
    }
    comment = f"Written by `ls-strategy submit --to kubeflow`. To start the run: kubectl apply -f {path}"
    return to_yaml(document, comment)


def _trainer(run: Run) -> dict[str, Any]:
    words = run.launch("python")
    if run.setup:
        words = ["bash", "-c", "\n".join(["set -e", *run.setup, 'exec "$@"']), "run", *words]
    trainer: dict[str, Any] = {} if run.image is None else {"image": run.image}
    trainer |= {
        "numNodes": run.nodes,
        "numProcPerNode": run.ranks_per_node,
        "command": [_literal(word) for word in words],
        "env": [{"name": name, "value": _literal(value)} for name, value in run.variables.items()],
    }
    resources: dict[str, Any] = {}
    if run.cpus_per_rank is not None:
        resources["cpu"] = str(run.cpus_per_rank * run.ranks_per_node)
    if run.gpus_per_node:
        resources["nvidia.com/gpu"] = str(run.gpus_per_node)
    if resources:
        trainer["resourcesPerNode"] = {"requests": resources, "limits": dict(resources)}
    return trainer


def _patch(run: Run) -> dict[str, Any]:
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": run.seconds_to_save + _AFTER_SAVING_S}
    if run.storage is not None:
        claim = {"name": "storage", "persistentVolumeClaim": {"claimName": run.storage.source}}
        mount = {"name": "storage", "mountPath": run.storage.path}
        pod |= {"volumes": [claim], "containers": [{"name": "node", "volumeMounts": [mount]}]}
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"template": {"spec": {"replicatedJobs": [job]}}}


def _literal(text: str) -> str:
    """Return what Kubernetes turns into ``text``: it replaces ``$(NAME)``, and ``$$`` by ``$``."""
    return text.replace("$", "$$")
