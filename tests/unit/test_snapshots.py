"""Snapshots in the memory of nodes: which counts, who may read it, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.checkpoint.manifest import FileRecord, Manifest, read_manifest
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.errors import CheckpointError, ConfigError, StateError
from ls_strategy.extras.callbacks.elastic import ElasticTraining, _run_of
from ls_strategy.extras.snapshots import memory as memory_module
from ls_strategy.extras.snapshots import progress
from ls_strategy.extras.snapshots.find import listing, newest
from ls_strategy.extras.snapshots.memory import Memory, name_of, node_id, root, step_of
from ls_strategy.extras.snapshots.nodes import Nodes
from ls_strategy.extras.snapshots.progress import agent_store_is_shared, run_name
from ls_strategy.extras.snapshots.remote import close_snapshots, open_snapshot
from ls_strategy.extras.snapshots.server import Peer, Server, addresses
from tests.limits import wall
from tests.pickles import MakesFolder

A, B = name_of(5, "0000000a"), name_of(12, "0000000b")


def write(memory: Memory, name: str, files: dict[str, bytes], *, complete: dict[str, bytes] | None = None) -> None:
    """Write files of a snapshot and, with ``complete``, a manifest that demands those."""
    memory.begin(name)
    for file, data in files.items():
        memory.path(name, file).write_bytes(data)
    if complete is not None:
        records = {file: FileRecord(len(data), [(0, len(data), 0)]) for file, data in complete.items()}
        manifest = Manifest(step=step_of(name), epoch=0, layout={"world_size": 2}, files=records)
        memory.path(name, "manifest.json").write_text(manifest.to_json())


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "node0", "run")


@pytest.fixture
def other(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "node1", "run")


@contextlib.contextmanager
def serving(memory: Memory) -> Iterator[Peer]:
    server = Server(memory, "secret")
    try:
        yield Peer(["127.0.0.1"], server.port, "secret")
    finally:
        server.close()


# --- which snapshot counts --------------------------------------------------------------------------------------------


def test_the_newest_complete_snapshot_counts(memory: Memory, other: Memory):
    parts = {"__0_0.distcp": b"left", "__1_0.distcp": b"right"}
    write(memory, A, parts, complete=parts)
    write(memory, B, {"__0_0.distcp": b"left"}, complete=parts)
    found = newest({"n0": listing(memory), "n1": listing(other)})
    assert found is not None
    assert found.name == A  # the newer one lacks a file
    write(other, B, {"__1_0.distcp": b"right"})
    found = newest({"n0": listing(memory), "n1": listing(other)})
    assert found is not None
    assert (found.name, found.step, found.world_size) == (B, 12, 2)
    assert found.files["__1_0.distcp"] == (5, ["n1"])


def test_steps_are_compared_as_numbers(memory: Memory):
    parts, names = {"__0_0.distcp": b"x"}, [name_of(999_999_999, "0000000a"), name_of(10**10, "0000000b")]
    for name in names:
        write(memory, name, parts, complete=parts)
    assert memory.names() == names
    found = newest({"n0": listing(memory)})
    assert found is not None
    assert found.step == 10**10


@pytest.mark.parametrize("damage", ["manifest", "size", "no manifest"])
def test_a_torn_snapshot_does_not_count(damage: str, memory: Memory):
    parts = {"__0_0.distcp": b"left"}
    write(memory, A, parts, complete=parts)
    manifest = memory.path(A, "manifest.json")
    if damage == "manifest":
        manifest.write_text(manifest.read_text().replace('"epoch": 0', '"epoch": 1'))
    elif damage == "size":
        memory.path(A, "__0_0.distcp").write_bytes(b"le")
    else:
        manifest.unlink()
    assert newest({"n0": listing(memory)}) is None


def test_only_the_newest_snapshot_is_kept(memory: Memory):
    for name in (A, B):
        write(memory, name, {"__0_0.distcp": b"x"}, complete={"__0_0.distcp": b"x"})
    memory.keep(B)
    assert memory.names() == [B]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step-1.0000000a", "../run", "step-000000001.0000000a/..", ""])
def test_names_cannot_lead_elsewhere(name: str, memory: Memory):
    with pytest.raises(ValueError, match="is not the name of a snapshot"):
        memory.path(name)


@pytest.mark.parametrize("file", ["..", ".", "../x", "a/b", "a b"])
def test_files_cannot_lead_elsewhere(file: str, memory: Memory):
    with pytest.raises(ValueError, match="is not the name of a file"):
        memory.path(A, file)


def test_two_runs_with_one_name_are_refused(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_module, "_LOCK_S", 0.3)
    memory.claim()
    second = Memory(tmp_path / "node0", "run")
    with pytest.raises(StateError, match=r"another run uses the snapshots .* ElasticTraining\(run=...\)"):
        second.claim()
    memory.release()
    second.claim()
    second.release()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    with pytest.raises(StateError, match="belongs to another user"):
        Memory(tmp_path, "run")


def test_memory_is_private(memory: Memory):
    memory.begin(A)
    for folder in (memory.folder, memory.path(A)):
        assert folder.stat().st_mode & 0o077 == 0


def age(folder: Path, days: int) -> None:
    """Make everything in ``folder`` as old as ``days``."""
    when = time.time() - days * 24 * 3600
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (when, when), follow_symlinks=False)


def test_memory_of_runs_that_ended_long_ago_is_freed(memory: Memory):
    old, young = (Memory(memory.folder.parent, name) for name in ("old", "young"))
    for run in (old, young):
        write(run, A, {"__0_0.distcp": b"x"}, complete={"__0_0.distcp": b"x"})
        (run.folder / "progress").write_bytes(b"x")
    age(old.folder, 8)
    age(young.folder, 1)
    memory.free_unused()
    assert not old.folder.exists()
    assert young.names() == [A]
    assert memory.folder.exists()


def test_memory_of_a_run_that_stands_still_is_kept(memory: Memory):
    stopped = Memory(memory.folder.parent, "stopped")
    stopped.claim()
    age(stopped.folder, 8)
    memory.free_unused()
    assert stopped.folder.exists()


def test_folders_of_others_are_never_removed(memory: Memory, tmp_path: Path):
    thesis = memory.folder.parent / "thesis"  # beside the runs, as in a home that was named as memory
    thesis.mkdir()
    (thesis / "precious").touch()
    elsewhere = Memory(tmp_path / "elsewhere", "run").folder
    (memory.folder.parent / "link").symlink_to(elsewhere)
    for folder in (thesis, elsewhere, memory.folder.parent / "link"):
        age(folder, 8)
    memory.free_unused()
    assert (thesis / "precious").exists()
    assert elsewhere.exists()
    assert (memory.folder.parent / "link").is_symlink()


def test_what_others_put_into_the_folder_of_a_run_stays(memory: Memory, tmp_path: Path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (memory.folder / "notes").touch()
    (memory.folder / A).symlink_to(precious)
    write(memory, B, {"__0_0.distcp": b"x"})
    memory.clear()
    assert sorted(p.name for p in memory.folder.iterdir()) == [memory_module.MARK, "notes", A]
    assert (precious / "file").exists()


def test_a_snapshot_that_is_a_link_is_not_followed(memory: Memory, tmp_path: Path):
    (tmp_path / "manifest.json").touch()
    (memory.folder / A).symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is a link"):
        memory.remove(A)
    assert memory.names() == []
    memory.keep("")
    assert (tmp_path / "manifest.json").exists()


def test_a_folder_with_other_files_becomes_no_memory(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis").touch()
    with pytest.raises(StateError, match=r"has files, but no ls_strategy-snapshots .* Set LS_STRATEGY_MEMORY"):
        Memory(tmp_path, "run")


def test_a_link_in_the_place_of_the_memory_is_refused(tmp_path: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    with pytest.raises(StateError, match="is a link or a file"):
        Memory(tmp_path / "link", "run")
    named = Memory(root({"LS_STRATEGY_MEMORY": str(tmp_path / "link")}), "run")  # the user's own link
    assert named.folder == tmp_path / "home" / "run"


def test_an_empty_name_is_no_memory():
    with pytest.raises(ConfigError, match="Got memory='', which names no folder"):
        ElasticTraining(memory="")


class Notes:
    """An object of the user in a checkpoint, whose state is set by code."""

    built = 0

    def __setstate__(self, state):
        Notes.built += 1


def test_looking_up_the_run_of_a_checkpoint_builds_none_of_its_objects(tmp_path: Path):
    notes = Notes()
    notes.text = "x"
    torch.save({"hyper_parameters": notes, "callbacks": {"key": {"run": "mine"}}}, tmp_path / "c.ckpt")
    assert _run_of(str(tmp_path / "c.ckpt"), "key") == "mine"
    assert not Notes.built


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_runs_a_command_is_not_continued_from(tmp_path: Path, zipped: bool):
    saved = {"x": MakesFolder(tmp_path / "ran"), "callbacks": {"key": {"run": "mine"}}}
    torch.save(saved, tmp_path / "c.ckpt", _use_new_zipfile_serialization=zipped)
    with pytest.warns(UserWarning, match="is not continued from"):
        assert _run_of(str(tmp_path / "c.ckpt"), "key") is None
    assert not (tmp_path / "ran").exists()


def test_the_variable_names_the_memory(tmp_path: Path):
    assert root({"LS_STRATEGY_MEMORY": str(tmp_path)}) == tmp_path
    assert node_id(tmp_path / "a") != node_id(tmp_path / "b")


# --- identity --------------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_name():
    torchrun = {"TORCHELASTIC_RUN_ID": "job"}
    assert run_name(None, torchrun, "/a") == run_name(None, {**torchrun, "RANK": "3"}, "/a")
    assert run_name(None, torchrun, "/a") != run_name(None, torchrun, "/b")
    assert run_name("x", torchrun, "/a") == run_name("x", {}, "/b")
    assert run_name(None, {"SLURM_JOB_ID": "7", **torchrun}, "/a").startswith("7-")
    assert "/" not in run_name("a/../b", {}, "/a")
    with pytest.raises(ConfigError, match="needs a name"):
        run_name(" ", {}, "/a")


@pytest.mark.parametrize(
    ("environ", "shared"),
    [
        ({}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        (
            {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_MAX_RESTARTS": "3",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            False,
        ),
        (
            {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_MAX_RESTARTS": "3",
                "TORCHELASTIC_RUN_ID": "none",
            },
            False,
        ),
    ],
)
def test_a_store_with_old_addresses_is_recognised(environ: dict[str, str], shared: bool):
    environ = {"TORCHELASTIC_RUN_ID": "job", **environ} if environ else {}
    assert agent_store_is_shared(environ) is shared


# --- other nodes -----------------------------------------------------------------------------------------------------


def test_files_are_read_and_copied_between_nodes(memory: Memory, other: Memory):
    data = os.urandom(3 << 20)
    write(memory, A, {"__0_0.distcp": data, "empty": b""})
    with serving(memory) as peer, serving(other) as buddy:
        peer.hello()
        assert peer.read(A, "__0_0.distcp", 0, len(data)) == data
        assert peer.read(A, "__0_0.distcp", 1 << 20, 10) == data[1 << 20 : (1 << 20) + 10]
        for file in ("__0_0.distcp", "empty"):
            buddy.put(A, memory.path(A, file))
    assert other.files(A) == {"__0_0.distcp": len(data), "empty": 0}
    assert other.path(A, "__0_0.distcp").read_bytes() == data


def test_a_stranger_gets_nothing(memory: Memory):
    write(memory, A, {"__0_0.distcp": b"weights"})
    server = Server(memory, "secret")
    try:
        with pytest.raises(CheckpointError):
            Peer(["127.0.0.1"], server.port, "guess").read(A, "__0_0.distcp", 0, 7)
        for line in (b"not json\n", b"{}\n", b'{"secret": "secret", "what": "read", "name": "../..", "file": "x"}\n'):
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
                connection.sendall(line)
                assert b"weights" not in connection.recv(1000)
        Peer(["127.0.0.1"], server.port, "secret").hello()  # it still answers
    finally:
        server.close()


def test_a_lost_node_is_an_error_soon(memory: Memory):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="cannot be reached"):
        Peer(["127.0.0.1"], port, "secret").read(A, "x", 0, 1)
    assert time.monotonic() - start < wall(20)


def test_a_missing_file_is_an_error(memory: Memory):
    with serving(memory) as peer, pytest.raises(CheckpointError, match="FileNotFoundError"):
        peer.read(A, "__0_0.distcp", 0, 1)


def test_a_node_knows_its_addresses():
    assert addresses("127.0.0.1")[0] == "127.0.0.1"
    assert addresses("no.such.host.invalid")


def together(ranks: int, work: Any) -> list[Any]:
    """Run ``work(rank, exchange)`` on threads; ``exchange`` gives every rank's value to all."""
    barrier, values, results, errors = threading.Barrier(ranks, timeout=20), [None] * ranks, [None] * ranks, []

    def run(rank: int) -> None:
        def exchange(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        try:
            results[rank] = work(rank, exchange)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    return results


def test_a_snapshot_on_several_nodes_is_one_folder(memory: Memory, other: Memory):
    parts = {"__0_0.distcp": b"left", "__1_0.distcp": b"right"}
    write(memory, B, {"__0_0.distcp": b"left"}, complete=parts)
    write(other, B, {"__1_0.distcp": b"right"})
    memories = [memory, other]
    nodes: list[Nodes] = together(
        2, lambda rank, exchange: Nodes(memories[rank], rank, "127.0.0.1", exchange, lambda work: work())
    )
    try:
        assert [node.is_lead for node in nodes] == [True, True]
        found = newest({n.own.id: listing(n.memory) for n in nodes})
        assert found is not None
        for each in nodes:
            place = CheckpointPath(open_snapshot("run", found, each))
            assert not place.local
            assert sorted(read_manifest(str(place)).files) == sorted(parts)
            for file, data in parts.items():
                with place.open(file, "rb") as opened:
                    opened.seek(1)
                    assert opened.read(3) == data[1:4]
            with pytest.raises(PermissionError):
                place.open("new", "wb")
            assert not place.exists("absent")
            close_snapshots()
            assert not place.exists()
    finally:
        for each in nodes:
            each.close()


# --- progress --------------------------------------------------------------------------------------------------------


def test_the_last_step_outlives_the_process(tmp_path: Path):
    assert progress.last(tmp_path) == (-1, 0.0)
    noted = progress.Progress(tmp_path)
    noted.note(41)
    noted.note(42)
    step, when = progress.last(tmp_path)
    assert step == 42
    assert abs(when - time.time()) < 5
    noted.close()
    assert progress.Progress(tmp_path).note(43) is None
    assert progress.last(tmp_path)[0] == 43
    (tmp_path / "progress").write_bytes(b"torn")
    assert progress.last(tmp_path) == (-1, 0.0)


def test_members_outlive_the_process(tmp_path: Path):
    assert progress.members(tmp_path) == []
    progress.note_members(tmp_path, [{"rank": 0, "host": "a", "node": "x"}])
    assert progress.members(tmp_path) == [{"rank": 0, "host": "a", "node": "x"}]
    (tmp_path / "members").write_text(json.dumps({})[:1])
    assert progress.members(tmp_path) == []
