"""One save of several ranks: threads that exchange reports stand for the ranks."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.manifest import Manifest, read_manifest
from ls_strategy.checkpoint.reshard import Contents, separate
from ls_strategy.checkpoint.save import Save, described, run, run_file
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.errors import CheckpointError
from tests.os_calls import replaced
from tests.unit.fake_flats import RANKS, fake_flats, full_values, source_of


class Threads:
    """An exchange between threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=30)
        self._values: list[Any] = [None] * RANKS

    def of(self, rank: int) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
        """The exchange as one rank calls it."""

        def exchange(value: dict[str, Any]) -> list[dict[str, Any]]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return exchange


def job(path: Path, rank: int, **changes: Any) -> Save:
    contents = Contents()
    weights = {
        name: contents.stand_in(source_of(fake_flats()[rank], slot), torch.float32)
        for slot, name in enumerate(full_values())
    }
    entries, _ = separate({"state_dict": weights}, contents)
    options: dict[str, Any] = {
        "random": {"seed": rank},
        "manifest": Manifest(step=7, epoch=2, layout={}, files={}),
        "write_meta": lambda p: torch.save({"epoch": 2}, p),
    }
    return Save(str(path), entries, **{**options, **changes})


def save_together(path: Path, changes: dict[int, dict[str, Any]] | None = None) -> list[Any]:
    """Run a save; the result or the error of each rank."""
    threads = Threads()

    def rank(number: int) -> Any:
        try:
            return run(job(path, number, **(changes or {}).get(number, {})), number, threads.of(number))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def fails(_: str) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "last.ckpt"


def test_the_ranks_write_one_checkpoint_with_all_random_states_and_get_the_number_of_bytes(path: Path) -> None:
    results = save_together(path)
    found = read_checkpoint(path)
    assert all(torch.equal(found["state_dict"][name] + 0, value) for name, value in full_values().items())
    assert found["ls_strategy"]["random_states"] == {f"rank_{rank}": {"seed": rank} for rank in range(RANKS)}
    files = read_manifest(path).files
    expected = sum(record.bytes for name, record in files.items() if name.endswith(".distcp"))
    assert [nbytes for nbytes, _ in results] == [expected] * RANKS
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_every_file_is_on_the_disk_before_the_commit(path: Path) -> None:
    """Those of the ranks, and the two indices; power may fail after the rename."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")

    def renaming(source: Any, target: Any, **options: Any) -> None:
        events.append(f"rename {Path(target).name}")
        rename(source, target, **options)

    with replaced({"fsync": syncing, "rename": renaming}):
        save_together(path)
    files = {name for name in read_manifest(path).files if name != "meta.pt"}  # the test's own `write_meta`
    assert len(files) == RANKS + 2
    assert {f"sync {name}" for name in files} <= set(events[: events.index("rename manifest.json")])


def test_the_claim_ends_before_any_rank_returns(path: Path) -> None:
    left: list[list[str]] = []

    def exchange(value: dict[str, Any]) -> list[dict[str, Any]]:
        left.append([p.name for p in path.parent.iterdir() if p.name.endswith(".saving")])
        return [value]

    run(job(path, 0), 0, exchange)
    assert [len(names) for names in left] == [1, 1, 0]


def unsavable(rank: int) -> dict[int, dict[str, Any]]:
    return {rank: {"random": {"x": threading.Lock()}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (unsavable(1), "failed: rank 1: TypeError: "),
        ({0: {"write_meta": fails}}, "failed: rank 0: OSError: .*No space left"),
    ],
    ids=["a rank's file", "rank 0's metadata"],
)
def test_a_failure_is_raised_on_all_ranks(path: Path, changes: dict[int, dict[str, Any]], message: str) -> None:
    errors = save_together(path, changes)
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(CheckpointError, match=message):
        raise errors[0]


def test_a_failure_keeps_the_checkpoint_before(path: Path) -> None:
    save_together(path)
    save_together(path, {0: {"manifest": Manifest(8, 2, {}, {}), "write_meta": fails}})
    assert read_manifest(path).step == 7
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_name_that_is_taken_is_an_error_on_all_ranks(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").touch()
    assert all("something other than a checkpoint: notes.txt" in str(error) for error in save_together(path))


def test_after_a_failure_the_name_is_free(path: Path) -> None:
    save_together(path, unsavable(2))
    save_together(path)
    assert read_manifest(path).step == 7


def test_a_single_file(path: Path) -> None:
    run_file(str(path), {"epoch": 3})
    assert torch.load(path) == {"epoch": 3}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_single_file_is_not_checksummed_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(zlib, "crc32", lambda *_: pytest.fail("torch.save has done that"))
        run_file(str(path), {"a": torch.ones(1 << 20)})
    assert verify_all(path) == []
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert verify_all(path) != []


def test_a_single_file_that_fails_keeps_the_one_before(path: Path) -> None:
    run_file(str(path), {"epoch": 3})
    with pytest.raises(TypeError):
        run_file(str(path), {"epoch": threading.Lock()})
    assert torch.load(path) == {"epoch": 3}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_single_file_does_not_replace_a_folder_of_the_user(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        run_file(str(path), {})
    with commit.require_claim(commit.CheckpointPath(path)) as held:
        assert held.certain, "the refused save must not keep the claim"


@pytest.mark.parametrize(
    ("error", "text"),
    [(CheckpointError("the disk is full."), "the disk is full"), (ValueError("x"), "ValueError: x")],
)
def test_errors_in_reports(error: Exception, text: str) -> None:
    assert described(error) == text
