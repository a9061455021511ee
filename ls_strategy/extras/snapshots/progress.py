"""The last finished step and the ranks of a run, noted in memory: they tell what a loss cost, and who left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import re
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ls_strategy.distributed.launch import slurm_job
from ls_strategy.errors import ConfigError

_RECORD = struct.Struct("<qd")  # optimizer steps, and seconds since 1970


class Progress:
    """Notes every finished step. A mapped file, because a step must not cost a system call."""

    def __init__(self, folder: Path) -> None:
        """Open the note in ``folder``, or create it. One process per node."""
        path = folder / "progress"
        if not path.exists() or path.stat().st_size != _RECORD.size:
            path.write_bytes(_RECORD.pack(-1, 0.0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)

    def note(self, step: int) -> None:
        """Note that an optimizer step has ended now."""
        _RECORD.pack_into(self._map, 0, step, time.time())

    def close(self) -> None:
        """Close the file."""
        self._map.close()


def last(folder: Path) -> tuple[int, float]:
    """Return the last finished step that was noted, and when; ``(-1, 0.0)`` if there is none."""
    try:
        step, when = _RECORD.unpack((folder / "progress").read_bytes())
    except (OSError, struct.error):
        return -1, 0.0
    return step, when


def note_members(folder: Path, members: list[dict[str, Any]]) -> None:
    """Note the ranks of the run: ``rank``, ``host``, ``node``."""
    new = folder / "members.tmp"
    new.write_text(json.dumps(members))
    new.rename(folder / "members")


def members(folder: Path) -> list[dict[str, Any]]:
    """Return what `note_members` has noted; empty if there is nothing."""
    with contextlib.suppress(OSError, ValueError):
        return list(json.loads((folder / "members").read_text()))
    return []


def change(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
    """Describe which nodes have left and come."""
    old, new = ({each["node"]: each["host"] for each in members} for members in (before, now))
    ranks = {node: [m["rank"] for m in before if m["node"] == node] for node in old}
    lost = [f"{host} (ranks {', '.join(map(str, ranks[node]))})" for node, host in old.items() if node not in new]
    came = [host for node, host in new.items() if node not in old]
    text = f"started again on {len(now)} ranks of {len(new)} nodes, after {len(before)} ranks of {len(old)}"
    text += f"; lost {', '.join(lost)}" if lost else ""
    return text + (f"; new {', '.join(came)}" if came else "")


# --- identify the run that a process belongs to, so that snapshots of another run are never loaded --------------------


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
