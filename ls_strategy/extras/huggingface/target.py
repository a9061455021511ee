"""A save of weights that ends as a folder for ``from_pretrained``.

::

    every rank    its part of the weights, into .NAME.weights.3f2a.partial/, as in a checkpoint folder
    rank 0        the folder for from_pretrained beside it, portion by portion; then it gets its name
    rank 0        removes the parts

No rank needs memory for more than a few portions of a tensor. A process that is killed leaves the folder as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from typing_extensions import override

from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.files import Reader
from ls_strategy.checkpoint.manifest import Manifest
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.reshard import SavedTensor
from ls_strategy.checkpoint.safetensors import write_safetensors
from ls_strategy.checkpoint.save import SaveTarget
from ls_strategy.extras.huggingface.contents import FolderContents


class FolderTarget(SaveTarget):
    """The target of one export."""

    def __init__(self, contents: FolderContents | None, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Remember what to write.

        Args:
            contents: of the folder. None on the ranks that do not write it.
            before: called before the folder gets its name, on rank 0.
            after: called when it has it.
        """
        self._contents, self._before, self._after = contents, before, after

    @override
    def begin(self, path: str, save_id: str) -> AbstractContextManager[object]:
        return commit.begin(_parts_of(path), save_id)

    @override
    def folder(self, path: str, save_id: str) -> CheckpointPath:
        return commit.staging(_parts_of(path), save_id)

    @override
    def commit(self, path: str, save_id: str, manifest: Manifest) -> None:
        contents = self._contents
        assert contents is not None
        reader = Reader(str(self.folder(path, save_id)), manifest)
        for saved in reader.under("model"):
            if reader.tensor_metadata(saved) is not None:
                contents.values[".".join(saved[1:])] = SavedTensor(reader, saved)
        self._before()
        write_safetensors(
            Path(path), contents.weights, files=contents.files, max_shard_bytes=contents.max_shard_bytes, force=True
        )
        self._after()

    @override
    def ended(self, path: str, save_id: str, rank: int, *, failed: bool) -> None:
        if rank == 0:
            commit.discard(_parts_of(path), save_id)


def _parts_of(path: str) -> str:
    """Return the name of the checkpoint that never gets it: its folder stays a hidden one."""
    place = Path(path)
    return str(place.with_name(f"{place.name}.weights"))
