"""The benchmark on a GPU in a given time: what it leaves out, what a kill leaves behind, and what it compares with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bars, gpu_minutes, gpu_trainers, record
from benchmarks.bars import BARS, compared, peak_flops
from benchmarks.gpu import options
from benchmarks.gpu_minutes import ON_CPU, ON_GPU, Program, seconds_of, work_of
from benchmarks.gpu_trainers import SIZES, Case, in_process, ratios
from benchmarks.record import ROOT
from tests.limits import wall

HEAD = {**dict.fromkeys(record.REQUIRED, "x"), "gpus": ["NVIDIA H200"]}
SPEEDS = {"zero2": 50e3, "zero2_offload": 46e3, "fsdp2": 48e3}


class Clock:
    """In the place of the time: a Trainer takes as long as it is told, but for its limit."""

    def __init__(self, takes: float) -> None:
        self.now = 0.0
        self.takes = takes
        self.limits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def in_process(self, case: Case, limit_s: float) -> dict[str, Any]:
        takes = self.takes * seconds_of(case, 989e12)
        self.limits.append(limit_s)
        self.now += min(takes, limit_s)
        if takes > limit_s:
            return {"failed": f"not over after {limit_s:.0f} s"}
        return {"tokens_per_s": SPEEDS.get(case.contender, 1e3), "mfu": 0.5, "peak_device_gib": 1.0,
                "peak_host_gib": 1.0, "loss": 1.0}  # fmt: skip


def recorded(minutes: float, takes: float, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, dict[str, Any]]:
    clock = Clock(takes)
    monkeypatch.setattr(gpu_minutes, "time", clock)
    monkeypatch.setattr(gpu_minutes, "in_process", clock.in_process)
    args = options().parse_args(["--minutes", str(minutes), "--record", str(path)])
    Program(args, HEAD, 60 * minutes).run()
    return clock, json.loads(path.read_text())["results"]


@pytest.mark.parametrize("takes", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("minutes", [0.5, 3.0, 10.0, 60.0])
def test_the_time_is_never_exceeded(
    minutes: float, takes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a case begun that would not end, once one has shown how slow this machine is."""
    clock, found = recorded(minutes, takes, tmp_path / "x.json", monkeypatch)
    assert clock.now <= 60 * minutes
    assert all(limit > 0 for limit in clock.limits)
    failed = [each for by in found["throughput"].values() for row in by.values()
              for each in row["contenders"].values() if "failed" in each]  # fmt: skip
    assert len(failed) <= 1
    assert len(clock.limits) + len(found["left_out"]) == len(ON_GPU)
    cases = [Case(p.contender, SIZES[p.size], p.tokens, p.steps, "cuda", "") for p in ON_GPU]
    assert bool(found["left_out"]) == (takes * sum(seconds_of(case, 989e12) for case in cases) > 60 * minutes)


def test_ten_minutes_on_an_h200_measure_every_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = recorded(10, 1.0, tmp_path / "x.json", monkeypatch)
    assert [row["quantity"] for row in found["bars"]] == ["tokens_per_s", "mfu", "ratio", "ratio"]
    assert [row["of_bar"] for row in found["bars"]] == pytest.approx(
        [50e3 / 10471, 0.5 / 0.545, 46 / 50 / 0.9, 46 / 50]
    )
    assert found["throughput"]["7B-4k"]["32768"]["ratios"] == {"zero2/fsdp2": 50 / 48}
    printed = capsys.readouterr().out
    assert "zero2_offload/zero2, 1.3B at 16384: ratio" in printed
    assert "left out: deepspeed2, 7B-4k at 32768: needs about" in printed


def test_bars_are_those_of_one_gpu_and_of_one_way_to_count() -> None:
    """The two of the 7B case are one figure: Llama 3's 8B, by the formula of this benchmark."""
    attention, mlp = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336
    per_token = 6 * (32 * (attention + mlp) + 4096 * 128256) + 12 * 32 * 4096 * 4096
    speed, mfu = (bar.value for bar in BARS[:2])
    peak = peak_flops("NVIDIA H200")
    assert peak is not None
    assert speed * per_token / peak == pytest.approx(mfu, abs=5e-4)
    case = Case("zero2", SIZES["7B-4k"], 32768, 1, "cuda", "")
    assert 3 / 4 * work_of(case)[1] / 32768 == pytest.approx(per_token, rel=0.01)
    row = {"contenders": {"zero2": {"tokens_per_s": {"median": speed}, "mfu": mfu}}, "ratios": {}}
    assert [each["of_bar"] for each in compared({"7B-4k": {"32768": row}}, "NVIDIA H200")] == [1.0, 1.0]
    assert compared({"7B-4k": {"32768": row}}, "NVIDIA A100-SXM4-80GB") == []
    assert compared({"1.3B": {"32768": row}}, "NVIDIA H200") == []
    failed = {"contenders": {"zero2": {"failed": "out of the device's memory"}}, "ratios": ratios({})}
    assert compared({"7B-4k": {"32768": failed}}, "NVIDIA H200") == []
    assert all(bar.source and bar.differs for bar in BARS)
    assert bars.lines([]) == ["no published figure for this GPU and these cases"]


def test_a_case_is_ended_with_all_that_it_has_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that keeps its output open would hold up the next case."""
    note = tmp_path / "pid"
    child = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    popen = subprocess.Popen
    monkeypatch.setattr(
        gpu_trainers.subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", program], **options)
    )
    began = time.monotonic()
    found = in_process(Case("zero2", SIZES["tiny"], 64, 1, "cpu", ""), 2)
    assert found["failed"].startswith("not over after")
    assert time.monotonic() - began < wall(20)
    state = Path(f"/proc/{note.read_text()}/stat")
    deadline = time.monotonic() + wall(10)
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_in_the_middle_leaves_a_record_and_no_trainer(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--minutes", "4", "--device", "cpu", "--record", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    running = "was running when this was written"

    def left_out() -> dict[str, str]:
        return json.loads(path.read_text())["results"]["left_out"] if path.exists() else {}

    deadline = time.monotonic() + wall(240)
    while left_out().get(ON_CPU[1].name) != running and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    (trainer,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    while not _is_last(trainer):  # it asks to be ended with its parent before
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert left_out() == {ON_CPU[1].name: running, ON_CPU[2].name: "not begun"}
    found = json.loads(path.read_text())
    assert set(record.REQUIRED) <= found.keys()
    assert list(found["results"]["throughput"]["tiny"]["64"]["contenders"]) == ["zero2"]
    while Path(f"/proc/{trainer}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_last(process: str) -> bool:
    """Whether the system would end a process first, which a Trainer asks for when it begins."""
    return Path(f"/proc/{process}/oom_score_adj").read_text().strip() == "1000"
