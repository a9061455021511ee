"""The last finished step and the ranks of a run, noted in memory: they tell what a loss cost, and who left."""

from __future__ import annotations

import contextlib
import json
import mmap
import struct
import time
from pathlib import Path
from typing import Any

_RECORD = struct.Struct("<qd")
"""Optimizer steps, and seconds since 1970."""


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
