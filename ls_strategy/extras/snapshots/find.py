"""Finds the newest snapshot of which every part is in the memory of a node that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ls_strategy.checkpoint.manifest import Manifest
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.extras.snapshots.memory import Memory, age_of, step_of


@dataclass(frozen=True)
class Found:
    """A complete snapshot."""

    name: str
    world_size: int
    files: dict[str, tuple[int, list[str]]]  # bytes, and the ids of the nodes that have the file, by name

    @property
    def step(self) -> int:
        """Optimizer steps."""
        return step_of(self.name)


def listing(memory: Memory) -> list[dict[str, Any]]:
    """Return what one node has: names, files, and what each manifest demands. Torn manifests do not count."""
    found: list[dict[str, Any]] = []
    for name in memory.names():
        files = memory.files(name)
        try:
            manifest = Manifest.from_json(memory.path(name, MANIFEST).read_text())
            wanted = {file: record.bytes for file, record in manifest.files.items()}
            size = int(manifest.layout.get("world_size", 1))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            wanted, size = None, 0
            files.pop(MANIFEST, None)  # another node may have a good one
        found.append({"name": name, "files": files, "wanted": wanted, "world_size": size})
    return found


def newest(listings: Mapping[str, Sequence[Mapping[str, Any]]]) -> Found | None:
    """Return the newest snapshot that is complete over all nodes, or None.

    Args:
        listings: the result of `listing`, by node.
    """
    manifests: dict[str, tuple[Mapping[str, int], int, int]] = {}
    for entries in listings.values():
        for entry in entries:
            if entry["wanted"] is not None and entry["name"] not in manifests:
                manifests[entry["name"]] = entry["wanted"], entry["files"][MANIFEST], entry["world_size"]
    for name in sorted(manifests, key=age_of, reverse=True):
        wanted, manifest_bytes, world_size = manifests[name]
        places: dict[str, tuple[int, list[str]]] = {}
        for file, size in {**wanted, MANIFEST: manifest_bytes}.items():
            having = [
                node
                for node, entries in listings.items()
                for entry in entries
                if entry["name"] == name and entry["files"].get(file) == size
            ]
            places[file] = size, having
        if all(having for _, having in places.values()):
            return Found(name, world_size, places)
    return None
