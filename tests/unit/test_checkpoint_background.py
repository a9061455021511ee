"""Background saves of one rank: the state is that of the call, whatever training does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy import device as dev
from ls_strategy.checkpoint import background
from ls_strategy.checkpoint.background import BackgroundSaver, Hold
from ls_strategy.checkpoint.manifest import Manifest, is_committed
from ls_strategy.checkpoint.reshard import Contents, separate
from ls_strategy.checkpoint.save import Save
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.errors import CheckpointError
from tests.unit.fake_flats import FakeFlat, fake_flats, full_values, source_of


@pytest.fixture
def saver() -> Iterator[BackgroundSaver]:
    made = BackgroundSaver(0, 1, torch.device("cpu"))
    yield made
    made.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The thread begins to save when this is set."""
    event, plain = threading.Event(), background.run

    def waits(*args: Any) -> Any:
        assert event.wait(30)
        return plain(*args)

    monkeypatch.setattr(background, "run", waits)
    return event


def write_meta(_first: object, meta: dict[str, Any], path: str) -> None:
    torch.save(meta, path)


def job(path: Path, flat: FakeFlat, meta: dict[str, Any], *, at_rest: bool) -> Save:
    contents = Contents()
    weights = {"a": contents.stand_in(source_of(flat, 0, at_rest=at_rest), torch.float32), "step": torch.tensor(1.0)}
    entries, _ = separate({"state_dict": weights}, contents)
    manifest = Manifest(step=1, epoch=0, layout={}, files={})
    return Save(str(path), entries, {}, manifest, partial(write_meta, None, meta), None)


def nothing(_bytes: int, _seconds: float) -> None:
    """After the commit."""


def first_rank() -> FakeFlat:
    """A rank that owns ten of the elements of the first parameter."""
    return fake_flats()[0]


def saved(path: Path, flat: FakeFlat) -> torch.Tensor:
    """What was saved of the first parameter: this rank's part."""
    return read_checkpoint(path)["state_dict"]["a"].range(0, flat.owned[1])


def expected(flat: FakeFlat) -> torch.Tensor:
    return full_values()["a"].flatten()[: flat.owned[1]]


def test_its_thread_uses_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    own, selected = torch.device("cuda", 3), []
    monkeypatch.setattr(dev, "select", lambda device: selected.append((threading.current_thread().name, device)))
    saver = BackgroundSaver(0, 1, own)
    saver.then(lambda: None)
    saver.close()
    assert selected == [("ls_strategy_save_0", own)]


def test_a_state_on_the_device_is_copied_at_the_call(tmp_path: Path, saver: BackgroundSaver, gate: Any) -> None:
    flat = first_rank()
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, at_rest=False), nothing)
    flat.master.zero_()
    gate.set()
    saver.wait()
    assert torch.equal(saved(tmp_path / "x.ckpt", flat), expected(flat))


def test_an_offloaded_state_is_copied_before_it_changes(tmp_path: Path, saver: BackgroundSaver, gate: Any) -> None:
    flat = first_rank()
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, at_rest=True), nothing)
    flat.hold.release()  # as the optimizer step does
    flat.master.zero_()
    gate.set()
    saver.wait()
    assert torch.equal(saved(tmp_path / "x.ckpt", flat), expected(flat))


def test_a_state_on_nvme_makes_the_step_wait(tmp_path: Path, saver: BackgroundSaver, gate: Any) -> None:
    flat = first_rank()
    flat.optimizer_tier = "nvme"
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, at_rest=True), nothing)
    step = threading.Thread(target=flat.hold.release)
    step.start()
    step.join(0.2)
    assert step.is_alive(), "the step must wait until the save has read the state"
    gate.set()
    step.join(30)
    assert not step.is_alive()
    saver.wait()


def test_a_hold_ends_with_the_save(tmp_path: Path, saver: BackgroundSaver) -> None:
    flat = first_rank()
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, at_rest=True), nothing)
    saver.wait()
    assert flat.hold is None


def test_a_later_hold_stays_when_an_earlier_one_ends() -> None:
    flat = first_rank()
    first, second = Hold(flat), Hold(flat)  # type: ignore[arg-type]
    flat.hold = second
    first.finish()
    assert flat.hold is second


def test_what_callbacks_gave_is_copied_at_the_call(tmp_path: Path, saver: BackgroundSaver, gate: Any) -> None:
    meta = {"callbacks": {"x": [1]}}
    saver.submit(job(tmp_path / "x.ckpt", first_rank(), meta, at_rest=False), nothing)
    meta["callbacks"]["x"].append(2)
    gate.set()
    saver.wait()
    assert read_checkpoint(tmp_path / "x.ckpt")["callbacks"] == {"x": [1]}


def test_done_is_called_after_the_commit(tmp_path: Path, saver: BackgroundSaver) -> None:
    seen: list[bool] = []
    path = tmp_path / "x.ckpt"
    saver.submit(job(path, first_rank(), {}, at_rest=False), lambda nbytes, s: seen.append(is_committed(path)))
    saver.wait()
    assert seen == [True]


def test_a_failure_is_raised_by_wait_once(tmp_path: Path, saver: BackgroundSaver) -> None:
    (tmp_path / "x.ckpt").write_text("not a checkpoint")
    saver.submit(job(tmp_path / "x.ckpt", first_rank(), {}, at_rest=True), nothing)
    with pytest.raises(CheckpointError, match="failed: rank 0"):
        saver.wait()
    saver.wait()


def test_actions_run_after_a_save_that_succeeds(tmp_path: Path, saver: BackgroundSaver, gate: Any) -> None:
    path, seen = tmp_path / "x.ckpt", []
    saver.submit(job(path, first_rank(), {}, at_rest=False), nothing)
    saver.then(lambda: seen.append(is_committed(path)))
    assert seen == []
    gate.set()
    saver.wait()
    assert seen == [True]


def test_actions_are_skipped_after_a_save_that_fails(tmp_path: Path, saver: BackgroundSaver) -> None:
    (tmp_path / "x.ckpt").write_text("not a checkpoint")
    seen: list[int] = []
    saver.submit(job(tmp_path / "x.ckpt", first_rank(), {}, at_rest=True), nothing)
    saver.then(lambda: seen.append(1))
    with pytest.raises(CheckpointError):
        saver.wait()
    assert seen == []


def test_an_action_that_fails_does_not_end_training(saver: BackgroundSaver, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise OSError("cannot remove")

    saver.then(fails)
    saver.wait()
    assert "cannot remove" in caplog.text


@pytest.mark.parametrize("at_rest", [False, True])
def test_copies_of_the_next_save_use_the_same_memory(
    tmp_path: Path, saver: BackgroundSaver, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, at_rest: bool
) -> None:
    """New memory costs page faults, for which an update that copies what it changes would wait, too."""
    made: list[int] = []
    plain = background.host_empty
    monkeypatch.setattr(background, "host_empty", lambda numel, *args: (made.append(numel), plain(numel, *args))[1])
    flat = first_rank()
    for number in range(3):
        gate.clear()
        path = tmp_path / f"{number}.ckpt"
        saver.submit(job(path, flat, {}, at_rest=at_rest), nothing)
        if at_rest:
            flat.hold.release()
        gate.set()
        saver.wait()
        assert torch.equal(saved(path, flat), expected(flat))
    assert len(made) == 1
