"""Background saves of one rank: the state is that of the call, whatever training does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
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


def opened_by(event: threading.Event, plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, which begins when the event is set."""

    def waits(*args: Any) -> Any:
        assert event.wait(30)
        return plain(*args)

    return waits


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The thread begins to copy and to save when this is set."""
    event = threading.Event()
    monkeypatch.setattr(Hold, "copy_ahead", opened_by(event, Hold.copy_ahead))
    monkeypatch.setattr(background, "run", opened_by(event, background.run))
    return event


def write_meta(_first: object, meta: dict[str, Any], path: str) -> None:
    torch.save(meta, path)


def job(path: Path, flat: FakeFlat, meta: dict[str, Any], *, guarded: bool) -> Save:
    contents = Contents()
    weights = {"a": contents.stand_in(source_of(flat, 0, guarded=guarded), torch.float32), "step": torch.tensor(1.0)}
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


def test_what_may_change_without_a_notice_is_copied_at_the_call(
    tmp_path: Path, saver: BackgroundSaver, gate: Any
) -> None:
    """States, and what callbacks gave."""
    flat, meta = first_rank(), {"callbacks": {"x": [1]}}
    saver.submit(job(tmp_path / "x.ckpt", flat, meta, guarded=False), nothing)
    flat.master.zero_()
    meta["callbacks"]["x"].append(2)
    gate.set()
    saver.wait()
    assert torch.equal(saved(tmp_path / "x.ckpt", flat), expected(flat))
    assert read_checkpoint(tmp_path / "x.ckpt")["callbacks"] == {"x": [1]}


@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_a_guarded_state_is_copied_before_it_changes(
    tmp_path: Path, saver: BackgroundSaver, gate: Any, tier: str
) -> None:
    flat = first_rank()
    flat.optimizer_tier = tier
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, guarded=True), nothing)
    flat.hold.release()  # as the optimizer step does
    flat.master.zero_()
    gate.set()
    saver.wait()
    assert torch.equal(saved(tmp_path / "x.ckpt", flat), expected(flat))


def test_a_guarded_state_may_change_as_soon_as_it_is_copied(
    tmp_path: Path, saver: BackgroundSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may take as long as it likes: an update finds no hold."""
    copied, written, flat = threading.Event(), threading.Event(), first_rank()
    plain = opened_by(written, background.run)
    monkeypatch.setattr(background, "run", lambda *args: (copied.set(), plain(*args))[1])
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, guarded=True), nothing)
    assert copied.wait(30)
    assert flat.hold is None
    flat.master.zero_()
    written.set()
    saver.wait()
    assert torch.equal(saved(tmp_path / "x.ckpt", flat), expected(flat))


def test_a_step_waits_for_the_box_that_the_thread_copies(
    tmp_path: Path, saver: BackgroundSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has begun to copy, and is slow: an update that did not wait would overtake it."""
    begun, slow, flat = threading.Event(), threading.Event(), first_rank()
    plain = background._Held.copy

    def copy(self: Any, number: int) -> None:
        if threading.current_thread().name.startswith("ls_strategy_save"):
            begun.set()
            assert slow.wait(30)
        plain(self, number)

    monkeypatch.setattr(background._Held, "copy", copy)
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, guarded=True), nothing)
    assert begun.wait(30)
    step = threading.Thread(target=lambda: (flat.hold.release(), flat.master.zero_()))
    step.start()
    step.join(0.2)
    assert step.is_alive(), "the step must wait until the box is copied"
    slow.set()
    step.join(30)
    saver.wait()
    assert torch.equal(saved(tmp_path / "x.ckpt", flat), expected(flat))
    assert not flat.master.any()


def test_a_write_without_a_notice_fails_the_save(tmp_path: Path, saver: BackgroundSaver, gate: Any) -> None:
    """As by an updater of another package that does not call `before_change`: it would mix two steps."""
    flat = first_rank()
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, guarded=True), nothing)
    flat.master.zero_()
    gate.set()
    with pytest.raises(CheckpointError, match=r"buffer of 'a' were written to .*before_change was not called"):
        saver.wait()
    assert not (tmp_path / "x.ckpt").exists()


def test_a_state_that_cannot_be_copied_fails_the_save_and_not_the_step(
    tmp_path: Path, saver: BackgroundSaver, gate: Any
) -> None:
    flat = first_rank()
    wanted = job(tmp_path / "x.ckpt", flat, {}, guarded=True)
    wanted.entries[0].source.read = lambda *_: 1 / 0  # type: ignore[union-attr]
    saver.submit(wanted, nothing)
    flat.hold.release()
    assert flat.hold is None
    gate.set()
    with pytest.raises(CheckpointError, match="rank 0: ZeroDivisionError"):
        saver.wait()


def test_values_that_cannot_be_copied_fail_the_save_and_not_the_call(tmp_path: Path, saver: BackgroundSaver) -> None:
    """As of a callback on rank 0: the other ranks have to know."""
    saver.submit(job(tmp_path / "x.ckpt", first_rank(), {"lock": threading.Lock()}, guarded=True), nothing)
    with pytest.raises(CheckpointError, match=r"rank 0: TypeError: .*lock"):
        saver.wait()
    assert not (tmp_path / "x.ckpt").exists()


def test_tied_values_are_copied_once(tmp_path: Path, saver: BackgroundSaver, gate: Any) -> None:
    """Of two copies only one would be written, and on NVMe a step would wait for the other one to the end."""
    flat = first_rank()
    wanted = job(tmp_path / "x.ckpt", flat, {}, guarded=True)
    wanted.entries.append(replace(wanted.entries[0], path=("model", "tied")))
    saver.submit(wanted, nothing)
    assert len(flat.hold.sources) == 1
    gate.set()
    saver.wait()
    assert torch.equal(saved(tmp_path / "x.ckpt", flat), expected(flat))


def test_a_state_on_nvme_makes_the_step_wait(tmp_path: Path, saver: BackgroundSaver, gate: Any) -> None:
    flat = first_rank()
    flat.optimizer_tier = "nvme"
    saver.submit(job(tmp_path / "x.ckpt", flat, {}, guarded=True), nothing)
    step = threading.Thread(target=flat.hold.release)
    step.start()
    step.join(0.2)
    assert step.is_alive(), "the step must wait until the save has read the state"
    gate.set()
    step.join(30)
    assert not step.is_alive()
    saver.wait()


def test_a_later_hold_stays_when_an_earlier_one_ends() -> None:
    flat = first_rank()
    first, second = (Hold(flat, torch.device("cpu")) for _ in range(2))  # type: ignore[arg-type]
    flat.hold = second
    first.finish()
    assert flat.hold is second


def test_a_failure_is_raised_by_wait_once(tmp_path: Path, saver: BackgroundSaver) -> None:
    (tmp_path / "x.ckpt").write_text("not a checkpoint")
    saver.submit(job(tmp_path / "x.ckpt", first_rank(), {}, guarded=True), nothing)
    with pytest.raises(CheckpointError, match="failed: rank 0"):
        saver.wait()
    saver.wait()


@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_a_save_runs_after_its_commit_and_not_if_it_fails(
    tmp_path: Path, saver: BackgroundSaver, gate: Any, fails: bool
) -> None:
    path, seen, flat = tmp_path / "x.ckpt", [], first_rank()
    if fails:
        path.write_text("not a checkpoint")
    saver.submit(job(path, flat, {}, guarded=True), lambda nbytes, s: seen.append(is_committed(path)))
    saver.then(lambda: seen.append(is_committed(path)))
    assert seen == []
    gate.set()
    with pytest.raises(CheckpointError) if fails else nullcontext():
        saver.wait()
    assert seen == ([] if fails else [True, True])
    assert flat.hold is None


def test_an_action_that_fails_does_not_end_training(saver: BackgroundSaver, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise OSError("cannot remove")

    saver.then(fails)
    saver.wait()
    assert "cannot remove" in caplog.text


@pytest.mark.parametrize("guarded", [False, True])
def test_copies_of_the_next_save_use_the_same_memory(
    tmp_path: Path, saver: BackgroundSaver, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    """New memory costs page faults, for which an update that copies what it changes would wait, too."""
    made: list[int] = []
    plain = background.host_empty
    monkeypatch.setattr(background, "host_empty", lambda numel, *args: (made.append(numel), plain(numel, *args))[1])
    flat = first_rank()
    for number in range(3):
        gate.clear()
        path = tmp_path / f"{number}.ckpt"
        saver.submit(job(path, flat, {}, guarded=guarded), nothing)
        if guarded:
            flat.hold.release()
        gate.set()
        saver.wait()
        assert torch.equal(saved(path, flat), expected(flat))
    assert len(made) == 1
