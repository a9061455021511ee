"""The newest checkpoint of a run on disk counts only if it is whole: a damaged one would end every start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from ls_strategy.errors import StateError
from ls_strategy.extras.callbacks.continued import newest_of_run


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    times = path.stat().st_mtime
    path.write_bytes(data)
    os.utime(path, (times, times))


def resumable(path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(1000)}, "optimizer_states": []}, path)
    time.sleep(0.01)  # they are compared by their times


def test_damaged_ones_are_left_out_by_name(tmp_path: Path) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "absent")]
    paths = [tmp_path / name for name in ("a/1.ckpt", "b/2.ckpt", "a/3.ckpt", "b/4.ckpt")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        resumable(path)
    assert newest_of_run(folders, lambda _: True).path == str(paths[3])
    flip(paths[3])
    flip(paths[2])
    found = newest_of_run(folders, lambda _: True)
    assert found.path == str(paths[1])
    assert list(found.skipped) == [str(paths[3]), str(paths[2])]
    assert newest_of_run(folders, lambda path: path != str(paths[1])).path is None, "of another run"
    for path in paths[:2]:
        flip(path)
    assert newest_of_run(folders, lambda _: True).path is None


def test_those_that_cannot_be_read(tmp_path: Path) -> None:
    for number in (1, 2):
        resumable(tmp_path / f"{number}.ckpt")

    def is_of_run(path: str) -> bool:
        if path.endswith("2.ckpt"):
            raise StateError("no one knows")
        return True

    found = newest_of_run([str(tmp_path)], is_of_run)
    assert (found.path, found.skipped) == (str(tmp_path / "1.ckpt"), {str(tmp_path / "2.ckpt"): "no one knows"})
