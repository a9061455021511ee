"""The manifest of a checkpoint and its checksums."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from ls_strategy.checkpoint.manifest import (
    FORMAT,
    FileRecord,
    Manifest,
    check,
    is_committed,
    read_manifest,
    record_of,
    verify,
)
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError

DATA = b"one two three"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(DATA)
    record = FileRecord(len(DATA), [(0, 4, zlib.crc32(DATA[:4])), (4, 9, zlib.crc32(DATA[4:]))])
    manifest = Manifest(7, 2, {"stage": 3}, {"f": record}, left_out=["a"], saved_at=1.5)
    (tmp_path / MANIFEST).write_text(manifest.to_json())
    return tmp_path


def edit(folder: Path, **changes: object) -> None:
    """Change fields of the manifest, with a valid checksum."""
    fields = {k: v for k, v in json.loads((folder / MANIFEST).read_text()).items() if k != "crc32"} | changes
    crc = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps({**fields, "crc32": crc}))


def test_a_manifest_survives_the_file(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert (manifest.step, manifest.epoch, manifest.left_out, manifest.saved_at) == (7, 2, ["a"], 1.5)


def test_a_changed_digit_is_noticed(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"step": 7', '"step": 8'))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged \(its checksum differs\)"):
        read_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"crc32": 1}'])
def test_anything_else_is_a_damaged_manifest(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_manifest(folder)


def test_a_newer_format_is_refused(folder: Path) -> None:
    edit(folder, format=FORMAT + 1)
    with pytest.raises(CheckpointError, match=r"newer version: it has format 2.*Update ls_strategy"):
        read_manifest(folder)


@pytest.mark.parametrize("data", [None, DATA[:-1], DATA + b"x"], ids=["missing", "short", "long"])
def test_a_file_of_another_size_is_not_committed(folder: Path, data: bytes | None) -> None:
    (folder / "f").unlink() if data is None else (folder / "f").write_bytes(data)
    assert not is_committed(folder)


def test_a_complete_folder_is_committed(folder: Path) -> None:
    assert is_committed(folder)


def test_without_a_manifest_a_folder_is_not_committed(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert not is_committed(folder)


def test_verify_accepts_what_was_written(folder: Path) -> None:
    verify(folder, "f", read_manifest(folder).files["f"])


def test_verify_names_the_damaged_range(folder: Path) -> None:
    (folder / "f").write_bytes(b"one two thrEe")
    with pytest.raises(CheckpointError, match=r"/f is damaged: bytes \[4, 13\) do not match their checksum"):
        verify(folder, "f", read_manifest(folder).files["f"])


def test_check_accepts_the_right_checksum() -> None:
    check(CheckpointPath("x"), "f", 0, DATA, zlib.crc32(DATA))


def test_the_record_of_a_small_file(folder: Path) -> None:
    assert record_of(CheckpointPath(folder), "f") == FileRecord(len(DATA), [(0, len(DATA), zlib.crc32(DATA))])
