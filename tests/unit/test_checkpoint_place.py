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


def test_a_written_file_is_read_back_with_its_size_and_listed(root: CheckpointPath) -> None:
    write(root, "a", b"abc")
    with root.open("a", "rb") as file:
        assert file.read() == b"abc"
    assert (root.size("a"), root.size("b")) == (3, None)
    assert [root.at(entry).name for entry in root.entries()] == ["a"]


def test_a_sibling_has_the_same_parent_and_if_it_does_not_exist_no_entries(root: CheckpointPath) -> None:
    sibling = root.sibling("other")
    assert (sibling.name, sibling.parent.path) == ("other", root.parent.path)
    assert sibling.entries() == []
    sibling.remove()


def test_a_folder_is_renamed_and_removed(root: CheckpointPath) -> None:
    write(root, "a", b"abc")
    root.rename(root.sibling("new"))
    assert not root.exists()
    assert root.sibling("new").size("a") == 3
    root.sibling("new").remove()
    assert not root.sibling("new").taken


def test_remove_of_a_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    CheckpointPath(tmp_path / "link").remove()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder"]


def test_a_broken_link_takes_its_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    place = CheckpointPath(tmp_path / "link")
    assert (place.taken, place.exists()) == (True, False)


def test_idle_time_counts_from_the_newest_file_and_is_unknown_without_one(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    hour_ago = time.time() - 3600
    for path in (tmp_path / "a", tmp_path / "b", tmp_path):
        os.utime(path, (hour_ago, hour_ago))
    assert CheckpointPath(tmp_path).idle_for() == pytest.approx(3600, abs=60)
    os.utime(tmp_path / "b")
    assert CheckpointPath(tmp_path).idle_for() == pytest.approx(0, abs=60)
    assert CheckpointPath(tmp_path / "missing").idle_for() is None


@pytest.mark.parametrize(
    ("path", "text"),
    [("memory://bucket/a.ckpt/", "memory:///bucket/a.ckpt"), ("/tmp/x/../a.ckpt", "/tmp/a.ckpt")],
)
def test_the_path_in_messages(path: str, text: str) -> None:
    assert str(CheckpointPath(path)) == text
