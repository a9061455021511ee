"""Write a snapshot into the memory of the rank's node, and a copy into that of its buddy.

::

    every rank    its file into its node's memory, reads it back, then a copy to the buddy
    rank 0        index, small data and manifest, into every node's memory; the manifest last
    every node    removes the snapshot before

A node that is lost at any moment leaves either the previous snapshot complete, or this one. The previous one is removed
only when every rank has read its file of this one back.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from typing_extensions import override

from ls_strategy.checkpoint.manifest import FileRecord, Manifest
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.save import SaveTarget
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.extras.snapshots.memory import name_of
from ls_strategy.extras.snapshots.nodes import Nodes
from ls_strategy.extras.snapshots.verify import require_written


class InMemory(SaveTarget):
    """The target of one snapshot."""

    def __init__(self, nodes: Nodes, step: int) -> None:
        """``step``: the optimizer steps so far."""
        self._nodes, self._step = nodes, step

    def _name(self, save_id: str) -> str:
        return name_of(self._step, save_id)

    @override
    def begin(self, path: str, save_id: str) -> AbstractContextManager[object]:
        return nullcontext()

    @override
    def folder(self, path: str, save_id: str) -> CheckpointPath:
        self._nodes.memory.begin(self._name(save_id))
        return CheckpointPath(self._nodes.memory.path(self._name(save_id)))

    @override
    def written(self, path: str, save_id: str, file: str, record: FileRecord) -> None:
        name, buddy = self._name(save_id), self._nodes.buddy
        require_written(self._nodes.memory.path(name, file), record)
        if buddy is not None:
            buddy.put(name, self._nodes.memory.path(name, file))

    @override
    def commit(self, path: str, save_id: str, manifest: Manifest) -> None:
        name, memory = self._name(save_id), self._nodes.memory
        manifest.saved_at = time.time()
        small = [file for file in manifest.files if not file.endswith(".distcp")]
        for file in small:
            require_written(memory.path(name, file), manifest.files[file])
        new = memory.path(name, f"{MANIFEST}.tmp")
        new.write_text(manifest.to_json())
        new.rename(memory.path(name, MANIFEST))
        for file in (*small, MANIFEST):
            for peer in self._nodes.others:
                peer.put(name, memory.path(name, file))

    @override
    def ended(self, path: str, save_id: str, rank: int, *, failed: bool) -> None:
        if not self._nodes.is_lead:
            return
        if failed:
            self._nodes.memory.remove(self._name(save_id))
        else:
            self._nodes.memory.keep(self._name(save_id))
