"""`Monitor` on one rank with a clock of the test: what is logged, when, and from which steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn

from ls_strategy import spans
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.extras.callbacks import monitor as monitor_file
from ls_strategy.extras.callbacks.monitor import Monitor, _tokens, bytes_in_use
from ls_strategy.extras.callbacks.step_trace import RankTrace
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.spans import BACKWARD, DATA, FORWARD, SpanRecorder
from ls_strategy.spans import recorder as recorder_file
from tests.clocks import Clock

MIB = 1 << 20


class Strategy(ZeROStrategy):
    """A strategy with the readings of a run on four ranks, of which two train a replica together."""

    root_device: Any = torch.device("cpu")
    data_parallel_size: Any = 2
    loss_scale: Any = None
    skipped_steps: Any = 0
    exposed_step_s: Any = 0.0
    precision_policy: Any = SimpleNamespace(autocast=None, compute=torch.float32)
    traffic: Any = None
    tensor_parallel_traffic: Any = None
    context_parallel_traffic: Any = None

    def __init__(self, **options: Any) -> None:
        super().__init__(1, **options)
        self.traffic = self.context_parallel_traffic = SimpleNamespace(bytes={"all_gather": 0})
        self.tensor_parallel_traffic = SimpleNamespace(bytes={"all_reduce": 0})
        self.parallel = SimpleNamespace(replica_ranks=2, mesh=None)  # type: ignore[assignment]
        self.states = {"parameters": 3 * MIB, "gradients": 0}
        self.norms: list[Any] = []

    def memory_bytes(self) -> dict[str, int]:
        return dict(self.states)

    def grad_norm(self, norm_type: float = 2.0, *, optimizer: Any = None) -> Tensor:
        self.norms.append(optimizer)
        if optimizer == "without gradients":
            raise StateError("no gradients")
        return torch.tensor(float(len(self.norms)))


class Logger:
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows[step] = metrics


class Run:
    """A fit of one monitor: batches of 4 samples that take a second each."""

    def __init__(self, clock: Clock, monitor: Monitor, *, every: int = 2, loggers: int = 1, **options: Any) -> None:
        self.clock, self.monitor = clock, monitor
        self.strategy = Strategy(**options)
        self.logger, self.module = Logger(), nn.Linear(1, 1)
        self.module.automatic_optimization = True  # type: ignore[assignment]
        self.batch: Any = torch.ones(4, 3)
        self.trainer: Any = SimpleNamespace(
            strategy=self.strategy, callbacks=[monitor], global_step=0, log_every_n_steps=every,
            loggers=[self.logger] * loggers, optimizers=["only"], log_dir=None, default_root_dir=None,
            is_global_zero=True, max_steps=-1, estimated_stepping_batches=float("inf"),
        )  # fmt: skip

    def call(self, hook: str, *args: Any) -> None:
        getattr(self.monitor, hook)(self.trainer, self.module, *args)

    def start(self) -> Run:
        self.call("on_train_start")
        return self

    def step(self, *, steps: int = 1, optimizer: Any = "only") -> None:
        """Train on a batch: 0.1 s for data, 0.2 forward, 0.4 backward, 0.3 for everything else."""
        for phase, seconds in ((DATA, 0.1), (FORWARD, 0.2), (BACKWARD, 0.4)):
            with spans.phase(phase):
                self.clock.wait(seconds)
        self.clock.wait(0.3)
        if steps:
            self.call("on_before_optimizer_step", optimizer)
        self.trainer.global_step += steps
        self.call("on_train_batch_end", None, self.batch, 0)

    def steps(self, count: int) -> dict[int, dict[str, float]]:
        for _ in range(count):
            self.step()
        return self.rows

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        return self.logger.rows


@pytest.fixture(autouse=True)
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of the hooks around fetches of batches."""
    events: list[str] = []

    def around(trainer: Any, before: Any, after: Any) -> Any:
        events.append("begin")
        return lambda: events.append("end")

    monkeypatch.setattr(monitor_file, "around_fetches", around)
    return events


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock(100.0)
    monkeypatch.setattr(monitor_file, "time", made)
    monkeypatch.setattr(recorder_file, "time", made)
    yield made
    if SpanRecorder.active is not None:
        SpanRecorder.active.stop()


# --- when -------------------------------------------------------------------------------------------------------------


def test_every_logger_gets_the_scalars_at_the_end_of_every_interval(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, steps = Run(clock, Monitor(), every=3, loggers=2), []
    monkeypatch.setattr(run.logger, "log_metrics", lambda metrics, step: steps.append(step))
    run.start().steps(7)
    assert steps == [3, 3, 6, 6]


def test_batches_without_a_step_belong_to_the_next_step(clock: Clock) -> None:
    run = Run(clock, Monitor(), every=1).start()
    run.step(steps=0)
    assert run.rows == {}
    run.step()
    assert run.rows[1]["zero_time/step_ms"] == pytest.approx(2000)
    assert run.rows[1]["zero/samples_per_s"] == pytest.approx(2 * 2 * 4 / 2)


def test_an_interval_ends_after_a_batch_of_several_steps(clock: Clock) -> None:
    run = Run(clock, Monitor(), every=3).start()
    for _ in range(4):
        run.step(steps=2)
    assert run.rows.keys() == {4, 8}
    assert run.rows[8]["zero_time/step_ms"] == pytest.approx(500)


@pytest.mark.parametrize("options", [{"loggers": 0}, {"every": 0}], ids=str)
def test_nothing_is_logged_where_lightning_logs_nothing(clock: Clock, options: dict[str, int]) -> None:
    run = Run(clock, Monitor(), **options).start()
    assert run.steps(60) == {}
    assert run.strategy.norms == []


def test_intervals_of_a_resumed_run_begin_at_its_step(clock: Clock) -> None:
    run = Run(clock, Monitor(), every=4)
    run.trainer.global_step = 3
    assert run.start().steps(4).keys() == {7}


# --- speed ------------------------------------------------------------------------------------------------------------


def test_phases_of_a_step_add_up(clock: Clock) -> None:
    row = Run(clock, Monitor()).start().steps(2)[2]
    expected = {"step": 1000, "forward": 200, "backward": 400, "data": 100, "other": 300}
    assert {name: row[f"zero_time/{name}_ms"] for name in expected} == pytest.approx(expected)
    assert row["zero_time_share/backward"] == pytest.approx(0.4)


def test_samples_and_tokens_are_those_of_all_replicas(clock: Clock) -> None:
    run = Run(clock, Monitor()).start()
    rows = run.steps(4)
    assert [row["zero/samples_per_s"] for row in rows.values()] == pytest.approx([8, 8])
    assert "zero/tokens_per_s" not in rows[2]
    run.batch = {"ids": torch.zeros(4, 16, dtype=torch.int64)}
    assert run.steps(2)[6]["zero/tokens_per_s"] == pytest.approx(2 * 4 * 16)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(4, 16, dtype=torch.int64), 64),
        ([torch.zeros(4, 16, dtype=torch.int32), torch.zeros(4)], 64),
        ([torch.zeros(4, 16), torch.zeros(4, 16, dtype=torch.int64)], 0),
        (torch.zeros(4, 16, dtype=torch.uint8), 0),
        (torch.zeros(4, dtype=torch.int64), 0),
        (torch.zeros(4, 2, 2, dtype=torch.int64), 0),
        (["text"], 0),
    ],
)
def test_tokens_are_the_elements_of_a_first_tensor_of_ids(batch: Any, tokens: int) -> None:
    assert _tokens(batch) == tokens


def test_a_batch_without_tensors_has_no_samples_and_trains_on(clock: Clock) -> None:
    run = Run(clock, Monitor())
    run.batch = ["text", "text"]
    row = run.start().steps(2)[2]
    assert "zero/samples_per_s" not in row
    assert row["zero_time/step_ms"] == pytest.approx(1000)


def test_bytes_are_those_of_the_interval_and_a_meter_counts_once(clock: Clock) -> None:
    run = Run(clock, Monitor())
    run.strategy.traffic.bytes["all_gather"] = 5 * MIB
    run.start()
    run.strategy.traffic.bytes["all_gather"] += 4 * MIB
    run.strategy.tensor_parallel_traffic.bytes["all_reduce"] += 2 * MIB
    rows = run.steps(2)
    run.strategy.traffic.bytes["reduce_scatter"] = 1 * MIB
    assert [row["zero/sent_mib_per_step"] for row in run.steps(2).values()] == [3.0, 0.5]
    assert rows is run.rows


def test_updates_that_training_waited_for_are_reported_with_offload(clock: Clock) -> None:
    run = Run(clock, Monitor(), offload="cpu")
    run.strategy.exposed_step_s = 7.0
    run.start()
    run.strategy.exposed_step_s += 0.5
    rows = run.steps(4)
    assert (rows[2]["zero/exposed_update_ms"], rows[2]["zero/exposed_update"]) == pytest.approx((250, 0.25))
    assert (rows[4]["zero/exposed_update_ms"], rows[4]["zero/exposed_update"]) == (0, 0)
    assert "zero/exposed_update" not in Run(clock, Monitor()).start().steps(2)[2]


def test_the_loss_scale_and_skipped_steps_are_reported_where_there_is_one(clock: Clock) -> None:
    run = Run(clock, Monitor())
    run.strategy.loss_scale = 1024.0
    row = run.start().steps(2)[2]
    assert (row["zero/loss_scale"], row["zero/skipped_steps"]) == (1024.0, 0)
    assert not {"zero/loss_scale", "zero/skipped_steps"} & Run(clock, Monitor()).start().steps(2)[2].keys()


# --- utilisation ------------------------------------------------------------------------------------------------------


def utilisation(clock: Clock, peak: float | None = 1.0, *, ids: bool = False, **flops: float) -> float | None:
    run = Run(clock, Monitor(peak_tflops=peak))
    for name, number in flops.items():
        setattr(run.module, f"flops_per_{name}", lambda number=number: number)
    if ids:
        run.batch = torch.zeros(4, 16, dtype=torch.int64)
    return run.start().steps(2)[2].get("zero/mfu")


def test_utilisation_is_that_of_every_rank_of_a_replica(clock: Clock) -> None:
    assert utilisation(clock, sample=1e11) == pytest.approx(4 * 1e11 / 1e12 / 2)
    assert utilisation(clock, peak=4.0, sample=1e11) == pytest.approx(4 * 1e11 / 4e12 / 2)


def test_operations_of_tokens_come_before_those_of_samples(clock: Clock) -> None:
    assert utilisation(clock, ids=True, token=1e10, sample=1.0) == pytest.approx(64 * 1e10 / 1e12 / 2)
    assert utilisation(clock, token=1e10, sample=1e11) == pytest.approx(4 * 1e11 / 1e12 / 2)


def test_utilisation_needs_a_peak_and_operations(clock: Clock) -> None:
    assert utilisation(clock, peak=None, sample=1e11) is None
    assert utilisation(clock) is None


# --- norms ------------------------------------------------------------------------------------------------------------


def test_the_norm_is_taken_at_the_steps_that_are_logged(clock: Clock) -> None:
    run = Run(clock, Monitor(), every=3).start()
    rows = run.steps(7)
    assert [row["zero/grad_norm"] for row in rows.values()] == [1.0, 2.0]
    assert run.strategy.norms == ["only", "only"]


def test_norms_of_several_optimizers_have_their_numbers(clock: Clock) -> None:
    run = Run(clock, Monitor(), every=1)
    run.trainer.optimizers = ["first", "second"]
    run.start()
    run.call("on_before_optimizer_step", "first")
    run.step(optimizer="second")
    assert (run.rows[1]["zero/grad_norm_0"], run.rows[1]["zero/grad_norm_1"]) == (1.0, 2.0)
    run.step(optimizer="second")
    assert "zero/grad_norm_0" not in run.rows[2]


def test_a_step_without_gradients_has_no_norm(clock: Clock) -> None:
    run = Run(clock, Monitor(), every=1).start()
    run.step(optimizer="without gradients")
    assert "zero/grad_norm" not in run.rows[1]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_unit_of_memory_stays_for_the_fit(clock: Clock) -> None:
    run = Run(clock, Monitor()).start()
    run.steps(2)
    run.strategy.states["parameters"] = 1 << 31
    rows = run.steps(2)
    assert [row["zero_memory_mib/parameters"] for row in rows.values()] == [3.0, 2048.0]
    run.start()
    assert run.steps(2)[6]["zero_memory_gib/parameters"] == 2.0


def test_what_is_0_has_no_chart_before_it_is_used(clock: Clock) -> None:
    run = Run(clock, Monitor()).start()
    assert "zero_memory_mib/gradients" not in run.steps(2)[2]
    run.strategy.states["gradients"] = MIB
    assert run.steps(2)[4]["zero_memory_mib/gradients"] == 1.0
    run.strategy.states["gradients"] = 0
    assert run.steps(2)[6]["zero_memory_mib/gradients"] == 0.0


def test_memory_after_a_phase_is_that_of_the_recorded_step(clock: Clock) -> None:
    run = Run(clock, Monitor()).start()
    run.step()
    run.strategy.states["parameters"] = 5 * MIB
    run.step()
    row = run.rows[2]
    assert row["zero_memory_after_forward_mib/parameters"] == row["zero_memory_after_backward_mib/parameters"] == 5.0
    assert row["zero_memory_after_forward_mib/process"] > 0


def test_memory_in_use_includes_offloaded_activations() -> None:
    strategy = Strategy()
    assert "offloaded" not in bytes_in_use(strategy)
    strategy._run.activations = SimpleNamespace(metrics=lambda: {"zero_activations/stored_bytes": 7.0})  # type: ignore[assignment]
    held = bytes_in_use(strategy)
    assert (held["offloaded"], held["parameters"]) == (7, 3 * MIB)


# --- full recordings --------------------------------------------------------------------------------------------------


def recorded(run: Run, count: int) -> list[int]:
    """Return the steps that were recorded in full."""
    found = []
    for _ in range(count):
        assert run.monitor._recorder is not None
        if run.monitor._recorder.window_start is not None:
            found.append(run.trainer.global_step)
        run.step()
    return found


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [2]), (5, [2])])
def test_one_step_in_the_middle_of_an_interval_is_recorded(clock: Clock, every: int, expected: list[int]) -> None:
    assert recorded(Run(clock, Monitor(), every=every).start(), 6) == expected


def test_the_step_before_a_recording_prepares_it(clock: Clock) -> None:
    run, detail = Run(clock, Monitor(), every=6).start(), []
    for _ in range(6):
        assert run.monitor._recorder is not None
        detail.append(run.monitor._recorder.detail)
        run.step()
    assert detail == [False, False, True, True, False, False]


def test_a_recording_begins_again_after_a_validation(clock: Clock) -> None:
    run = Run(clock, Monitor(), every=1).start()
    run.call("on_validation_start")
    clock.wait(50)
    run.call("on_validation_end")
    recorder = run.monitor._recorder
    assert recorder is not None
    assert recorder.window_start == clock.at
    run.step()
    assert run.rows[1]["zero_time/step_ms"] == pytest.approx(1000)


# --- a trace ----------------------------------------------------------------------------------------------------------


def traced(clock: Clock, folder: Path, count: int, *, rank_0: bool = True) -> Run:
    run = Run(clock, Monitor(trace_step=3), every=50)
    run.trainer.log_dir, run.trainer.is_global_zero = str(folder / "logs"), rank_0

    def exchange(mine: RankTrace) -> list[RankTrace]:
        return [mine, RankTrace(mine.record, mine.shift_s + 0.001)]

    world = SimpleNamespace(exchange_objects=exchange)
    run.strategy.require_engine = lambda: SimpleNamespace(mesh=SimpleNamespace(world=world))  # type: ignore[assignment, return-value]
    run.start().steps(count)
    return run


def test_a_trace_has_the_step_on_every_rank(clock: Clock, tmp_path: Path) -> None:
    traced(clock, tmp_path, 2)
    assert list(tmp_path.rglob("*.json")) == []
    traced(clock, tmp_path, 4)
    events = json.loads((tmp_path / "logs" / "trace_step3.json").read_text())["traceEvents"]
    phases = [(e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["cat"] == "phase"]
    assert phases == [(rank, name) for rank in (0, 1) for name in ("data", "forward", "backward", "other")]


def test_only_rank_0_writes_the_trace(clock: Clock, tmp_path: Path) -> None:
    traced(clock, tmp_path, 4, rank_0=False)
    assert list(tmp_path.rglob("*")) == []


def test_units_are_sampled_in_the_traced_step_only(clock: Clock) -> None:
    run, sampled = Run(clock, Monitor(trace_step=3), every=4).start(), []
    run.strategy.require_engine = lambda: pytest.fail("not yet")  # type: ignore[assignment]
    for _ in range(2):
        assert run.monitor._recorder is not None
        sampled.append(run.monitor._recorder.each_unit)
        run.step()
    assert run.monitor._recorder is not None
    assert [*sampled, run.monitor._recorder.each_unit] == [False, False, True]


# --- the end ----------------------------------------------------------------------------------------------------------


def table(clock: Clock, caplog: pytest.LogCaptureFixture, *callbacks: pl.Callback, count: int = 3) -> str:
    run = Run(clock, Monitor())
    run.trainer.callbacks += callbacks
    run.start().steps(count)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        run.call("on_train_end")
    return caplog.text


def test_the_table_at_the_end_is_one_of_the_model_summary(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    assert table(clock, caplog) == ""
    text = table(clock, caplog, ModelSummary())
    assert "Monitor: 1 steps on rank 0" in text  # the first interval compiles and is left out
    assert "8 samples/s" in text


def test_steps_after_the_last_interval_are_in_the_table(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    assert "Monitor: 1 steps" in table(clock, caplog, ModelSummary(), count=1)


@pytest.mark.parametrize("hook", [("on_train_end",), ("on_exception", ValueError("mine")), ("teardown", "fit")])
def test_the_recording_ends_with_the_fit(clock: Clock, fetches: list[str], hook: tuple[Any, ...]) -> None:
    run = Run(clock, Monitor()).start()
    assert SpanRecorder.active is not None
    run.call(*hook)
    assert SpanRecorder.active is None
    assert fetches == ["begin", "end"]
    run.call("teardown", "fit")
    run.call("on_validation_start")
    run.call("on_validation_end")
    assert fetches == ["begin", "end"]


def test_two_monitors_are_refused(clock: Clock, fetches: list[str]) -> None:
    run = Run(clock, Monitor())
    run.trainer.callbacks.append(Monitor())
    with pytest.raises(PlanError, match="Got 2 Monitors"):
        run.start()
    assert fetches == []


@pytest.mark.parametrize("options", [{"peak_tflops": 0}, {"trace_step": 0}], ids=str)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Monitor(**options)
