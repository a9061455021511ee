"""Locks on checkpoint names."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest

from ls_strategy.checkpoint import claim as claims
from ls_strategy.checkpoint.claim import claim, is_lock_file, lock_path, require_claim
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.errors import CheckpointError


@pytest.fixture
def place(tmp_path: Path) -> CheckpointPath:
    return CheckpointPath(tmp_path / "last.ckpt")


def test_a_second_claim_of_a_name_fails_with_the_holder_and_other_names_are_free(place: CheckpointPath) -> None:
    with require_claim(place):
        assert claim(place) is None
        with pytest.raises(CheckpointError, match=r"another process \(pid \d+ on .*default_root_dir"):
            require_claim(place)
        with require_claim(place.sibling("other.ckpt")) as other:
            assert other.certain


def test_release_frees_the_name_and_removes_the_file(place: CheckpointPath) -> None:
    with require_claim(place):
        assert Path(lock_path(place)).exists()
    assert not Path(lock_path(place)).exists()
    with require_claim(place) as again:
        assert again.certain


def test_release_may_be_repeated(place: CheckpointPath) -> None:
    held = require_claim(place)
    held.release()
    with require_claim(place):
        held.release()
        assert claim(place) is None, "the second release must not free the name of the next holder"


def test_an_exception_releases_the_claim(place: CheckpointPath) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), require_claim(place):
        raise RuntimeError("on purpose")
    assert claim(place) is not None


def test_the_file_of_a_killed_process_of_this_machine_is_taken_over(place: CheckpointPath) -> None:
    require_claim(place)
    claims.forget_all()  # as the end of the process does
    assert Path(lock_path(place)).exists()
    with require_claim(place) as held:
        assert held.certain


def test_the_file_of_another_machine_leaves_the_claim_uncertain(place: CheckpointPath) -> None:
    Path(lock_path(place)).write_text("ls_strategy another-boot-id pid 1 on elsewhere\n")
    with require_claim(place) as held:
        assert not held.certain


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_without_locks_the_claim_is_uncertain_and_other_errors_are_raised(
    place: CheckpointPath, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match="no locks here"):
            claim(place)
        return
    held = claim(place)
    assert held is not None
    assert not held.certain


def test_object_stores_give_uncertain_claims() -> None:
    held = claim(CheckpointPath("memory://bucket/last.ckpt"))
    assert held is not None
    assert not held.certain


def test_lock_files_are_recognized(place: CheckpointPath, tmp_path: Path) -> None:
    (tmp_path / "mine.saving").write_text("my notes")
    with require_claim(place):
        assert is_lock_file(Path(lock_path(place)))
    assert not is_lock_file(tmp_path / "mine.saving")
    assert not is_lock_file(tmp_path / "missing.saving")
