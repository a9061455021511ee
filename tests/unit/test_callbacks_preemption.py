"""`PreemptionHandler` on one rank: when ranks agree, what a stop does, and whose signal handlers are installed."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from ls_strategy.errors import CheckpointError, ConfigError
from ls_strategy.extras.callbacks import preemption as preemption_file
from ls_strategy.extras.callbacks.continued import Continued
from ls_strategy.extras.callbacks.preemption import Preempted, PreemptionHandler
from ls_strategy.lightning.strategy import ZeROStrategy

MODULE: Any = nn.Linear(1, 1)
NEVER = 1e6
"""Seconds between agreements, of which there is none but the first."""


class Clock:
    """Time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = time


class Strategy:
    """Writes checkpoints as empty files, and notes which were removed."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def broadcast(self, value: Any) -> Any:
        return value if value is not None else ([], Continued())  # rank 0 has found nothing

    def remove_checkpoint(self, path: str) -> None:
        self.removed.append(Path(path).name)
        Path(path).unlink()


class Sharded(ZeROStrategy):
    """The same with ranks that agree through the engine; ``theirs`` is what the others say."""

    save_failed: Any = False

    def __init__(self, theirs: list[list[int]]) -> None:
        super().__init__(1)
        self.theirs, self.mine = theirs, list[list[int]]()
        self.waited = 0

    def require_engine(self) -> Any:
        def agree(values: Tensor) -> Tensor:
            self.mine.append(values.tolist())
            return values.maximum(torch.tensor(self.theirs.pop(0))) if self.theirs else values

        return SimpleNamespace(mesh=SimpleNamespace(world=SimpleNamespace(agree=agree)))

    def wait_for_saves(self) -> None:
        self.waited += 1

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if obj is not None else ([], Continued())

    def remove_checkpoint(self, filepath: Any) -> None:
        pass


class Connector:
    """Notes the checkpoints that a fit reads."""

    def __init__(self, resumed: list[str | None]) -> None:
        self._resumed = resumed
        self.weights_only: list[bool | None] = []

    def resume_start(self, checkpoint_path: str | None = None, weights_only: bool | None = None) -> None:
        self._resumed.append(checkpoint_path)
        self.weights_only.append(weights_only)


class Trainer:
    """What the callback uses of a Trainer, with Lightning's connectors as plain objects."""

    def __init__(self, folder: Path, handler: PreemptionHandler, strategy: Any = None) -> None:
        self.default_root_dir = str(folder)
        self.strategy = strategy or Strategy()
        self.callbacks: list[Any] = [handler, "another"]
        self.global_step, self.global_rank, self.world_size = 0, 0, 1
        self.is_global_zero, self.fast_dev_run = True, False
        self._signal_connector = SimpleNamespace()
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace())
        self.resumed: list[str | None] = []
        self._checkpoint_connector = Connector(self.resumed)

    def save_checkpoint(self, path: str, *, weights_only: bool) -> None:
        assert not weights_only
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()

    def restore(self, ckpt_path: str | None = None) -> list[str | None]:
        """Start the fit as Lightning does, and return the checkpoints it reads."""
        self._checkpoint_connector.resume_start(ckpt_path)
        return self.resumed


class Run:
    """A fit with a handler; training steps take a second of the clock."""

    def __init__(self, clock: Clock, folder: Path, strategy: Any = None, **options: Any) -> None:
        self.clock, self.folder = clock, folder
        self.handler = PreemptionHandler(**{"check_every_s": 0, **options})
        self.trainer: Any = Trainer(folder, self.handler, strategy)

    def setup(self) -> Run:
        self.handler.setup(self.trainer, MODULE, "fit")
        return self

    def start(self) -> Run:
        self.setup()
        self.handler.on_train_start(self.trainer, MODULE)
        return self

    def step(self, *, seconds: float = 1.0) -> None:
        self.clock.now += seconds
        self.trainer.global_step += 1
        self.batch_end()

    def batch_end(self) -> None:
        self.handler.on_train_batch_end(self.trainer, MODULE, None, None, 0)

    def status(self) -> int:
        """Return the status with which the next step ends the process."""
        with pytest.raises(Preempted) as end:
            self.step()
        return int(end.value.code or 0)

    def end(self) -> None:
        self.trainer._signal_connector.teardown()

    def saved(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.ckpt"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(preemption_file, "time", made)
    return made


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No job, and signal handlers as before."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A job 7 without a time limit, which SLURM requeues on request."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    state = SimpleNamespace(end=None, running=True, problem=None, requeued=0)

    def requeue(_: Any) -> str | None:
        state.requeued += state.problem is None
        return state.problem

    monkeypatch.setattr(preemption_file.slurm_job, "end_time", lambda _: state.end)
    monkeypatch.setattr(preemption_file.slurm_job, "start_time", lambda _: None)
    monkeypatch.setattr(preemption_file.slurm_job, "is_running", lambda _: state.running)
    monkeypatch.setattr(preemption_file.slurm_job, "requeue", requeue)
    return state


def send(number: int) -> None:
    os.kill(os.getpid(), number)


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_after_the_step_and_ends_the_process(clock: Clock, tmp_path: Path, number: int) -> None:
    run = Run(clock, tmp_path).start()
    run.step()
    send(number)
    assert run.saved() == []
    assert run.status() == 128 + number
    assert run.saved() == ["preemption/local/step=2.ckpt"]


def test_only_the_given_signals_stop(clock: Clock, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = Run(clock, tmp_path, signals=["SIGUSR2"]).start()
    assert signal.getsignal(signal.SIGTERM) is before
    send(signal.SIGUSR2)
    assert run.status() == 128 + signal.SIGUSR2


def test_the_end_of_a_fit_restores_the_users_handlers(clock: Clock, tmp_path: Path) -> None:
    def mine(*_: Any) -> None:
        """A handler of the user."""

    signal.signal(signal.SIGTERM, mine)
    run = Run(clock, tmp_path).start()
    assert signal.getsignal(signal.SIGTERM) != mine
    run.end()
    assert signal.getsignal(signal.SIGTERM) is mine


@pytest.mark.parametrize("in_a_job", [True, False])
def test_slurms_signal_after_a_fit_ends_no_process_of_a_job(
    clock: Clock, tmp_path: Path, request: pytest.FixtureRequest, in_a_job: bool
) -> None:
    """A job whose training is complete and which tests or exports now, or ends, would count as failed."""
    if in_a_job:
        request.getfixturevalue("slurm")
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    Run(clock, tmp_path).start().end()
    if in_a_job:
        send(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "SIGTERM ends it"
    else:
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_lightning_registers_no_handlers_until_the_end_of_the_fit(clock: Clock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path).setup()
    run.trainer._signal_connector.register_signal_handlers()  # does nothing
    run.trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    run.end()
    assert vars(run.trainer._signal_connector) == vars(run.trainer.fit_loop.epoch_loop) == {}


def test_a_signal_before_the_fit_does_not_end_it(clock: Clock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path).setup()
    send(signal.SIGUSR1)
    run.end()
    run.start()
    run.step()


def test_a_signal_counts_in_a_job_as_soon_as_there_is_a_handler(
    clock: Clock, tmp_path: Path, slurm: SimpleNamespace
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = Run(clock, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before  # there is nothing to save yet
    send(signal.SIGUSR1)
    run.start()
    assert run.status() == 0
    assert slurm.requeued == 1


def test_a_fit_in_another_thread_is_a_warning(clock: Clock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.warns(UserWarning, match="main thread only"), ThreadPoolExecutor(1) as pool:
        pool.submit(run.setup).result()
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_a_fit_installs_handlers_and_is_the_last_of_the_callbacks_then(clock: Clock, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = Run(clock, tmp_path)
    run.handler.setup(run.trainer, MODULE, "validate")
    assert signal.getsignal(signal.SIGTERM) is before
    assert run.trainer.callbacks == [run.handler, "another"]
    run.setup()
    assert run.trainer.callbacks == ["another", run.handler]


# --- agreements -------------------------------------------------------------------------------------------------------


def agreements(run: Run, count: int, *, seconds: float = 1.0) -> list[int]:
    """Return the steps after which the ranks agreed."""
    found, agree = [], run.handler._agree

    def noted(trainer: Any) -> tuple[int, bool]:
        found.append(trainer.global_step)
        return agree(trainer)

    run.handler._agree = noted  # type: ignore[method-assign]
    for _ in range(count):
        run.step(seconds=seconds)
    return found


@pytest.mark.parametrize(
    ("every_s", "seconds", "steps", "expected"),
    [
        (0, 1.0, 7, [1, 2, 3, 4, 5, 6, 7]),
        (3, 1.0, 7, [1, 4, 7]),
        (3, 2.0, 7, [1, 2, 3, 4, 5, 6, 7]),
        (3, 1.5, 7, [1, 3, 5, 7]),
        (NEVER, 1.0, 202, [1, 101, 201]),
    ],
    ids=str,
)
def test_ranks_agree_in_steps_of_about_the_given_seconds_and_after_a_hundred_at_the_latest(
    clock: Clock, tmp_path: Path, every_s: float, seconds: float, steps: int, expected: list[int]
) -> None:
    assert agreements(Run(clock, tmp_path, check_every_s=every_s).start(), steps, seconds=seconds) == expected


def test_the_next_agreement_follows_the_slowest_rank(clock: Clock, tmp_path: Path) -> None:
    strategy = Sharded([[0, 0, 2_000_000], [0, 0, 4_000_000], [0, 0, 0]])
    run = Run(clock, tmp_path, strategy, check_every_s=4).start()
    assert agreements(run, 8) == [1, 3, 4, 8]
    assert strategy.mine == [[0, 0, 1_000_000]] * 4


def test_ranks_agree_at_the_step_after_a_validation(clock: Clock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path, check_every_s=NEVER).start()
    assert agreements(run, 3) == [1]
    run.handler.on_validation_end(run.trainer, MODULE)
    send(signal.SIGTERM)
    assert run.status() == 143


def test_a_batch_that_accumulates_is_no_step(clock: Clock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path).start()
    run.step()
    send(signal.SIGTERM)
    run.batch_end()
    assert run.saved() == []
    assert run.status() == 143


def test_a_signal_of_another_rank_stops_this_one(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = Sharded([[signal.SIGUSR1 << 32 | 70_000, 0, 0]])
    run = Run(clock, tmp_path, strategy).start()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        assert run.status() == 128 + signal.SIGUSR1
    assert "rank 70000 received SIGUSR1" in caplog.text
    assert strategy.waited == 1


def test_this_ranks_signal_is_sent_with_its_number(clock: Clock, tmp_path: Path) -> None:
    strategy = Sharded([])
    run = Run(clock, tmp_path, strategy).start()
    run.trainer.global_rank = 3
    send(signal.SIGTERM)
    assert run.status() == 143
    assert strategy.mine[0][:2] == [signal.SIGTERM << 32 | 3, 0]


# --- the end of the job -----------------------------------------------------------------------------------------------


def steps_before(run: Run) -> int:
    """Return how many steps of a second are made before the run stops."""
    run.start()
    with pytest.raises(Preempted):
        agreements(run, 10_000)
    return run.trainer.global_step


@pytest.mark.parametrize(("seconds", "minutes", "expected"), [(1000, 5, 750), (1000, 2, 880), (1200, 5, 900)])
def test_a_run_stops_before_the_end_of_its_job_but_not_in_its_first_three_quarters(
    clock: Clock, tmp_path: Path, slurm: SimpleNamespace, seconds: int, minutes: float, expected: int
) -> None:
    slurm.end = clock.now + seconds
    assert steps_before(Run(clock, tmp_path, minutes_before_end=minutes)) == expected


@pytest.mark.parametrize(
    ("options", "rank"), [({"minutes_before_end": 0}, 0), ({}, 1)], ids=["signals only", "only rank 0 reads it"]
)
def test_the_end_of_the_job_is_not_looked_at(
    clock: Clock, tmp_path: Path, slurm: SimpleNamespace, options: dict[str, Any], rank: int
) -> None:
    slurm.end = clock.now + 10
    run = Run(clock, tmp_path, **options)
    run.trainer.is_global_zero = rank == 0
    run.start()
    for _ in range(20):
        run.step()


# --- requeueing -------------------------------------------------------------------------------------------------------


def status_after(run: Run, number: int) -> int:
    run.start()
    send(number)
    return run.status()


@pytest.mark.parametrize(
    ("number", "running", "options", "status"),
    [
        (signal.SIGUSR1, False, {}, 0),
        (signal.SIGTERM, True, {}, 0),
        (signal.SIGTERM, False, {}, 143),
        (signal.SIGUSR1, False, {"requeue": False}, 128 + signal.SIGUSR1),
    ],
)
def test_a_job_is_requeued_but_for_a_sigterm_that_ends_it_or_if_that_is_not_wanted(
    clock: Clock, tmp_path: Path, slurm: SimpleNamespace, number: int, running: bool, options: Any, status: int
) -> None:
    slurm.running = running
    assert status_after(Run(clock, tmp_path, **options), number) == status
    assert slurm.requeued == (status == 0)


def test_a_job_that_slurm_does_not_requeue_is_a_warning(clock: Clock, tmp_path: Path, slurm: SimpleNamespace) -> None:
    slurm.problem = "no permission"
    with pytest.warns(UserWarning, match="could not be requeued: no permission"):
        assert status_after(Run(clock, tmp_path), signal.SIGUSR1) == 128 + signal.SIGUSR1


def test_only_rank_0_requeues_and_all_take_its_answer(clock: Clock, tmp_path: Path, slurm: SimpleNamespace) -> None:
    run = Run(clock, tmp_path, Sharded([[0, 0, 0], [1]]))
    run.trainer.is_global_zero = False
    assert status_after(run, signal.SIGUSR1) == 0
    assert slurm.requeued == 0


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_job_has_a_folder_of_its_own(clock: Clock, tmp_path: Path, slurm: SimpleNamespace) -> None:
    status_after(Run(clock, tmp_path), signal.SIGUSR1)
    assert Run(clock, tmp_path).saved() == ["preemption/7/step=1.ckpt"]


@pytest.mark.parametrize(("step", "removed"), [(5, ["step=1.ckpt"]), (0, [])], ids=["newer", "of the same step"])
def test_a_newer_checkpoint_replaces_the_older_one(clock: Clock, tmp_path: Path, step: int, removed: list[str]) -> None:
    status_after(Run(clock, tmp_path), signal.SIGUSR1)
    run = Run(clock, tmp_path).start()
    run.trainer.global_step = step
    send(signal.SIGUSR1)
    run.status()
    assert run.trainer.strategy.removed == removed
    assert run.saved() == [f"preemption/local/step={step + 1}.ckpt"]


@pytest.mark.parametrize(("options", "left"), [({}, 0), ({"dirpath": "mine"}, 1)], ids=str)
def test_a_complete_training_removes_the_checkpoint_of_its_default_folder(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], left: int
) -> None:
    monkeypatch.chdir(tmp_path)
    status_after(Run(clock, tmp_path, **options), signal.SIGUSR1)
    run = Run(clock, tmp_path, **options).start()
    run.handler.on_fit_end(run.trainer, MODULE)
    assert len(run.saved()) == left


def test_a_complete_training_in_a_job_keeps_its_checkpoint(
    clock: Clock, tmp_path: Path, slurm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_after(Run(clock, tmp_path), signal.SIGUSR1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = Run(clock, tmp_path).start()
    run.handler.on_fit_end(run.trainer, MODULE)
    assert run.saved() == ["preemption/7/step=1.ckpt"]


def test_other_files_of_a_given_folder_are_not_this_callbacks(clock: Clock, tmp_path: Path) -> None:
    for name in ("last.ckpt", "step=1.txt"):
        (tmp_path / name).touch()
    run = Run(clock, tmp_path, dirpath=tmp_path)
    status_after(run, signal.SIGUSR1)
    assert run.trainer.strategy.removed == []
    assert run.saved() == ["last.ckpt", "step=1.ckpt"]


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The folders that were searched; ``new.ckpt`` is the newest checkpoint."""
    searched: list[list[str]] = []
    monkeypatch.setattr(
        preemption_file, "newest_readable", lambda folders: searched.append(folders) or Continued("new.ckpt")
    )
    return searched


@pytest.mark.parametrize("mine", [None, "mine.ckpt"])
def test_a_run_resumes_from_the_newest_checkpoint_of_all_folders_unless_the_user_names_one(
    clock: Clock, tmp_path: Path, found: list[list[str]], mine: str | None
) -> None:
    run = Run(clock, tmp_path)
    run.trainer.callbacks.append(ModelCheckpoint(tmp_path / "kept"))
    run.setup()
    assert run.trainer.restore(mine) == [mine or "new.ckpt"]
    assert mine or found == [[str(tmp_path / "preemption" / "local"), str(tmp_path / "kept")]]


@pytest.mark.parametrize("given", [None, "mine.ckpt"])
@pytest.mark.parametrize("weights_only", [None, False, True])
def test_what_the_user_allows_holds_for_the_file_that_the_user_names(
    clock: Clock, tmp_path: Path, found: list[list[str]], given: str | None, weights_only: bool | None
) -> None:
    connector = Run(clock, tmp_path).setup().trainer._checkpoint_connector
    connector.resume_start(given, weights_only=weights_only)
    assert connector.weights_only == [True if given is None else weights_only]


@pytest.mark.parametrize(
    ("step", "fast", "resume"),
    [(3, False, True), (0, True, True), (0, False, False)],
    ids=["later", "fast", "unwanted"],
)
def test_a_run_does_not_resume(
    clock: Clock, tmp_path: Path, found: list[list[str]], step: int, fast: bool, resume: bool
) -> None:
    run = Run(clock, tmp_path)
    run.trainer.global_step, run.trainer.fast_dev_run, run.handler.resume = step, fast, resume
    assert run.setup().trainer.restore() == [None]
    assert found == []


# --- saves that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newest", "requeued", "words"),
    [
        ("start.ckpt", 0, "Nothing newer than the start of this run"),
        (None, 0, "Nothing newer than the start of this run"),
        ("kept.ckpt", 1, "kept.ckpt is the newest checkpoint. The job is requeued and continues from there"),
    ],
)
def test_a_job_is_requeued_after_a_failed_save_only_from_another_checkpoint(
    clock: Clock, tmp_path: Path, slurm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch,
    newest: str | None, requeued: int, words: str,
) -> None:  # fmt: skip
    answers = ["start.ckpt", newest]
    monkeypatch.setattr(preemption_file, "newest_readable", lambda _: Continued(answers.pop(0)))
    run = Run(clock, tmp_path).start()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(run.trainer, "save_checkpoint", fail)
    send(signal.SIGUSR1)
    with pytest.warns(UserWarning, match=f"no space left\n{words}"), pytest.raises(OSError, match="no space left"):
        run.step()
    assert slurm.requeued == requeued
    assert run.trainer.strategy.removed == []


def test_a_save_that_failed_though_training_continues_elsewhere_is_an_error(clock: Clock, tmp_path: Path) -> None:
    strategy = Sharded([])
    strategy.save_failed = True
    run = Run(clock, tmp_path, strategy).start()
    send(signal.SIGTERM)
    words = r"step=1.ckpt was not saved"
    with pytest.warns(UserWarning, match=words), pytest.raises(CheckpointError, match=words):
        run.step()


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"signals": ["SIGTERM", "SIGTERN"]}, r"signals=\['SIGTERM', 'SIGTERN'\]\), but 'SIGTERN' is not a signal"),
        ({"check_every_s": -1}, "check_every_s=-1"),
        ({"minutes_before_end": -1}, "minutes_before_end=-1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PreemptionHandler(**options)
