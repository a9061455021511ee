"""Output of the command-line tools: complete under its name, or not there."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.claim import require_claim
from ls_strategy.checkpoint.output import WRITER, atomic_output
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.errors import CheckpointError, ConfigError


def write(target: Path, text: str = "new", *, force: bool = False, nbytes: int = 0) -> None:
    with atomic_output(target, nbytes=nbytes, force=force) as path:
        assert not path.exists()
        path.write_text(text)


def write_and_raise(target: Path, error: BaseException, *, force: bool = False) -> None:
    with atomic_output(target, nbytes=0, force=force) as path:
        path.write_text("half")
        raise error


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def export(folder: Path, *files: str) -> Path:
    """As an export writes it: the weights name all files."""
    folder.mkdir()
    header = json.dumps({"__metadata__": {WRITER: json.dumps(["model.safetensors", *files])}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in files:
        (folder / name).touch()
    return folder


def test_a_file_appears_at_the_end(tmp_path: Path) -> None:
    with atomic_output(tmp_path / "x", nbytes=0, force=False) as path:
        path.write_text("new")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_text() == "new"


def test_nothing_else_remains(tmp_path: Path) -> None:
    write(tmp_path / "x")
    assert names(tmp_path) == ["x"]


def test_after_an_exception_nothing_remains(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_and_raise(tmp_path / "x", KeyboardInterrupt())
    assert names(tmp_path) == []


def test_after_an_exception_the_old_file_remains(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(RuntimeError, match="on purpose"):
        write_and_raise(tmp_path / "x", RuntimeError("on purpose"), force=True)
    assert (tmp_path / "x").read_text() == "old"


def test_an_error_of_the_disk_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x could not be written: .*No space left.*Nothing was left behind"):
        write_and_raise(tmp_path / "x", OSError(28, "No space left on device"))


def test_a_file_is_replaced_with_force(tmp_path: Path) -> None:
    write(tmp_path / "x", "old")
    write(tmp_path / "x", "new", force=True)
    assert (tmp_path / "x").read_text() == "new"


def test_a_file_is_kept_without_force(tmp_path: Path) -> None:
    write(tmp_path / "x", "old")
    with pytest.raises(ConfigError, match=r"exists\. Give another name, or --force"):
        write(tmp_path / "x")


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    output = atomic_output(tmp_path / "x", nbytes=0, force=False)
    output.__enter__().write_text("new")
    (tmp_path / "x").write_text("another's")
    with pytest.raises(ConfigError, match="exists"):
        output.__exit__(None, None, None)
    assert (tmp_path / "x").read_text() == "another's"


def test_an_export_is_replaced_with_force(tmp_path: Path) -> None:
    export(tmp_path / "x", "config.json")
    with atomic_output(tmp_path / "x", nbytes=0, force=True) as path:
        path.mkdir()
        (path / "new").touch()
    assert names(tmp_path / "x") == ["new"]
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("extra", ["notes.txt", "model-2.safetensors"])
def test_an_export_with_other_files_is_kept(tmp_path: Path, extra: str) -> None:
    (export(tmp_path / "x") / extra).touch()
    with pytest.raises(ConfigError, match="a folder that no export wrote, or that has other files"):
        write(tmp_path / "x", force=True)
    assert extra in names(tmp_path / "x")


@pytest.mark.parametrize("header", [b"", b"[" * 200_000, b"[1]", b'{"__metadata__": 3}'])
def test_weights_of_another_program_are_kept(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"{}")
    with pytest.raises(ConfigError, match="no export wrote"):
        write(tmp_path / "x", force=True)


def test_too_little_space_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**10, 0, 10**9))
    with pytest.raises(CheckpointError, match=r"needs 2.00 GB, but .* has 1.00 GB free"):
        write(tmp_path / "x", nbytes=2 * 10**9)
    write(tmp_path / "x", nbytes=10**9)


def test_two_processes_cannot_write_one_target(tmp_path: Path) -> None:
    with require_claim(CheckpointPath(tmp_path / "x")), pytest.raises(CheckpointError, match="by another process"):
        write(tmp_path / "x")


@pytest.mark.parametrize(
    ("target", "message"),
    [("s3://bucket/x", "not a local path"), ("missing/x", "mkdir -p"), ("/..", "a parent folder")],
)
def test_targets_that_cannot_be(target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        write(Path(target))


def test_a_link_is_kept(tmp_path: Path) -> None:
    torch.save(1, tmp_path / "x")
    (tmp_path / "link").symlink_to("x")
    with pytest.raises(ConfigError, match="is a link to x"):
        write(tmp_path / "link", force=True)


def fill(target: Path, text: str) -> None:
    with atomic_output(target, nbytes=0, force=True) as folder:
        export(folder)
        (folder / "model.safetensors").open("ab").write(text.encode())


def test_a_folder_is_replaced_without_a_moment_in_which_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "x", "old")
    moved: list[Path] = []
    monkeypatch.setattr(Path, "rename", lambda self, _: moved.append(self))
    fill(tmp_path / "x", "new")
    assert (tmp_path / "x" / "model.safetensors").read_bytes().endswith(b"new")
    assert not moved
    assert names(tmp_path) == ["x"]


def test_where_names_cannot_be_swapped_a_killed_replacement_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "x", "old")
    scratch = tmp_path / ".x.0123abcd.partial"  # what is there between two renames
    scratch.mkdir()
    export(scratch / "x")
    (tmp_path / "x").rename(scratch / "x.old")
    with pytest.raises(ConfigError, match="exists"):
        write(tmp_path / "x")
    assert (tmp_path / "x" / "model.safetensors").read_bytes().endswith(b"old")
    monkeypatch.setattr(commit, "exchange_names", lambda a, b: False)
    fill(tmp_path / "x", "new")
    assert (tmp_path / "x" / "model.safetensors").read_bytes().endswith(b"new")
    assert names(tmp_path) == ["x"]


def test_an_export_with_folders_of_its_own_is_replaced_and_with_others_kept(tmp_path: Path) -> None:
    folder = export(tmp_path / "x", "config.json")
    (folder / "other").mkdir()
    header = json.dumps(
        {"__metadata__": {WRITER: json.dumps(["model.safetensors", "config.json", "other/a"])}}
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "other" / "a").touch()
    (folder / "other" / "mine").touch()
    with pytest.raises(ConfigError, match="other files"):
        fill(folder, "new")
    (folder / "other" / "mine").unlink()
    fill(folder, "new")
    assert names(folder) == ["model.safetensors"]
