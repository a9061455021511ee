"""The newest checkpoint that can be read: what is skipped, why, and that nothing in it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy._torch import without_crc32
from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.extras.callbacks import continued
from ls_strategy.extras.callbacks.continued import newest_readable
from tests.unit.checkpoint_folders import small_folder
from tests.unit.test_untrusted import Runs, write


def file_of(path: Path, seconds: int, value: Any) -> Path:
    torch.save(value, path)
    os.utime(path, (seconds, seconds))
    return path


RESUMABLE: dict[str, Any] = {"state_dict": {}, "optimizer_states": [], "lr_schedulers": []}


def test_newer_ones_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    oldest = file_of(one / "a.ckpt", 1, RESUMABLE)
    file_of(two / "b.ckpt", 2, {"state_dict": {}})  # weights alone
    code = file_of(one / "c.ckpt", 3, {**RESUMABLE, "x": Runs(marker)})
    garbage = two / "d.ckpt"
    garbage.write_bytes(b"\x80\x02c" * 9)
    os.utime(garbage, (4, 4))
    crafted = small_folder(two / "e.ckpt")  # by its manifest, saved now
    torch.save({**RESUMABLE, "x": Runs(marker)}, tmp_path / "meta.pt")
    write(crafted, "meta.pt", (tmp_path / "meta.pt").read_bytes())
    found = newest_readable([one, two])
    assert found.path == str(oldest)
    assert list(found.skipped) == [str(crafted), str(garbage), str(code)]
    for path in (crafted, code):
        assert "objects that torch.load(weights_only=True) does not build (posix.system)" in found.skipped[str(path)]
    assert "is not a file that torch.save wrote" in found.skipped[str(garbage)]
    assert str(found).count("ckpt: ") == 3
    assert not marker.exists()
    good = small_folder(two / "f.ckpt")
    assert newest_readable([one, two]).path == str(good)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_flipped_bit_in_a_tensor_is_found_where_checking_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    older = file_of(tmp_path / "older.ckpt", 1, RESUMABLE)
    newer = tmp_path / "newer.ckpt"
    if kind == "file":
        file_of(newer, 2, {**RESUMABLE, "state_dict": {"a": torch.ones(10_000)}})
        flip(newer, newer.stat().st_size // 2)
    else:
        part = next(iter(small_folder(newer).glob("*.distcp")))
        flip(part, part.stat().st_size // 2)
    found = newest_readable([tmp_path])
    assert found.path == str(older)
    assert "is damaged" in found.skipped[str(newer)]
    monkeypatch.setattr(continued, "_CHECKED_BYTES", 1000)
    assert newest_readable([tmp_path]).path == str(newer)


def test_a_file_without_checksums_counts(tmp_path: Path) -> None:
    with without_crc32():
        path = file_of(tmp_path / "a.ckpt", 1, RESUMABLE)
    assert newest_readable([tmp_path]).path == str(path)
    assert verify_all(path) == []


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_with_nothing_to_read(tmp_path: Path, there: bool) -> None:
    if there:
        os.mkfifo(tmp_path / "a.ckpt")
        (tmp_path / "b.ckpt").symlink_to(tmp_path / "nowhere")
        (tmp_path / "c.ckpt").mkdir()
    found = newest_readable([tmp_path / "." if there else tmp_path / "missing"])
    assert (found.path, found.skipped) == (None, {})
