"""`Saves`: what happens to a failed save, and when checkpoints are removed or linked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn

from ls_strategy.config import CheckpointConfig, ZeROConfig
from ls_strategy.errors import CheckpointError
from ls_strategy.lightning.checkpointing import saving
from ls_strategy.lightning.checkpointing.saving import Saves
from tests.unit.run_states import run_state


def saves_of(*, rank: int = 0, module: Any = None, io: Any = None, **checkpoint: Any) -> Saves:
    strategy: Any = SimpleNamespace(
        checkpoint_io=io or TorchCheckpointIO(), all_interrupted=lambda: False, _alone=False
    )
    setup: Any = SimpleNamespace(state_dict_hooks=None)
    loop: Any = SimpleNamespace(state=dict)
    resume: Any = SimpleNamespace(history=dict)
    run = run_state(ZeROConfig.of(3, checkpoint=CheckpointConfig(**checkpoint)), rank=rank, module=module)
    return Saves(run, strategy, loop, setup, resume)


class Saver:
    """A background saver: `then` runs an action when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.actions: list[Any] = []
        self.closed = False

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def then(self, action: Any) -> None:
        self.actions.append(action)

    def close(self) -> None:
        self.closed = True


def fail() -> None:
    raise CheckpointError("the disk is full")


@pytest.mark.parametrize("continues", [False, True])
def test_an_error_is_raised_or_logged_where_training_continues(continues: bool) -> None:
    saves = saves_of(**({"on_error": "continue"} if continues else {}))
    said = pytest.warns(UserWarning, match="disk is full Training continues")
    with said if continues else pytest.raises(CheckpointError, match="disk is full"), saves.tolerating():
        fail()
    assert saves.failed
    with saves.tolerating():
        pass
    assert not saves.failed


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    paths: list[Any] = []
    monkeypatch.setattr(saving, "remove_checkpoint", paths.append)
    return paths


@pytest.mark.parametrize(
    ("rank", "failed", "expected"),
    [(0, False, ["old.ckpt"]), (0, True, []), (1, False, [])],
    ids=["at once", "not after a failed save", "not on rank 1"],
)
def test_a_checkpoint_is_removed_without_a_background_save(
    removed: list[Any], rank: int, failed: bool, expected: list[str]
) -> None:
    saves = saves_of(rank=rank)
    saves.failed = failed
    saves.remove("old.ckpt")
    assert removed == expected


def test_a_checkpoint_is_removed_when_the_background_save_is_committed(removed: list[Any]) -> None:
    saves = saves_of()
    saves._saver = saver = Saver()  # type: ignore[assignment]
    saves.remove("old.ckpt")
    assert removed == []
    for action in saver.actions:
        action()
    assert removed == ["old.ckpt"]


def test_what_cannot_be_removed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "remove_checkpoint", lambda _: fail())
    with pytest.warns(UserWarning, match="A checkpoint was not removed. the disk is full"):
        saves_of().remove("old.ckpt")


def test_a_users_plugin_removes_its_own_files() -> None:
    removed: list[Any] = []
    saves_of(io=SimpleNamespace(remove_checkpoint=removed.append), format="file").remove("old.ckpt")
    assert removed == ["old.ckpt"]


def test_a_link_to_itself_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked: list[Any] = []
    monkeypatch.setattr(saving, "link_checkpoint", lambda *paths: linked.append(paths))
    saves, path = saves_of(), str(tmp_path / "a.ckpt")
    saves.link(None, path, path)  # type: ignore[arg-type]
    assert linked == []
    saves.link(None, path, str(tmp_path / "last.ckpt"))  # type: ignore[arg-type]
    assert linked == [(path, str(tmp_path / "last.ckpt"))]


@pytest.mark.parametrize("quietly", [False, True])
def test_the_end_of_a_run_raises_what_a_background_save_raises_or_logs_it(quietly: bool) -> None:
    saves = saves_of()
    saves._saver = saver = Saver(CheckpointError("the disk is full"))  # type: ignore[assignment]
    words = "disk is full"
    with pytest.warns(UserWarning, match=words) if quietly else pytest.raises(CheckpointError, match=words):
        saves.close(quietly=quietly)
    assert saver.closed


def test_no_checkpoint_is_collected_after_an_exception_on_this_rank_only() -> None:
    saves = saves_of(module=SimpleNamespace(trainer=SimpleNamespace(interrupted=True)))
    with pytest.warns(UserWarning, match="No checkpoint is saved"), saves.collecting() as wanted:
        assert not wanted


def test_weights_without_an_engine_are_the_modules() -> None:
    assert saves_of(module=nn.Linear(2, 1)).weights().keys() == {"weight", "bias"}


def test_nothing_is_removed_after_a_failed_save_while_snapshots_go_on(tmp_path: Path) -> None:
    """Snapshots have a saver in the background even where checkpoints are saved at once."""
    saves = saves_of(on_error="continue")
    saver: Any = Saver()
    saves._saver = saver
    with pytest.warns(UserWarning, match="disk is full"), saves.tolerating():
        fail()
    saves.remove(tmp_path / "old.ckpt")
    assert saver.actions == []
    with saves.tolerating():
        pass
    saves.remove(tmp_path / "old.ckpt")
    assert len(saver.actions) == 1
