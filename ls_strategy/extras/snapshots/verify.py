"""Finds the newest snapshot whose files still have the bytes that were written: memory may lose a bit.

::

    all nodes     what each one has, by names and sizes: `find.listing`
    the newest    every node reads its files of this one, and compares checksums
    damaged       that file does not count on that node: a copy on another node does, or the snapshot before
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ls_strategy import device as dev
from ls_strategy.checkpoint.manifest import FileRecord, Manifest
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError
from ls_strategy.extras.snapshots.find import Found, newest
from ls_strategy.extras.snapshots.memory import step_of
from ls_strategy.extras.snapshots.nodes import Nodes

_CHUNK_BYTES = 1 << 22
_THREADS = 8


@dataclass(frozen=True)
class Damage:
    """Files of a snapshot that differ from their checksums."""

    name: str
    files: dict[str, list[str]]  # by the id of the node

    @property
    def step(self) -> int:
        """Optimizer steps of the snapshot."""
        return step_of(self.name)

    def described(self, members: Sequence[Mapping[str, Any]], found: Found | None) -> str:
        """Return a sentence about what was left out.

        Args:
            members: the ranks of the run, as `progress.members` returns them.
            found: the snapshot that counts.
        """
        hosts = {each["node"]: each["host"] for each in members}
        where = "; ".join(f"{', '.join(files)} on {hosts.get(node, node)}" for node, files in self.files.items())
        instead = "copies on other nodes are used" if found and found.name == self.name else "it is left out"
        return (
            f"files of the snapshot of step {self.step} in memory differ from their checksums, so {instead}: {where}. "
            "A node that this names more than once has faulty memory."
        )


def require_written(path: Path, record: FileRecord) -> None:
    """Read a file back.

    Raises:
        CheckpointError: it has other bytes than were written.
    """
    if not _is_whole(path, record):
        raise CheckpointError(f"{path} in memory has other bytes than were written to it; check the node's memory.")


def _is_whole(path: Path, record: FileRecord) -> bool:
    try:
        with path.open("rb") as file:
            for offset, length, expected in record.parts:
                file.seek(offset)
                if _checksum(file, length) != expected:
                    return False
    except OSError:
        return False
    return True


def _checksum(file: Any, length: int) -> int:
    """Return the checksum of the next bytes. Other threads run meanwhile."""
    found = 0
    while length:
        data = file.read(min(length, _CHUNK_BYTES))
        if not data:
            break
        found = zlib.crc32(data, found)
        length -= len(data)
    return found


def newest_whole(
    listings: Mapping[str, Sequence[Mapping[str, Any]]], nodes: Nodes, exchange: Callable[[Any], list[Any]]
) -> tuple[Found | None, list[Damage]]:
    """Return the newest snapshot of which every file is whole on some node, and what was left out. Collective.

    Args:
        listings: the result of `find.listing`, by node; the same on all ranks.
        nodes: of the run.
        exchange: gives every rank's value to all ranks.
    """
    left_out: list[Damage] = []
    found = newest(listings)
    while found is not None:
        wrong = _compare(found, nodes, exchange)
        if not wrong:
            break
        left_out.append(Damage(found.name, wrong))
        listings = {
            node: [_without(each, found.name, wrong.get(node, ())) for each in listings[node]] for node in listings
        }
        before, found = found, newest(listings)
        if found is not None and found.name == before.name:
            break  # its other copies have been compared
    return found, left_out


def _compare(found: Found, nodes: Nodes, exchange: Callable[[Any], list[Any]]) -> dict[str, list[str]]:
    """Return the damaged files of a snapshot, by node. Collective."""
    source = found.files[MANIFEST][1][0]
    manifest: str | None = None
    if nodes.is_lead and nodes.own.id == source:
        try:
            manifest = nodes.memory.path(found.name, MANIFEST).read_text()
        except (OSError, ValueError):
            manifest = ""
    text = next(each for each in exchange(manifest) if each is not None)
    mine = (
        (nodes.own.id, _damaged(found.name, nodes, text, is_source=nodes.own.id == source)) if nodes.is_lead else None
    )
    return {each[0]: each[1] for each in exchange(mine) if each is not None and each[1]}


def _damaged(name: str, nodes: Nodes, text: str, *, is_source: bool) -> list[str]:
    """Return this node's damaged files of a snapshot, whose manifest is ``text``."""
    try:
        records = Manifest.from_json(text).files
    except ValueError:  # since it was listed
        return [MANIFEST] if is_source else []
    here = [file for file in nodes.memory.files(name) if file in records]
    with ThreadPoolExecutor(_THREADS, initializer=dev.selecting()) as pool:
        whole = pool.map(lambda file: _is_whole(nodes.memory.path(name, file), records[file]), here)
        return sorted(file for file, is_whole in zip(here, whole, strict=True) if not is_whole)


def _without(entry: Mapping[str, Any], name: str, files: Sequence[str]) -> Mapping[str, Any]:
    """Return what a node has, without some files of a snapshot."""
    if entry["name"] != name or not files:
        return entry
    wanted = None if MANIFEST in files else entry["wanted"]
    return {**entry, "wanted": wanted, "files": {k: v for k, v in entry["files"].items() if k not in files}}
