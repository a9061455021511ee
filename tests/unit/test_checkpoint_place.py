"""A checkpoint's path on a local and on a remote file system."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from ls_strategy.checkpoint.place import CheckpointPath


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointPath:
    """An empty folder."""
    place = CheckpointPath(tmp_path / "root" if request.param == "local" else f"memory://{uuid.uuid4().hex}/root")
    place.make()
    return place


def write(place: CheckpointPath, name: str, data: bytes) -> None:
    with place.open(name, "wb") as file:
        file.write(data)


def test_a_written_file_is_read_back(root: CheckpointPath) -> None:
    write(root, "a", b"abc")
    with root.open("a", "rb") as file:
        assert file.read() == b"abc"


def test_the_size_of_a_file_that_exists_and_of_one_that_does_not(root: CheckpointPath) -> None:
    write(root, "a", b"abc")
    assert (root.size("a"), root.size("b")) == (3, None)


def test_entries_are_paths_of_the_same_file_system(root: CheckpointPath) -> None:
    write(root, "a", b"")
    assert [root.at(entry).name for entry in root.entries()] == ["a"]


def test_a_folder_that_does_not_exist_has_no_entries(root: CheckpointPath) -> None:
    assert root.sibling("missing").entries() == []


def test_a_sibling_has_the_same_parent(root: CheckpointPath) -> None:
    sibling = root.sibling("other")
    assert (sibling.name, sibling.parent.path) == ("other", root.parent.path)


def test_rename_moves_the_folder(root: CheckpointPath) -> None:
    write(root, "a", b"abc")
    root.rename(root.sibling("new"))
    assert not root.exists()
    assert root.sibling("new").size("a") == 3


def test_remove_of_a_folder(root: CheckpointPath) -> None:
    write(root, "a", b"abc")
    root.remove()
    assert not root.taken


def test_remove_of_nothing_is_allowed(root: CheckpointPath) -> None:
    root.sibling("missing").remove()


def test_remove_of_a_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    CheckpointPath(tmp_path / "link").remove()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder"]


def test_a_broken_link_takes_its_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    place = CheckpointPath(tmp_path / "link")
    assert (place.taken, place.exists()) == (True, False)


def test_idle_time_counts_from_the_newest_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    hour_ago = time.time() - 3600
    for path in (tmp_path / "a", tmp_path / "b", tmp_path):
        os.utime(path, (hour_ago, hour_ago))
    assert CheckpointPath(tmp_path).idle_for() == pytest.approx(3600, abs=60)
    os.utime(tmp_path / "b")
    assert CheckpointPath(tmp_path).idle_for() == pytest.approx(0, abs=60)


def test_the_idle_time_of_nothing_is_unknown(tmp_path: Path) -> None:
    assert CheckpointPath(tmp_path / "missing").idle_for() is None


@pytest.mark.parametrize(
    ("path", "text"),
    [("memory://bucket/a.ckpt/", "memory:///bucket/a.ckpt"), ("/tmp/x/../a.ckpt", "/tmp/a.ckpt")],
)
def test_the_path_in_messages(path: str, text: str) -> None:
    assert str(CheckpointPath(path)) == text
