"""The newest checkpoint that can be read: what is skipped, why, and that nothing in it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.checkpoint.continued import newest_readable
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


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_with_nothing_to_read(tmp_path: Path, there: bool) -> None:
    if there:
        os.mkfifo(tmp_path / "a.ckpt")
        (tmp_path / "b.ckpt").symlink_to(tmp_path / "nowhere")
        (tmp_path / "c.ckpt").mkdir()
    found = newest_readable([tmp_path / "." if there else tmp_path / "missing"])
    assert (found.path, found.skipped) == (None, {})
