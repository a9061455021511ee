"""The suite of benches: what is listed, how it is called, how times are compared; and in small, whether each runs."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import __main__ as suite
from benchmarks import contest, record
from benchmarks.catalogue import FOLDER, benches
from benchmarks.record import ROOT
from tests import two_nodes

NEEDS_DEEPSPEED = {"moe", "deepspeed_parity"}
BENCHES = benches()


def test_every_file_that_can_be_run_is_a_bench() -> None:
    """But for the suite itself and what renders records."""
    runnable = {f.stem for f in FOLDER.glob("*.py") if "def main(" in f.read_text()} - {"__main__", "tables"}
    assert set(BENCHES) == runnable
    assert {"step_time", "scaling", "planner"} <= runnable


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_is_described(name: str) -> None:
    bench = BENCHES[name]
    assert len(bench.line) > 20
    assert bench.minutes > 0
    assert bench.spread.split(":")[0].split(" ")[0] in ("quartiles", "over", "none", "unknown")
    assert bench.seeds
    assert f"python -m benchmarks.{name}" in (FOLDER / f"{name}.py").read_text()


def test_the_list_names_all_of_them() -> None:
    lines = suite.listing(BENCHES).splitlines()
    assert [line.split()[0] for line in lines if " min " in line] == sorted(BENCHES)


class Ran:
    """Stands in for `subprocess.run`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> None:
        self.commands: list[list[str]] = []
        self.returncode = status
        monkeypatch.setattr(suite.subprocess, "run", self)

    def __call__(self, command: list[str], **options: object) -> Ran:
        assert options == {"cwd": ROOT, "check": command[2:] == ["benchmarks.tables"]}
        self.commands.append(command[2:])
        return self


def test_options_reach_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Ran(monkeypatch)
    assert suite.main(["step_time", "trainer_time", "--rounds", "3", "--record", "--", "--batch", "1"]) == 0
    assert suite.main(["planner", "--rounds", "3"]) == 0
    assert suite.main(["moe", "--quick", "--record", "out"]) == 0
    assert ran.commands == [
        ["benchmarks.step_time", "--rounds", "3", "--record", "benchmarks/records/step_time.json", "--batch", "1"],
        ["benchmarks.trainer_time", "--rounds", "3", "--record", "benchmarks/records/trainer_time.json",
         "--batch", "1"],
        ["benchmarks.tables"],  # records in their own place make the tables, too
        ["benchmarks.planner"],
        ["benchmarks.moe", *BENCHES["moe"].quick, "--record", "out/moe.json"],
    ]  # fmt: skip


def test_all_are_run_even_if_one_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(monkeypatch, status=3)
    assert suite.main(["all"]) == 1
    assert [command[0] for command in ran.commands] == [f"benchmarks.{name}" for name in BENCHES]
    assert "FAILED with status 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["step_tim"], "There are: "),
        (["moe", "--quick", "--record"], "measures nothing"),
        (["moe", "moments", "--record", "a.json"], "give a folder"),
    ],
)
def test_what_cannot_be_run_is_said(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.main(argv)
    assert word in capsys.readouterr().err


def test_everybody_begins_equally_often() -> None:
    order = list(contest.turns("abc", 3, uncounted=3))
    assert [counts for counts, _ in order] == [False] * 9 + [True] * 9
    assert [name for _, name in order[9::3]] == ["a", "b", "c"]


def test_a_disturbed_round_moves_no_median() -> None:
    """Both contenders slow in the same round, or one slow once: the ratio stays."""
    times = {"base": [1.0, 1.0, 9.0, 1.0, 1.0], "ours": [2.0, 2.0, 18.0, 2.0, 7.0]}
    rows = contest.against(times, "base")
    assert rows["base"] == {"median_s": 1.0, "ratio": 1.0, "ratio_q1": 1.0, "ratio_q3": 1.0}
    assert rows["ours"]["ratio"] == rows["ours"]["ratio_q1"] == 2.0


def test_contenders_are_clocked_apart() -> None:
    calls: list[str] = []
    times = contest.clocked({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, uncounted=1)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert [len(times[name]) for name in "ab"] == [2, 2]
    assert all(seconds >= 0 for seconds in times["a"])


def test_a_record_is_written_whole_and_says_how(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", str(tmp_path), "--rounds", "2"])
    path = tmp_path / "new" / "x.json"
    record.write(path, {**record.header("moments", private=(tmp_path,)), "results": 1})
    found = json.loads(path.read_text())
    assert found["command"] == "python -m benchmarks.moments DIR --rounds 2"
    assert set(record.REQUIRED) <= found.keys()
    assert found["spread"] == BENCHES["moments"].spread
    assert [f.name for f in path.parent.iterdir()] == ["x.json"]
    record.write(None, found)


@pytest.fixture(scope="module")
def header() -> dict[str, Any]:
    """It takes a while: git and the processor are asked."""
    return record.header("moments")


@pytest.mark.parametrize("name", [*record.REQUIRED, "results"])
def test_a_record_without_what_a_reader_needs_is_not_written(name: str, header: dict[str, Any], tmp_path) -> None:
    found = {**header, "results": 1}
    del found[name]
    with pytest.raises(ValueError, match=f"without {name}"):
        record.write(tmp_path / "x.json", found)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", BENCHES)
def test_it_runs_in_small(name: str, tmp_path) -> None:
    """Its numbers mean nothing; its record has some."""
    if name in NEEDS_DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    if name == "slow_network":
        try:
            two_nodes.require()
        except two_nodes.TwoNodesError as error:
            pytest.skip(str(error))
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--record", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["benchmark"] == name
    assert found["results"]
    numbers = [n for n in leaves(found["results"]) if isinstance(n, float)]
    assert numbers == [n for n in numbers if math.isfinite(n)]


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from leaves(each)
    else:
        yield value
