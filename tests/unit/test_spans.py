"""`ls_strategy.spans`: phases add up, what is exposed is where computation waits; and traces of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy.extras.callbacks.intervals import FitTable, Interval, Sample
from ls_strategy.extras.callbacks.step_trace import RankTrace, merged
from ls_strategy.extras.plots.charts import Charts, unit_for
from ls_strategy.spans import (
    BACKWARD,
    COMMUNICATION,
    COPY,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    VALIDATION,
    Span,
    SpanRecord,
    SpanRecorder,
)
from ls_strategy.spans.record import intersection, length, union
from tests.clocks import Clock

MS = 1e-3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ls_strategy.spans.recorder.time", clock)
    monkeypatch.setattr(spans, "time", clock)
    return clock


@pytest.fixture
def recorder() -> Iterator[SpanRecorder]:
    recorder = SpanRecorder(torch.device("cpu"))
    recorder.start()
    yield recorder
    recorder.stop()


class Work:
    """A collective that ends when it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.over = threading.Event()
        self.error = error

    def wait(self) -> None:
        assert self.over.wait(5), "the collective does not end"
        if self.error is not None:
            raise self.error


# --- phases -----------------------------------------------------------------------------------------------------------


def test_phases_are_exclusive_and_add_up(clock: Clock, recorder: SpanRecorder) -> None:
    recorder.take_phases()
    with spans.phase(DATA):
        clock.wait(1)
    with spans.phase(OPTIMIZER):
        clock.wait(2)
        with spans.phase(FORWARD):
            clock.wait(4)
            with spans.phase(BACKWARD):  # as in manual optimization
                clock.wait(8)
            clock.wait(16)
    clock.wait(32)
    seconds = recorder.take_phases()
    assert seconds == {DATA: 1, OPTIMIZER: 2, FORWARD: 20, BACKWARD: 8, OTHER: 32, VALIDATION: 0}
    assert sum(recorder.take_phases().values()) == 0


def test_the_same_phase_twice_is_left_once(clock: Clock, recorder: SpanRecorder) -> None:
    spans.enter(BACKWARD)
    spans.enter(BACKWARD)  # a pipeline begins the pass that completes gradients twice
    clock.wait(1)
    spans.leave(BACKWARD)
    clock.wait(2)
    seconds = recorder.take_phases()
    assert (seconds[BACKWARD], seconds[OTHER]) == (1, 2)


def test_an_exception_ends_what_was_open_inside(clock: Clock, recorder: SpanRecorder) -> None:
    def fail() -> None:
        with spans.phase(FORWARD):
            spans.enter(BACKWARD)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.wait(1)
    assert recorder.take_phases()[OTHER] == 1


def test_validation_keeps_its_data_to_itself(clock: Clock, recorder: SpanRecorder) -> None:
    with spans.phase(VALIDATION), spans.phase(DATA):
        clock.wait(3)
    seconds = recorder.take_phases()
    assert (seconds[VALIDATION], seconds[DATA]) == (3, 0)
    assert Interval(1, seconds, None).step_s == 0


def test_many_changes_are_folded_without_loss(clock: Clock, recorder: SpanRecorder) -> None:
    for _ in range(5000):
        with spans.phase(FORWARD):
            clock.wait(0.25)
        clock.wait(0.5)
    seconds = recorder.take_phases()
    assert (seconds[FORWARD], seconds[OTHER]) == (1250, 2500)


# --- beside computation -----------------------------------------------------------------------------------------------


def test_nothing_is_done_when_off_and_without_detail_only_phases_are_noted() -> None:
    works, recorder = (Work(),), SpanRecorder(torch.device("cpu"))
    assert SpanRecorder.active is None
    for on in (False, True):
        if on:
            recorder.start()
        assert spans.followed(works, "all_gather", 8) is works
        assert isinstance(spans.waiting(COMMUNICATION), nullcontext)
        with spans.phase(FORWARD):
            spans.sent("all_gather", 8)
            spans.at_unit("block")
        if not on:
            assert isinstance(spans.copying("to host", 8), nullcontext)
    recorder.stop()


def record_of(recorder: SpanRecorder) -> SpanRecord:
    return recorder.end_window().resolve()


def wait_for(works: Any) -> None:
    with spans.waiting(COMMUNICATION):
        for work in works:
            work.wait()


def test_a_collective_is_hidden_until_it_is_waited_for(recorder: SpanRecorder) -> None:
    work = Work()
    recorder.prepare_window()
    recorder.begin_window()
    works = spans.followed((work,), "reduce_scatter", 1000)
    time.sleep(40 * MS)  # computation
    threading.Timer(60 * MS, work.over.set).start()
    begin = time.perf_counter()  # the timer runs already
    wait_for(works)
    waited_s = time.perf_counter() - begin
    record = record_of(recorder)
    assert record.exposed_s(COMMUNICATION) == pytest.approx(waited_s, abs=5 * MS)
    assert record.hidden_s(COMMUNICATION) >= 40 * MS
    total = record.total_s(COMMUNICATION)
    assert record.exposed_s(COMMUNICATION) + record.hidden_s(COMMUNICATION) == total <= record.seconds
    assert record.nbytes(COMMUNICATION) == 1000


def test_a_collective_that_ended_in_time_costs_nothing(recorder: SpanRecorder) -> None:
    work = Work()
    work.over.set()
    recorder.prepare_window()
    recorder.begin_window()
    works = spans.followed((work,), "reduce_scatter", 1000)
    time.sleep(200 * MS)
    wait_for(works)
    record = record_of(recorder)
    assert record.total_s(COMMUNICATION) < 100 * MS  # and not until it was waited for
    assert record.exposed_s(COMMUNICATION) < 100 * MS


def test_what_began_before_the_window_counts_in_it(recorder: SpanRecorder) -> None:
    early, late = Work(), Work()
    recorder.prepare_window()
    works = spans.followed((early,), "all_gather", 1000)
    recorder.begin_window()
    time.sleep(30 * MS)
    early.over.set()
    wait_for(works)
    spans.followed((late,), "all_gather", 10)
    time.sleep(20 * MS)
    record = record_of(recorder)
    late.over.set()
    assert 50 * MS <= record.total_s(COMMUNICATION) <= record.seconds
    assert record.hidden_s(COMMUNICATION) >= 50 * MS
    assert record.nbytes(COMMUNICATION) == 10  # those of the first one were sent before


def test_what_is_needed_first_does_not_wait_for_what_was_started_first(recorder: SpanRecorder) -> None:
    first, second = Work(), Work()
    recorder.prepare_window()
    recorder.begin_window()
    slow, quick = (spans.followed((work,), "all_gather", 1) for work in (first, second))
    time.sleep(10 * MS)  # somebody waits for the first one by now
    second.over.set()
    wait_for(quick)
    first.over.set()
    wait_for(slow)
    assert record_of(recorder).nbytes(COMMUNICATION) == 2


def test_the_error_of_a_collective_reaches_who_waits(recorder: SpanRecorder) -> None:
    work = Work(RuntimeError("Connection closed by peer"))
    recorder.prepare_window()
    works = spans.followed((work,), "all_gather", 1)
    work.over.set()
    with pytest.raises(RuntimeError, match="Connection closed"):
        wait_for(works)


def test_bytes_that_are_sent_are_counted_from_the_beginning_of_the_window(recorder: SpanRecorder) -> None:
    spans.sent("all_gather", 5)
    recorder.prepare_window()
    recorder.begin_window()
    spans.sent("all_gather", 7)
    spans.sent("control", 1)
    assert record_of(recorder).sent == {"all_gather": 7, "control": 1}


def beside(body: Any) -> threading.Thread:
    thread = threading.Thread(target=body, name="ls_strategy-test")
    thread.start()
    return thread


def test_copies_on_other_threads_are_hidden_and_those_of_this_one_exposed(recorder: SpanRecorder) -> None:
    recorder.prepare_window()
    recorder.begin_window()

    def copy() -> None:
        with spans.copying("drive read", 100):
            time.sleep(60 * MS)

    thread = beside(copy)
    thread.join()
    hidden = record_of(recorder)
    recorder.begin_window()
    copy()
    exposed = record_of(recorder)
    assert hidden.hidden_s(COPY) >= 60 * MS
    assert hidden.exposed_s(COPY) == 0
    assert exposed.exposed_s(COPY) == exposed.total_s(COPY) >= 60 * MS
    assert (hidden.nbytes(COPY), exposed.nbytes(COPY)) == (100, 100)


def test_waiting_for_an_update_exposes_only_the_copies_in_it(recorder: SpanRecorder) -> None:
    recorder.prepare_window()
    recorder.begin_window()

    needed = threading.Event()

    def update() -> None:
        with spans.waiting(COPY):  # of this thread: computation does not wait
            needed.wait(5)
        with spans.copying("drive read", 100):
            time.sleep(30 * MS)
        time.sleep(50 * MS)  # the update itself

    thread = beside(update)
    with spans.waiting(COPY, "update"):
        needed.set()
        thread.join()
    record = record_of(recorder)
    (wait,) = [s for s in record.spans if s.waits]
    assert not wait.moves
    assert wait.end - wait.start >= record.exposed_s(COPY) + 50 * MS
    assert record.exposed_s(COPY) == record.total_s(COPY) >= 30 * MS


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda p: (p[0], p[0] + p[1])))


@given(intervals, intervals)
def test_unions_and_intersections_are_those_of_sets(one: Any, other: Any) -> None:
    def points(found: Any) -> set[int]:
        return {x for start, end in found for x in range(start, end)}

    a, b = union(one), union(other)
    assert points(a) == points(one)
    assert all(first[1] < second[0] for first, second in pairwise(a))
    assert points(intersection(a, b)) == points(one) & points(other)
    assert length(a) == len(points(one))


# --- memory and traces ------------------------------------------------------------------------------------------------


def test_memory_is_sampled_after_phases_of_a_window_and_before_units_if_asked(recorder: SpanRecorder) -> None:
    held = {"gradients": 0}
    recorder.measure = lambda: held
    with spans.phase(FORWARD):
        pass
    assert recorder._samples == []
    recorder.begin_window()
    with spans.phase(FORWARD):
        spans.at_unit("blocks.0")
        recorder.each_unit = True
        spans.at_unit("blocks.1")
    held["gradients"] = 8
    with spans.phase(BACKWARD):
        pass
    record = record_of(recorder)
    assert [(where, m["gradients"]) for _, where, m in record.memory] == [("blocks.1", 0), (FORWARD, 0), (BACKWARD, 8)]
    assert Sample(record, 1).memory() == {FORWARD: {"gradients": 0}, BACKWARD: {"gradients": 8}}


def record(shift: float = 0.0) -> SpanRecord:
    def at(category: str, name: str, start: float, end: float, nbytes: int = 0, **flags: bool) -> Span:
        return Span(category, name, start + shift, end + shift, nbytes, **flags)

    return SpanRecord(
        shift,
        10 + shift,
        [at("phase", FORWARD, 0, 4), at("phase", BACKWARD, 4, 10)],
        [
            at(COMMUNICATION, "all_gather", 1, 3, 100),
            at(COMMUNICATION, "reduce_scatter", 2, 6, 50),
            at(COMMUNICATION, "wait", 5, 6, waits=True),
            at(COPY, "drive read", 0, 2, 10),
            at(COPY, "wait", 1, 9, moves=False, waits=True),
        ],
        [(4 + shift, FORWARD, {"parameters": 1 << 20, "process": 2 << 20})],
        {"all_gather": 100, "reduce_scatter": 50},
    )


def test_a_sample_tells_what_was_exposed() -> None:
    metrics = Sample(record(), 2).metrics()
    assert metrics["zero_time/communication_ms"] == 2500
    assert metrics["zero_time/communication_exposed_ms"] == 500
    assert metrics["zero_time/communication_hidden_ms"] == 2000
    assert metrics["zero_time_share/communication_exposed"] == pytest.approx(0.1)
    assert metrics["zero_traffic/all_gather_mib_per_step"] == pytest.approx(100 / 2 / (1 << 20))
    assert metrics["zero_traffic/communication_gb_per_s"] == pytest.approx(150 / 5 / 1e9)
    assert metrics["zero_time/copies_ms"] == 1000
    assert metrics["zero_time/copies_exposed_ms"] == 500
    assert metrics["zero_traffic/copies_mib_per_step"] == pytest.approx(10 / 2 / (1 << 20))
    memory = Sample(record(), 2).memory_metrics(unit_for(1 << 20))
    assert memory["zero_memory_after_forward_mib/parameters"] == pytest.approx(1.0)


def test_units_fit_the_size() -> None:
    """Never 0.000917 GiB."""
    assert [unit_for(n).name for n in (0, 5000, 1 << 20, (1 << 30) - 1, 1 << 30)] == ["kib", "kib", "mib", "mib", "gib"]


def test_what_is_not_used_has_no_chart() -> None:
    charts = Charts(["skipped"])
    assert charts.of({"copies": 0.0, "loss": 1.0, "skipped": 0.0}) == {"loss": 1.0, "skipped": 0.0}
    assert charts.of({"copies": 2.0, "loss": 0.0}) == {"copies": 2.0, "loss": 0.0}
    assert charts.of({"copies": 0.0}) == {"copies": 0.0}


def test_a_trace_shows_all_ranks_on_one_clock() -> None:
    events = json.loads(merged([RankTrace(record(), 100.0), RankTrace(record(shift=1.0), 100.0)]))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1}
    starts = {e["pid"]: e["ts"] for e in slices if e["name"] == FORWARD}
    assert starts == {0: 0.0, 1: 1e6}
    assert sum(e["args"].get("bytes", 0) for e in slices if e["cat"] == COMMUNICATION) == 300
    rows: dict[Any, list[tuple[float, float]]] = {}
    for e in slices:
        rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for row in rows.values():  # no two overlap in one row
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(row)))
    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert counters == {"memory (MiB)": {"parameters": 1.0}, "process (MiB)": {"resident": 2.0}}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}


def test_the_table_leaves_the_first_interval_out_if_there_are_more() -> None:
    table = FitTable()
    assert table.text() == ""
    table.add(Interval(5, {FORWARD: 500.0}, None))
    assert "5 steps" in table.text()
    # Ten steps; waits of a second in the one that was recorded.
    seconds = {FORWARD: 3.0, BACKWARD: 5.0, OPTIMIZER: 1.0, DATA: 0.5, OTHER: 0.5, VALIDATION: 100.0}
    table.add(Interval(10, seconds, Sample(record(), 1), samples_seen=40, utilisation=0.25))
    lines = [" ".join(line.split()) for line in table.text().splitlines()]
    assert lines[0] == "Monitor: 10 steps on rank 0"
    assert lines[1] == "step 1000.00 ms 100.0 %"
    assert lines[3] == "backward 500.00 ms 50.0 %"
    assert lines[7].startswith("of which waiting for communication 1000.00 ms 100.0 % + 4000.0 ms hidden")
    assert "MFU 25.0 %" in table.text()
    assert "4 samples/s" in table.text()


# --- CUDA -------------------------------------------------------------------------------------------------------------


class Event:
    """Of a device that has passed everything that it was given."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self, stream: Any) -> None:
        self.time = self.clock.at + (100 if stream == "side" else 0)  # the other stream lags behind

    def synchronize(self) -> None:
        assert self.time <= self.clock.at

    def elapsed_time(self, later: Event) -> float:
        return (later.time - self.time) * 1e3


@pytest.fixture
def device_recorder(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanRecorder]:
    """On a device that is played by the clock: what asks the device for what."""
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing: Event(clock))
    monkeypatch.setattr(torch, "Stream", lambda device: "side")
    monkeypatch.setattr(dev, "on", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: clock.wait(1000))
    recorder = SpanRecorder(torch.device("cuda"))
    recorder.start()
    yield recorder
    recorder.stop()


def test_events_become_seconds_of_the_hosts_clock(clock: Clock, device_recorder: SpanRecorder) -> None:
    recorder, work = device_recorder, Work()
    work.over.set()
    recorder.prepare_window()
    clock.wait(1)
    recorder.begin_window()
    with spans.phase(FORWARD):
        clock.wait(2)
        works = spans.followed((work,), "all_gather", 8)
        assert works == (work,)  # NCCL's own: the current stream waits for them itself
        clock.wait(4)
        with spans.waiting(COMMUNICATION):
            clock.wait(8)
        with spans.copying("drive read", 5):  # of the host, which has no stream
            clock.wait(16)
        with spans.copying_on("side", "to host", 3):
            clock.wait(32)
        clock.wait(200)
    record = record_of(recorder)
    assert (record.start, record.end) == (1, 263)
    assert [(s.name, s.start, s.end) for s in record.phases] == [(FORWARD, 1, 263)]
    found = {s.name: (s.start, s.end, s.waits) for s in record.spans}
    assert found == {
        "all_gather": (3, 103, False),
        "wait": (7, 15, True),
        "drive read": (15, 31, True),
        "to host": (131, 163, False),
    }
    assert record.exposed_s(COMMUNICATION) == 8
    seconds = recorder.take_phases()
    assert (seconds[FORWARD], seconds[OTHER]) == (262, 1001)  # reading the events took a thousand


@pytest.mark.gpu
def test_on_cuda_times_are_those_of_the_device() -> None:
    device = torch.device("cuda")
    recorder = SpanRecorder(device)
    matrix = torch.randn(4096, 4096, device=device)

    def compute(times: int) -> None:
        for _ in range(times):
            matrix.copy_(matrix @ matrix).clamp_(-1, 1)

    compute(20)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    compute(200)
    torch.cuda.synchronize()
    expected = time.perf_counter() - begin
    recorder.start()
    try:
        recorder.prepare_window()
        recorder.begin_window()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), spans.copying_on(side, "to host", 10):
            compute(200)
        with spans.phase(FORWARD), spans.waiting(COPY):
            torch.cuda.current_stream().wait_stream(side)
        with spans.phase(BACKWARD):
            compute(200)
        given = time.perf_counter()
        record = record_of(recorder)
        seconds = recorder.take_phases()
    finally:
        recorder.stop()
    assert seconds[FORWARD] == pytest.approx(expected, rel=0.5)
    assert seconds[BACKWARD] == pytest.approx(expected, rel=0.5)
    assert record.exposed_s(COPY) == pytest.approx(expected, rel=0.5)
    assert record.hidden_s(COPY) < 0.5 * expected
    assert record.start < given < record.end or expected < 0.02  # nothing has waited for the device before
