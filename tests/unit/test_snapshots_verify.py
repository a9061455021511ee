"""Snapshots whose bytes have changed in memory: which copy counts, and when the snapshot before is still there."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ls_strategy.checkpoint import save as save_file
from ls_strategy.checkpoint.manifest import FileRecord, Manifest
from ls_strategy.checkpoint.save import Save
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError
from ls_strategy.extras.snapshots.find import listing
from ls_strategy.extras.snapshots.memory import Memory, name_of
from ls_strategy.extras.snapshots.nodes import Nodes
from ls_strategy.extras.snapshots.verify import newest_whole
from ls_strategy.extras.snapshots.write import InMemory
from tests.unit.test_snapshots import together

OLD, NEW = name_of(5, "0000000a"), name_of(12, "0000000b")
LEFT, RIGHT = "__0_0.distcp", "__1_0.distcp"
PARTS = {LEFT: b"left" * 9, RIGHT: b"right" * 9}


def write(memory: Memory, name: str) -> None:
    """Write a snapshot of which this node has all files, as two nodes have of each other."""
    memory.begin(name)
    records = {}
    for file, data in PARTS.items():
        memory.path(name, file).write_bytes(data)
        cuts = ((0, 7), (7, len(data)))
        records[file] = FileRecord(len(data), [(a, b - a, zlib.crc32(data[a:b])) for a, b in cuts])
    manifest = Manifest(step=5, epoch=0, layout={"world_size": 2}, files=records)
    memory.path(name, MANIFEST).write_text(manifest.to_json())


def flip(path: Path, at: int = 11) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.fixture
def memories(tmp_path: Path) -> list[Memory]:
    made = [Memory(tmp_path / f"node{number}", "run") for number in range(2)]
    for memory in made:
        for name in (OLD, NEW):
            write(memory, name)
    return made


@pytest.fixture
def look(memories: list[Memory]) -> Iterator[Any]:
    """Look for the newest whole snapshot on two nodes of a rank each."""
    nodes: list[Nodes] = together(
        2, lambda rank, exchange: Nodes(memories[rank], rank, "127.0.0.1", exchange, lambda work: work())
    )
    ids = [each.own.id for each in nodes]

    def work(rank: int, exchange: Any) -> Any:
        mine = nodes[rank].own.id, listing(nodes[rank].memory)
        return newest_whole(dict(exchange(mine)), nodes[rank], exchange)

    def looked() -> tuple[Any, list[Any]]:
        first, second = together(2, work)
        assert first == second
        found, left_out = first
        where = {} if found is None else {f: [ids.index(n) for n in having] for f, (_, having) in found.files.items()}
        damage = [(each.name, {ids.index(n): files for n, files in each.files.items()}) for each in left_out]
        return (None if found is None else found.name, where), damage

    yield looked
    for each in nodes:
        each.close()


def test_whole_snapshots_count(look: Any) -> None:
    assert look() == ((NEW, {LEFT: [0, 1], RIGHT: [0, 1], MANIFEST: [0, 1]}), [])


@pytest.mark.parametrize("at", [0, 6, 7, 35])
def test_the_copy_on_another_node_counts(look: Any, memories: list[Memory], at: int) -> None:
    flip(memories[0].path(NEW, LEFT), at)
    assert look() == ((NEW, {LEFT: [1], RIGHT: [0, 1], MANIFEST: [0, 1]}), [(NEW, {0: [LEFT]})])


def test_parts_may_be_whole_on_different_nodes(look: Any, memories: list[Memory]) -> None:
    flip(memories[0].path(NEW, LEFT))
    flip(memories[1].path(NEW, RIGHT))
    assert look() == ((NEW, {LEFT: [1], RIGHT: [0], MANIFEST: [0, 1]}), [(NEW, {0: [LEFT], 1: [RIGHT]})])


def test_a_damaged_manifest_counts_where_it_is_whole(look: Any, memories: list[Memory]) -> None:
    flip(memories[0].path(NEW, MANIFEST))
    assert look() == ((NEW, {LEFT: [0, 1], RIGHT: [0, 1], MANIFEST: [1]}), [])
    flip(memories[0].path(NEW, LEFT))  # compared with the manifest of the other node
    assert look()[1] == [(NEW, {0: [LEFT]})]


def test_without_a_whole_copy_the_snapshot_before_counts(look: Any, memories: list[Memory]) -> None:
    for memory in memories:
        flip(memory.path(NEW, LEFT))
    assert look() == ((OLD, {LEFT: [0, 1], RIGHT: [0, 1], MANIFEST: [0, 1]}), [(NEW, {0: [LEFT], 1: [LEFT]})])


def test_none_counts_if_all_are_damaged(look: Any, memories: list[Memory]) -> None:
    for memory in memories:
        for name in (OLD, NEW):
            flip(memory.path(name, LEFT))
    assert look() == ((None, {}), [(NEW, {0: [LEFT], 1: [LEFT]}), (OLD, {0: [LEFT], 1: [LEFT]})])


def test_a_snapshot_that_is_not_what_was_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path, "run")
    (nodes,) = together(1, lambda rank, exchange: Nodes(memory, rank, "127.0.0.1", exchange, lambda work: work()))

    def snapshot(step: int) -> None:
        manifest = Manifest(step=step, epoch=0, layout={"world_size": 1}, files={})
        work = Save(
            path=str(step), entries=[], random={}, manifest=manifest, target=InMemory(nodes, step),
            write_meta=lambda path: Path(path).write_bytes(b"small"),
        )  # fmt: skip
        save_file.run(work, 0, lambda value: [value])

    plain = save_file.RankFile.close

    def close(self: Any) -> FileRecord:
        record = plain(self)
        (path,) = memory.folder.glob(f"step-000000006.*/{self.name}")
        flip(path)
        return record

    try:
        snapshot(5)
        before = memory.names()
        monkeypatch.setattr(save_file.RankFile, "close", close)
        with pytest.raises(CheckpointError, match="other bytes than were written"):
            snapshot(6)
        assert memory.names() == before
        monkeypatch.undo()
        snapshot(7)
        assert [name[:14] for name in memory.names()] == ["step-000000007"]
    finally:
        nodes.close()
