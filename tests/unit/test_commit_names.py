"""Whose name it is: what a save may replace, and two processes that want the same."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.manifest import Manifest
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError
from tests.processes import fork_of_server
from tests.unit.stopped_save import Saver, save_and_fork
from tests.unit.test_commit import content_of, every_end, names_in, save

# --- what has the name ------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Everything in a folder."""
    found: dict[str, bytes | str | None] = {}
    for entry in sorted(folder.rglob("*")):
        name = str(entry.relative_to(folder))
        found[name] = str(entry.readlink()) if entry.is_symlink() else entry.read_bytes() if entry.is_file() else None
    return found


def work(root: Path) -> None:
    """A folder as users have it: two checkpoints, and things of their own."""
    for name in ("step=1.ckpt", "last.ckpt", "mixed.ckpt", "cut.ckpt", "deep.ckpt"):
        save(root / "checkpoints" / name, 1)
    (root / "checkpoints" / "mixed.ckpt" / "notes.txt").write_text("mine")
    (root / "checkpoints" / "deep.ckpt" / "sub").mkdir()
    (root / "checkpoints" / "cut.ckpt" / MANIFEST).unlink()
    (root / "checkpoints" / "readme.txt").write_text("mine")
    (root / "checkpoints" / "train.py").write_text("import torch")
    (root / "checkpoints" / "page").mkdir()
    (root / "checkpoints" / "page" / MANIFEST).write_text('{"name": "a web page"}')
    (root / "checkpoints" / "nested").mkdir()
    (root / "checkpoints" / "nested" / MANIFEST).write_text("[" * 200_000)
    (root / "checkpoints" / "data.zip").write_bytes(b"PK\x03\x04" + bytes(22) + b"\x05\x00\x00\x00a.txt")
    (root / "link").symlink_to("checkpoints")
    (root / "link.txt").symlink_to("checkpoints/readme.txt")


REFUSED = {
    "checkpoints": "is a folder that holds something other than a checkpoint: ",
    "checkpoints/": "is a folder that holds something other than a checkpoint: ",
    "./checkpoints/./": "is a folder that holds something other than a checkpoint: ",
    "checkpoints/last.ckpt/..": "is a folder that holds something other than a checkpoint: ",
    "checkpoints/mixed.ckpt": "is a folder that holds something other than a checkpoint: notes.txt",
    "checkpoints/deep.ckpt": "is a folder that holds something other than a checkpoint: sub",
    "checkpoints/cut.ckpt": "a checkpoint without its manifest.json",
    "checkpoints/page": "a folder that this package did not write",
    "checkpoints/nested": "a folder that this package did not write",
    "checkpoints/readme.txt": "is a file that torch.save did not write",
    "checkpoints/train.py": "is a file that torch.save did not write",
    "checkpoints/data.zip": "is a file that torch.save did not write",
    "link": "is a link to .*checkpoints, which is not a checkpoint",
    "link.txt": "is a link to .*readme.txt, which is not a checkpoint",
    "": "which is empty",
    " ": "which is empty",
    ".": "is the working directory or contains it",
    "./": "is the working directory or contains it",
    "checkpoints/../": "is the working directory or contains it",
    "..": "is the working directory or contains it",
    "../..": "is the working directory or contains it",
    "/": "is the root of a file system",
    "memory://": "is the root of a file system",
}


@pytest.mark.parametrize("path", REFUSED)
def test_nothing_but_a_checkpoint_is_replaced(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    work(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=rf"^Got the checkpoint path '{path}', .*{REFUSED[path]}"):
        commit.begin(path, commit.new_save_id())
    with pytest.raises(CheckpointError, match=rf"^Got the checkpoint path '{path}', .*{REFUSED[path]}"):
        commit.remove(path)
    if "://" not in path:
        with pytest.raises(CheckpointError, match=rf"^Got the checkpoint path '{path}', .*{REFUSED[path]}"):
            commit.link("checkpoints/step=1.ckpt", path)
    assert contents(tmp_path) == before


def test_a_checkpoint_that_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.ckpt", 1)
    monkeypatch.chdir(tmp_path / "a.ckpt")
    for path in (".", tmp_path / "a.ckpt", "../a.ckpt"):
        with pytest.raises(CheckpointError, match="is the working directory"):
            commit.begin(path, commit.new_save_id())
    assert content_of(tmp_path / "a.ckpt") == 1


def test_devices_pipes_and_sockets_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.ckpt")
    for path in (tmp_path / "a.ckpt", "/dev/null"):
        with pytest.raises(CheckpointError, match="which is a device, a pipe or a socket"):
            commit.begin(path, commit.new_save_id())
        with pytest.raises(CheckpointError, match="which is a device, a pipe or a socket"):
            commit.remove(path)
    assert (tmp_path / "a.ckpt").is_fifo()
    assert commit.newest([tmp_path]) is None  # and it does not wait for a writer


@pytest.mark.parametrize("damage", ["manifest", "rank file", "rank file gone"])
def test_a_damaged_checkpoint_is_replaced(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    if damage == "manifest":
        (path / MANIFEST).write_bytes(b"\xff\x00 not json")
    elif damage == "rank file":
        os.truncate(path / "__0_0.distcp", 1)
    else:
        (path / "__0_0.distcp").unlink()
    save(path, 2)
    assert content_of(path) == 2


def test_what_takes_the_name_during_a_save_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with contextlib.closing(_Closing(commit.begin(path, "0000000a"))):
        path.mkdir()
        (path / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match=r"something other than a checkpoint: notes\.txt"):
            commit.commit(path, "0000000a", Manifest(1, 0, {}, {}))
        assert contents(path) == {"notes.txt": b"mine"}


class _Closing:
    def __init__(self, held: commit.Claim) -> None:
        self.close = held.release


def test_another_file_system_has_the_same_rules(request: pytest.FixtureRequest) -> None:
    root = f"memory:///{request.node.name}"
    try:
        save(f"{root}/a.ckpt", 1)
        save(f"{root}/b.ckpt", 1)
        with CheckpointPath(root).open("b.ckpt/notes.txt", "w") as file:
            file.write("mine")
        with CheckpointPath(root).open("file.ckpt", "w") as file:
            file.write("mine")
        for name, why in (("", r"[ab]\.ckpt"), ("b.ckpt", r"notes\.txt"), ("file.ckpt", "torch.save did not write")):
            with pytest.raises(CheckpointError, match=why):
                commit.begin(f"{root}/{name}", "0000000a")
            with pytest.raises(CheckpointError, match=why):
                commit.remove(f"{root}/{name}")
        copy = CheckpointPath(f"{root}/a.ckpt")
        copy.fs.rm(f"{copy.path}/{MANIFEST}")  # a copy that was interrupted
        save(f"{root}/a.ckpt", 2)
        assert content_of(f"{root}/a.ckpt") == 2
        with CheckpointPath(root).open("one.ckpt", "wb") as file:
            torch.save({}, file)
        save(f"{root}/one.ckpt", 3)
        assert content_of(f"{root}/one.ckpt") == 3
    finally:
        CheckpointPath(root).remove()


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["begun", "manifest", "nameless"])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Saver]:
    """Saves 7 over 1, and has stopped: while it writes, before it takes the name, and where nothing has the name."""
    save(tmp_path / "last.ckpt", 1)
    saver = Saver(tmp_path / "last.ckpt", request.param)
    try:
        yield saver
    finally:
        saver.close()


@pytest.mark.sample(1)
@pytest.mark.timeout(120)
def test_a_look_leaves_a_save_in_flight_alone(tmp_path: Path, saver: Saver) -> None:
    path = tmp_path / "last.ckpt"
    before = names_in(tmp_path)
    named = path.exists()
    for _ in range(3):
        assert commit.newest([tmp_path]) == (str(path) if named else None)
        commit.recover(path)
    assert names_in(tmp_path) == before
    saver.go_on()
    assert content_of(path) == 7
    assert names_in(tmp_path) == ["last.ckpt"]


@pytest.mark.sample(1)
@pytest.mark.timeout(120)
def test_a_second_save_under_the_name_is_an_error_and_harms_nothing(tmp_path: Path, saver: Saver) -> None:
    path = tmp_path / "last.ckpt"
    before = names_in(tmp_path)
    with pytest.raises(CheckpointError, match=rf"is being saved by another process \(pid {saver.process.pid} on "):
        save(path, 2)
    if path.exists():
        with pytest.raises(CheckpointError, match="is being saved by another process"):
            commit.remove(path)
    with pytest.raises(CheckpointError, match="is being saved by another process"):
        commit.link(tmp_path / "other.ckpt", path)
    save(tmp_path / "other.ckpt", 3)  # which removes what was left under other names
    assert names_in(tmp_path) == sorted([*before, "other.ckpt"])
    saver.go_on()
    assert content_of(path) == 7
    assert content_of(tmp_path / "other.ckpt") == 3
    assert names_in(tmp_path) == ["last.ckpt", "other.ckpt"]
    save(path, 2)
    assert content_of(path) == 2


@pytest.mark.sample(1)
@pytest.mark.timeout(120)
def test_a_killed_save_is_nobodys(tmp_path: Path, saver: Saver) -> None:
    path = tmp_path / "last.ckpt"
    named = path.exists()
    saver.process.kill()
    saver.process.join()
    assert commit.newest([tmp_path]) == str(path)
    assert content_of(path) == (1 if named else 7)
    save(path, 2)
    assert content_of(path) == 2
    assert names_in(tmp_path) == ["last.ckpt"]


def test_a_forked_child_does_not_keep_the_name(tmp_path: Path) -> None:
    """Workers of a data loader that are forked during a save may outlive a process that is killed."""
    ours, theirs = multiprocessing.Pipe()
    saver = fork_of_server(save_and_fork, tmp_path / "a.ckpt", theirs)
    theirs.close()
    worker = ours.recv()
    saver.join(60)
    try:
        save(tmp_path / "a.ckpt", 1)
    finally:
        os.kill(worker, 9)
    assert names_in(tmp_path) == ["a.ckpt"]


def test_where_there_are_no_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without ``flock``: a folder that was written to a moment ago may be another run's."""

    def flock(descriptor: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    path = tmp_path / "a.ckpt"
    save(path, 1)
    partial, old = tmp_path / ".a.ckpt.0000000a.partial", tmp_path / ".a.ckpt.0000000a.old"
    shutil.copytree(path, partial)
    path.rename(old)
    assert commit.newest([tmp_path]) is None
    save(path, 2)
    assert content_of(path) == 2
    assert partial.exists()
    for entry in (partial, *partial.iterdir(), old, *old.iterdir()):
        os.utime(entry, (time.time() - 1e5, time.time() - 1e5))
    save(path, 3)
    assert names_in(tmp_path) == [".a.ckpt.saving", "a.ckpt"]


def test_a_lock_file_of_another_machine_proves_nothing(tmp_path: Path) -> None:
    """Its locks may not reach this one (``local_lock``), so what it has just written stays."""
    path, partial = tmp_path / "a.ckpt", tmp_path / ".a.ckpt.0000000a.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"in flight")
    (tmp_path / ".a.ckpt.saving").write_text("ls_strategy other-machine pid 1 on node7\n")
    save(path, 1)
    assert content_of(path) == 1
    assert (partial / "__0_0.distcp").read_bytes() == b"in flight"


# --- what is removed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [True, False])
def test_what_is_deleted_by_hand_stays_away(tmp_path: Path, exchange: bool) -> None:
    """A save that was killed may have left a whole checkpoint under a hidden name."""
    path = tmp_path / "last.ckpt"

    def prepare() -> None:
        for entry in tmp_path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        save(path, 1)

    for done in every_end(lambda: save(path, 2), prepare, exchange=exchange):
        if not path.exists():
            continue  # between two renames: there is nothing that could be deleted
        shutil.rmtree(path)
        assert commit.newest([tmp_path]) is None, done[-1:]
        commit.recover(path)
        assert not path.exists(), done[-1:]


def test_a_checkpoint_that_vanishes_during_the_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.ckpt", 1)
        torch.save({}, tmp_path / f"{name}_file.ckpt")
    plain = CheckpointPath.entries

    def entries(self: CheckpointPath) -> list[str]:
        found = plain(self)
        shutil.rmtree(tmp_path / "b.ckpt", ignore_errors=True)
        (tmp_path / "b_file.ckpt").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(CheckpointPath, "entries", entries)
    assert commit.newest([tmp_path]) == str(tmp_path / "a_file.ckpt")

    def vanished(self: CheckpointPath) -> list[str]:
        found = plain(self)
        shutil.rmtree(tmp_path, ignore_errors=True)
        return found

    monkeypatch.setattr(CheckpointPath, "entries", vanished)
    assert commit.newest([tmp_path]) is None
    assert commit.newest([tmp_path]) is None


def test_the_beginning_of_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    """As a full disk leaves it under strategies that write under the last name."""
    save(tmp_path / "a.ckpt", 1)
    torch.save({"x": torch.ones(1000)}, tmp_path / "b.ckpt")
    assert commit.newest([tmp_path]) == str(tmp_path / "b.ckpt")
    os.truncate(tmp_path / "b.ckpt", 2000)
    assert commit.newest([tmp_path]) == str(tmp_path / "a.ckpt")
    os.truncate(tmp_path / "b.ckpt", 0)
    assert commit.newest([tmp_path]) == str(tmp_path / "a.ckpt")


@pytest.mark.parametrize("name", ["n" * 245, "é" * 123, "n" * 255, "n" * 300], ids=["245", "bytes", "255", "300"])
def test_a_name_that_leaves_no_room_for_a_save_in_progress(tmp_path: Path, name: str) -> None:
    save(tmp_path / ("n" * 237), 1)  # the longest
    for start in (partial(commit.begin, save_id=commit.new_save_id()), partial(commit.link, tmp_path / ("n" * 237))):
        with pytest.raises(CheckpointError, match=r"Got a checkpoint name of \d+ bytes, .* at most 237: .*shorter"):
            start(tmp_path / name)
    assert names_in(tmp_path) == ["n" * 237]
