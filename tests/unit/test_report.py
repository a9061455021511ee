"""``ls-strategy report``: what it reads, what it draws, and what it says of what is damaged or not there."""

from __future__ import annotations

import math
import os
import re
import struct
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_strategy.extras import cli
from ls_strategy.extras.report import csv_file, events_file, find
from ls_strategy.extras.report.charts import Chart, draw
from ls_strategy.extras.report.events import events_of
from ls_strategy.extras.report.numbers import number, short
from ls_strategy.extras.report.page import page
from ls_strategy.extras.report.run import Checkpoint, Run, read
from ls_strategy.extras.report.series import Series, columns_of
from ls_strategy.extras.run_file import RUN_FILE, append_line
from tests.unit.report_runs import PHASES, csv_log, monitored, run_file, start, tensorboard

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

NAMESPACE = {"h": "http://www.w3.org/1999/xhtml"}


def report(*folders: Path, capsys: pytest.CaptureFixture[str] | None = None) -> str:
    """The file that the command writes, which is parsed as XML: every name is escaped, every element closed."""
    output = folders[0].parent / "out.html"
    assert cli.main(["report", *map(str, folders), "-o", str(output)]) == 0
    html = output.read_text()
    ElementTree.fromstring(html.split("\n", 1)[1])
    return html


def words(html: str) -> str:
    """What a reader sees."""
    return " ".join("".join(ElementTree.fromstring(html.split("\n", 1)[1]).itertext()).split())


def series_of(values: list[float]) -> Series:
    series = Series()
    for i, value in enumerate(values):
        series.add(i, value)
    return series


# --- reading ----------------------------------------------------------------------------------------------------------


def test_scalars_of_an_event_file_are_those_that_were_logged(tmp_path: Path) -> None:
    path = tensorboard(tmp_path, {"a": [1.0, math.nan, -2.5], "b": [7.0]})
    found = events_file.read(path)
    assert list(found.scalars["a"].steps) == [10, 20, 30]
    assert found.scalars["a"].values[2] == -2.5
    assert math.isnan(found.scalars["a"].values[1])
    assert list(found.scalars["b"].values) == [7.0]
    assert found.problem == ""


def test_events_agree_with_those_of_tensorboard_itself(tmp_path: Path) -> None:
    path = tensorboard(tmp_path, monitored(12))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    theirs = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    ours = events_file.read(path).scalars
    assert set(ours) == set(theirs.Tags()["scalars"])
    for tag, series in ours.items():
        assert list(series.points()) == [(e.step, e.value) for e in theirs.Scalars(tag)]


@pytest.mark.parametrize("cut", [1, 3, 11, 25])
def test_a_file_that_is_cut_off_is_read_up_to_there(tmp_path: Path, cut: int) -> None:
    path = tensorboard(tmp_path, {"loss": [1.0, 2.0, 3.0]})
    path.write_bytes(path.read_bytes()[:-cut])
    found = events_file.read(path)
    assert list(found.scalars["loss"].values) == [1.0, 2.0]
    assert "being written or was cut off" in found.problem


def test_a_damaged_length_ends_the_file_and_is_told(tmp_path: Path) -> None:
    path = tensorboard(tmp_path, {"loss": [1.0, 2.0, 3.0]})
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    at = 8 + 4 + length + 4  # the second record
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    found = events_file.read(path)
    assert "damaged" in found.problem
    assert found.scalars == {}


def test_without_tensorboard_the_error_has_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ValueError, match="Run pip install tensorboard"):
        read(tmp_path, "run")


def test_rows_of_a_csv_file_that_are_cut_off_are_left_out(tmp_path: Path) -> None:
    path = csv_log(tmp_path, {"loss": [1.0, math.inf, 3.0]})
    with path.open("a") as file:
        file.write("0,4.0")
    scalars, problem = csv_file.read(path)
    assert list(scalars["loss"].points()) == [(10, 1.0), (20, math.inf), (30, 3.0)]
    assert problem == "1 rows are incomplete and left out"


def test_a_process_that_went_on_overrides_the_steps_that_it_repeats(tmp_path: Path) -> None:
    tensorboard(tmp_path, {"loss": [1.0, 2.0, 3.0], "only/before": [1.0] * 3})
    time.sleep(0.01)
    tensorboard(tmp_path, {"loss": [20.0, 30.0]}, first=10)
    run = read(tmp_path, "run")
    assert list(run.scalars["loss"].points()) == [(10, 1.0), (20, 20.0), (30, 30.0)]
    assert len(run.scalars["only/before"]) == 3
    assert run.repeated == [(20, 30)]
    assert {"restart", "steps repeated"} <= {event.what for event in events_of(run)}


# --- finding ----------------------------------------------------------------------------------------------------------


def test_versions_are_found_in_natural_order_and_checkpoints_are_not_runs(tmp_path: Path) -> None:
    for name in ("version_10", "version_2", "version_2/checkpoints"):
        csv_log(tmp_path / name, {"loss": [1.0]})
    found = find.runs_in([tmp_path])
    assert find.names_of(found) == ["version_2", "version_10"]
    assert find.runs_in([tmp_path, tmp_path / "version_2"]) == found


@pytest.mark.parametrize(
    ("name", "message"), [("no", "is not there"), ("file", "is a file"), ("empty", "no logger has")]
)
def test_what_is_no_run_is_an_error(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ls-strategy report: error: Got ")
    assert message in error


def test_too_many_runs_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(find.MOST_RUNS + 1):
        csv_log(tmp_path / str(i), {"loss": [1.0]})
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "at most" in capsys.readouterr().err


def test_a_file_under_a_name_that_can_be_guessed_is_not_written_through(tmp_path: Path) -> None:
    csv_log(tmp_path, {"loss": [1.0]})
    (tmp_path / "thesis").write_text("three years")
    (tmp_path / f".report.html.{os.getpid()}").symlink_to("thesis")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "thesis").read_text() == "three years"
    assert (tmp_path / f".report.html.{os.getpid()}").is_symlink()


def test_only_a_report_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv_log(tmp_path, {"loss": [1.0]})
    assert cli.main(["report", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path)]) == 0
    (tmp_path / "thesis.html").write_text("three years")
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "thesis.html")]) == 1
    assert "is not a report" in capsys.readouterr().err
    assert (tmp_path / "thesis.html").read_text() == "three years"
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.csv", "report.html", "thesis.html"}


# --- what a reader sees -----------------------------------------------------------------------------------------------


def test_a_monitored_run_shows_everything(tmp_path: Path) -> None:
    import torch

    folder = tmp_path / "run"
    image = torch.zeros(3, 8, 16, dtype=torch.uint8)
    tensorboard(folder, monitored(), image=image)
    run_file(folder, start(), {"event": "error", "step": 300, "type": "Preempted", "message": "0"}, start(300))
    (folder / "hparams.yaml").write_text("lr: 0.001\n")
    checkpoint = folder / "checkpoints" / "epoch=0-step=300.ckpt"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"step": 300, "layout": {"stage": 2}, "saved_at": 1.7e9}')
    html = report(folder)
    seen = words(html)
    for name in ("Loss", "Learning rate", "Gradient norm", "Tokens per second", "Model FLOP utilization",
                 "Where the time went", "Memory by kind, at the end of a step", "Bytes per step",
                 "Speed while in flight",
                 "lr: 0.001", "sharding.hpz", "2.14.0", "bf16-true", "master weights", "GiB", "ms per optimizer step",
                 "epoch=0-step=300.ckpt (stage 2)", "preemption", "restart", "steps skipped",
                 "steps left out", *PHASES):  # fmt: skip
        assert name in seen, name
    assert "was not logged" not in seen
    assert "data:image/png;base64," in html
    assert html.count('class="restart"') > 3  # charts mark it
    assert "optimizer step" in seen
    assert "state running" in seen.replace("staterunning", "state running")
    assert not re.search(r"(src|href)=\"(?!#|data:)", html)
    assert "<script" not in html
    assert "http" not in re.sub(r"http://www.w3.org/1999/(xhtml|xlink)|http-equiv", "", html)


def test_a_run_without_monitor_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    tensorboard(tmp_path / "run", {"train/loss": [3.0, 2.0, 1.0, 0.5]})
    seen = words(report(tmp_path / "run"))
    assert "the run had no Monitor" in seen
    assert "Add callbacks=[ls_strategy.Monitor()] to the Trainer" in seen
    assert "LearningRateMonitor()" in seen
    assert "From the times at which values were logged" in seen


def test_a_run_that_has_not_logged_yet(tmp_path: Path) -> None:
    run_file(csv_log(tmp_path / "run", {"loss": []}).parent, start())
    assert "no scalar has been logged yet" in words(report(tmp_path / "run"))


def test_values_that_are_no_numbers_are_gaps_that_are_marked(tmp_path: Path) -> None:
    csv_log(tmp_path / "run", {"loss": [1.0, 2.0, math.nan, 3.0, math.inf, -math.inf, 1.0, 2.0]})
    html = report(tmp_path / "run")
    assert "NaN or infinite values: 3." in words(html)
    assert "loss is nan, the first of 3 such values" in words(html)
    (way,) = re.findall(r'class="named"><title>loss</title><path d="([^"]*)"', html)
    assert way.count("M") == 3
    (marks,) = re.findall(r'class="bad">.*?</g></g>', html)
    assert marks.count("<use") == 3
    assert "nan" not in "".join(re.findall(r'(?: d| x| y)="([^"]*)"', html))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "values",
    [
        [math.nan] * 3,
        [math.inf],
        [0.0],
        [5.0] * 4,
        [1e300, -1e300],
        [1e-300, 2e-300],
        [1.7e308, -1.7e308],
        [5e-324, 1.0],
        [-1e-5, 3.0, math.nan],
    ],
)
def test_strange_values_are_drawn(tmp_path: Path, values: list[float]) -> None:
    csv_log(tmp_path / "run", {"loss": values, "zero/mfu": values, "zero_memory_gib/masters": values,
                               **{f"zero_time/{p}_ms": values for p in ("step", *PHASES)}})  # fmt: skip
    html = report(tmp_path / "run")
    assert not re.search(r'(?:\bd|x|y|width)="[^"]*(?:nan|inf)[^"]*"', html)
    assert html.count("<svg viewBox") >= 5


def test_names_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script>&\"\x00\x1b"
    folder = tmp_path / os.fsdecode(b"<b>run $& co$\xff")
    in_csv = bad.replace("\x00", "")  # Python 3.10 does not write it
    times = {f"zero_time/{part}_ms": [1.0] for part in ("step", *PHASES)}
    csv_log(folder, {f"loss/{in_csv}": [1.0, 2.0], in_csv: [1.0], f"zero_experts/{in_csv}": [1.0], **times})
    (folder / "config.yaml").write_text(f"a: {bad}\n</pre><img src=x onerror=alert(1)>")
    run_file(folder, start(device=bad, versions={bad: bad}, options={bad: {bad: bad}}))
    html = report(folder)
    assert "run $&amp; co$\N{REPLACEMENT CHARACTER}</text>" in html  # of the bars
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>" not in html


@pytest.mark.wide
def test_runs_are_compared_line_by_line(tmp_path: Path) -> None:
    for name, stage in (("a", 1), ("b", 3)):
        tensorboard(tmp_path / name, monitored(30 * stage))
        run_file(tmp_path / name, start(options={"stage": stage, "same": 1}), {"event": "end", "step": 300 * stage})
    html = report(tmp_path / "a", tmp_path / "b")
    seen = words(html)
    assert "2 runs" in seen
    assert "Loss: train/loss" in seen
    assert "Options of the strategy that differ" in seen
    assert "same" not in seen.split("Options of the strategy that differ")[1].split("hparams")[0]
    assert html.count("<figcaption>Loss: ") == 2


@pytest.mark.parametrize(
    ("value", "noise", "axis"),
    [
        (0.0, 0.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (2.0, 0.0, ["1.8", "1.9", "2", "2.1", "2.2"]),
        (2.0, 1e-9, ["1.8", "1.9", "2", "2.1", "2.2"]),
        (-2.5, 0.0, ["-2.8", "-2.7", "-2.6", "-2.5", "-2.4", "-2.3", "-2.2"]),
        (1000.0, 0.2, ["1000", "1000.05", "1000.1", "1000.15", "1000.2"]),
    ],
)
def test_values_that_are_equal_get_an_axis_around_them(value: float, noise: float, axis: list[str]) -> None:
    series = Series()
    for step in range(9):
        series.add(step, value + noise * step / 8)
    svg = draw(Chart("loss", "loss", may_be_log=True, lines=[("loss", series)])).svg
    assert re.findall(r"text-anchor: end[^>]*>([^<]*)</text>", svg)[: len(axis)] == axis


def test_what_a_run_does_now(tmp_path: Path) -> None:
    run = Run("r", tmp_path, last_written=1000.0)
    assert run.state(now=1001.0) == "perhaps still running"
    assert run.state(now=9999.0) == "unknown"
    run.configs["config.yaml"] = "trainer: {max_steps: 20}"
    run.checkpoints = [Checkpoint("epoch=0-step=19.ckpt", 19, 0.0, "")]
    assert run.state(now=1001.0) == "perhaps still running"
    run.checkpoints = [Checkpoint("epoch=0-step=20.ckpt", 20, 0.0, "")]
    assert run.state(now=1001.0) == "finished"
    run.checkpoints = []
    for event, recent, late in (
        ("start", "running", "ended without a word (killed?)"),
        ("end", "finished", "finished"),
    ):
        run.lines = [{"event": event, "time": 1.0}]
        assert (run.state(now=1001.0), run.state(now=9999.0)) == (recent, late)
    run.lines = [{"event": "error", "time": 1.0, "type": "Preempted"}]
    assert run.state(now=9999.0) == "preempted"


@pytest.mark.wide
def test_a_report_is_quick_and_small_for_many_points(tmp_path: Path) -> None:
    values = [math.sin(i / 1000) for i in range(100_000)]
    values[54_321] = 9.0  # a spike of one point is not lost
    csv_log(tmp_path / "run", {"loss": values})
    html = report(tmp_path / "run")
    assert len(html) < 100_000
    assert "100,000 points" in words(html)
    assert 'class="band"' in html
    assert re.search(r"<td[^>]*>9</td>", html)


# --- reduction and axes -----------------------------------------------------------------------------------------------

NUMBERS = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(NUMBERS, min_size=1, max_size=300), st.integers(1, 50))
def test_columns_keep_extremes_counts_and_order(values: list[float], most: int) -> None:
    columns = columns_of(series_of(values), most)
    assert len(columns.step) <= max(most, 1)
    assert columns.points.sum() == len(values)
    assert columns.not_finite.sum() == sum(not math.isfinite(v) for v in values)
    assert list(columns.step) == sorted(columns.step)
    finite = [v for v in values if math.isfinite(v)]
    if finite:
        assert min(low for low in columns.low if math.isfinite(low)) == min(finite)
        assert max(high for high in columns.high if math.isfinite(high)) == max(finite)
    number = [math.isfinite(mean) for mean in columns.mean]
    assert (columns.low <= columns.mean)[number].all()
    assert (columns.mean <= columns.high)[number].all()


@pytest.mark.parametrize(
    ("show", "value", "shown"),
    [(number, 0.0, "0"), (number, 12.3456, "12.35"), (number, 0.000123456, "0.0001235"), (number, 123456.0, "123,456"),
     (number, 1e12, "1.000e+12"), (number, math.nan, "NaN"), (number, -math.inf, "-inf"), (number, None, ""),
     (number, 1.0, "1"), (number, -2.50, "-2.5"), (short, 20_000.0, "20k"), (short, 2.5e6, "2.5M"),
     (short, 2e-5, "2e-5"), (short, 0.25, "0.25"), (short, 0, "0")],
)  # fmt: skip
def test_numbers(show: Any, value: float | None, shown: str) -> None:
    assert show(value) == shown


def in_a_fresh_process(code: str) -> int:
    code = f"import sys; from ls_strategy.extras.cli import main\n{code}"
    return os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code])


def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    csv_log(tmp_path, {"loss": [1.0]})
    code = f"assert main(['report', {str(tmp_path)!r}]) == 0\n"
    assert in_a_fresh_process(f"{code}assert not [m for m in ('torch', 'lightning') if m in sys.modules]") == 0


def test_a_page_is_the_same_again_whatever_the_user_has_set_in_matplotlib(tmp_path: Path) -> None:
    import matplotlib

    csv_log(tmp_path, {"loss": [1.0, 2.0]})
    run = read(tmp_path, "run")
    first = page([run], now=1e9)
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert page([run], now=1e9) == first
        assert matplotlib.rcParams["lines.linewidth"] == 9


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_a_package_the_command_says_what_to_install_before_it_reads(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    csv_log(tmp_path, {"loss": [1.0]})
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["report", str(tmp_path)]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f'{package} is missing. Run pip install "ls_strategy[report]".' in error
    assert "reading" not in error
    assert not (tmp_path / "report.html").exists()


def test_help_and_the_package_import_nothing_that_draws() -> None:
    code = """
for words in (["--help"], ["report", "--help"], ["plan", "--help"]):
    try:
        main(words)
    except SystemExit:
        pass
assert not {"matplotlib", "jinja2", "numpy"} & set(sys.modules)
"""
    assert in_a_fresh_process(code) == 0


@pytest.mark.wide
def test_a_run_of_a_million_points_is_read_within_the_memory_of_its_file(tmp_path: Path) -> None:
    with (csv_log(tmp_path, {"loss": [1.0]})).open("a") as file:
        file.writelines(f"0,{i % 7},{i}\n" for i in range(1_000_000))
    code = f"import pathlib, re\nassert main(['report', {str(tmp_path)!r}]) == 0\n"
    code += "most = re.search(r'VmHWM:\\s*(\\d+) kB', pathlib.Path('/proc/self/status').read_text())[1]\n"
    assert in_a_fresh_process(f"{code}assert int(most) < 250_000, most") == 0


# --- plans and slow ranks ---------------------------------------------------------------------------------------------

PLAN = {
    "name": "zero3",
    "rows": [
        {"phase": "forward", "measured": 0.012, "predicted": 0.010},
        {"phase": "step", "measured": 0.047, "predicted": 0.039},
    ],
    "better": {"name": "zero2 <b>", "seconds": 0.031, "yaml": "{class_path: ls_strategy.ZeROStrategy}"},
}


def with_line(folder: Path, event: str, **fields: object) -> Path:
    """A run with times, in whose file is one more line."""
    run = folder / "run"
    tensorboard(run, monitored())
    append_line(run / RUN_FILE, event, **fields)
    return run


def test_a_plan_stands_beside_what_was_measured_with_the_option_that_would_have_helped(tmp_path: Path) -> None:
    text = words(report(with_line(tmp_path, "plan", **PLAN)))
    assert "zero3, as planned part of a stepmeasured, mspredicted, ms forward1210 step4739" in text
    assert "zero2 <b> would have helped most: 31 ms a step" in text
    assert "strategy: {class_path: ls_strategy.ZeROStrategy}" in text


@pytest.mark.parametrize("plan", [{}, {**PLAN, "rows": 3}, {**PLAN, "rows": [{"phase": 1}]}, {**PLAN, "better": "x"}])
def test_a_line_that_is_no_plan_does_not_end_a_report(plan: dict[str, object], tmp_path: Path) -> None:
    assert "would have helped" not in words(report(with_line(tmp_path, "plan", **plan)))


def test_slow_ranks_are_events(tmp_path: Path) -> None:
    slow = {"rank": 3, "about": "cuda:3 on node1", "phase": "data", "since": 120, "step": 131}
    run = read(with_line(tmp_path, "slow rank", **slow), "run")
    found = [(event.step, event.detail) for event in events_of(run) if event.what == "slow rank"]
    assert found == [(131, "rank 3 (cuda:3 on node1), most in data, since step 120")]


def test_ranks_that_are_left_out_are_events(tmp_path: Path) -> None:
    tensorboard(tmp_path / "run", {"elastic/left_out": [3.0], "loss": [1.0]}, first=11)
    found = [event.detail for event in events_of(read(tmp_path / "run", "run")) if event.what == "left out"]
    assert found == ["rank 3: CorruptionCheck has found a rank of its node wrong twice"]
