"""Identify the run that a process belongs to, so that snapshots of another run are never loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from ls_strategy.distributed.launch import slurm_job
from ls_strategy.errors import ConfigError


def run_name(given: str | None, environ: Mapping[str, str], folder: str) -> str:
    """Return a name that all processes of a run have in common, also those that are started after a loss.

    It is, in this order: the name that the user gave; the SLURM job, which keeps its number when it is requeued; the
    ``--rdzv-id`` of ``torchrun``. A program that no launcher restarts is known by its folder.

    Args:
        given: of the user.
        environ: of this process.
        folder: the Trainer's ``default_root_dir``; runs of one launcher that write to different folders are different.

    Raises:
        ConfigError: ``given`` is empty.
    """
    if given is not None and not given.strip():
        raise ConfigError(f"Got ElasticTraining(run={given!r}), but a run needs a name. Give one, or leave it out.")
    launched = slurm_job.job_id(environ) or environ.get("TORCHELASTIC_RUN_ID")
    name = given or launched or "local"
    parts = (name,) if given else (name, folder)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)[:40]}-{digest}"


def agent_store_is_shared(environ: Mapping[str, str]) -> bool:
    """Return whether ranks meet through a store of ``torchrun`` that keeps the addresses of processes that have ended.

    The store of the dynamic rendezvous lives as long as its agent. Its keys are separated by the number of restarts,
    which a change of members does not raise, and which each agent counts for itself.
    """
    dynamic = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "TORCHELASTIC_RUN_ID" in environ
    alone = environ.get("TORCHELASTIC_RUN_ID") == "none"  # the static rendezvous on one node, which counts correctly
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return dynamic and restarts and not alone and environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"
