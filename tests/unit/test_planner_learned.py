"""What measured runs teach: factors of speeds, within bounds, kept in a file that nobody has to trust."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ls_strategy.config import TierConfig
from ls_strategy.extras.planner import fit as planner_fit
from ls_strategy.extras.planner import learned
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.choice import Choice, better_than, lesson_here, yaml_of
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.learned import MeasuredRun, add, compared, corrected, forget, load, taught
from ls_strategy.extras.planner.speeds import Speeds
from ls_strategy.extras.planner.work import StepWork, Work
from tests.unit.test_planner_speeds import forecast

HERE = Speeds(
    flops=1e9, link=1e6, message=0.001, update=1e8, host_update=1e7, bus=math.inf, overlaps=False, touch=1e9,
    operation=1e-5, block=1e-4, context=1e-4, policy=1e-5, handover=1e-4, wait=1e-3,
)  # fmt: skip
"""As they are measured by themselves."""

STEP = StepWork(Work(10**8, 10**7, 1000), Work(2 * 10**8, 2 * 10**7, 1500), sent=10**5, messages=10, stepped=10**7)
RECOMPUTED = replace(STEP, backward=Work(3 * 10**8, 3 * 10**7, 2500), blocks=10)
SHARDED = replace(STEP, sent=150_000, messages=25, stepped=25 * 10**5, gathers=True)


def measured(
    work: StepWork, truth: Speeds, workload: str = "model", at: float = 0.0, machine: str = "machine"
) -> MeasuredRun:  # fmt: skip
    """A run on a machine whose speeds are ``truth``."""
    phases = {name: phase.seconds(overlaps=truth.overlaps) for name, phase in truth.phases(work).items()}
    seconds = {**phases, "rest": truth.rest, "step": truth.seconds(work)}
    return MeasuredRun(at, machine, workload, "zero2", work, HERE, seconds)


def slower(factor: float) -> Speeds:
    """Of a machine on which computation takes ``factor`` times as long as its matrix products told."""
    return replace(HERE, flops=HERE.flops / factor, touch=HERE.touch / factor, rest=0.05)


def test_one_run_corrects_its_own_step_to_what_was_measured():
    truth = slower(3)
    found = corrected(HERE, [measured(STEP, truth)], "model")
    assert found.seconds(STEP) == pytest.approx(truth.seconds(STEP), rel=0.02)
    assert found.rest == 0.05


def test_one_run_of_one_strategy_tells_more_of_the_others_than_speeds_alone():
    truth = slower(3)
    found = corrected(HERE, [measured(STEP, truth)], "model")
    for other in (RECOMPUTED, SHARDED):
        before = abs(math.log(HERE.seconds(other) / truth.seconds(other)))
        assert abs(math.log(found.seconds(other) / truth.seconds(other))) < 0.3 * before


def test_two_strategies_tell_computation_from_traffic():
    truth = replace(slower(2), message=0.004, link=2.5e5)
    found = corrected(HERE, [measured(STEP, truth), measured(SHARDED, truth)], "model")
    assert found.message / HERE.message == pytest.approx(4, rel=0.35)
    assert HERE.flops / found.flops == pytest.approx(2, rel=0.35)


def test_on_the_host_calls_are_as_slow_as_computation_until_runs_tell_them_apart():
    found = corrected(HERE, [measured(STEP, slower(3))], "model")
    assert found.operation / HERE.operation == pytest.approx(HERE.flops / found.flops, rel=0.1)
    device = replace(HERE, overlaps=True)
    run = replace(measured(STEP, replace(slower(3), overlaps=True)), speeds=device)
    apart = corrected(device, [run], "model")
    assert apart.operation / HERE.operation < 0.9 * HERE.flops / apart.flops


def test_what_ranks_wait_for_in_a_short_phase_does_not_make_its_work_slow():
    run = measured(replace(SHARDED, stepped=10**5), HERE)
    waited = 0.1 * run.seconds["step"]
    seconds = {**run.seconds, "backward": run.seconds["backward"] - waited, "optimizer": waited}
    found = corrected(HERE, [replace(run, seconds=seconds)], "model")
    for work in (STEP, RECOMPUTED, SHARDED):
        assert found.seconds(work) == pytest.approx(HERE.seconds(work), rel=0.05)


def test_no_run_makes_a_speed_absurd():
    run = measured(STEP, HERE)
    for step in (1e-9, 1e9):
        absurd = replace(run, seconds={"step": step})
        found = corrected(HERE, [absurd], "model")
        for name in ("flops", "link", "message", "update", "operation"):
            assert 0.1 - 1e-9 <= getattr(found, name) / getattr(HERE, name) <= 10 + 1e-9


def test_the_same_model_counts_most_and_the_last_run_more_than_the_first():
    others = [measured(STEP, slower(5), "another")] * 4
    found = corrected(HERE, [*others, measured(STEP, slower(2))], "model")
    assert found.seconds(STEP) == pytest.approx(slower(2).seconds(STEP), rel=0.1)
    runs = [measured(STEP, slower(2)), measured(STEP, slower(2)), *[measured(STEP, slower(4))] * 6]
    late, early = (corrected(HERE, each, "model").seconds(STEP) for each in (runs, runs[::-1]))
    assert early < late


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_run_on_a_busy_machine_does_not_outvote_the_others(place: int):
    runs = [measured(STEP, slower(2))] * 4
    runs.insert(place, replace(runs[0], seconds={name: 3 * s for name, s in runs[0].seconds.items()}))
    assert corrected(HERE, runs, "model").seconds(STEP) == pytest.approx(slower(2).seconds(STEP), rel=0.05)


def test_without_runs_speeds_stay_as_they_were_measured():
    assert corrected(HERE, [], "model") == HERE
    assert taught(HERE, [], "model").lines() == []


def test_a_plan_says_how_many_runs_it_follows_and_how_to_remove_them(cache: Path):
    (line,) = taught(None, [measured(STEP, HERE), measured(STEP, HERE, "another")], "model").lines()
    assert "2 earlier run(s)" in line
    assert "1 of this model" in line
    assert str(cache / "measured_steps.json") in line
    assert "ls-strategy plan --forget" in line


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(learned, "cache_dir", lambda: folder)
    return folder


def test_what_is_written_is_read_again_for_its_machine(cache: Path):
    run = measured(RECOMPUTED, HERE)
    assert add(run)
    assert add(replace(run, machine="other"))
    assert load("machine") == [run]
    assert len(load()) == 2
    assert stat.S_IMODE(learned.path().stat().st_mode) == 0o600
    assert forget() == 2
    assert load() == []
    assert forget() == 0


def test_a_plan_uses_runs_on_as_many_ranks_of_this_machine_unless_it_is_turned_off(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    machine = learned.machine_of(torch.device("cpu"), 2, 2, "32-true")
    add(measured(STEP, slower(3), machine=machine))
    hardware = Hardware(ranks=2, ranks_per_node=2, device="cpu")

    def lesson(hardware: Hardware, precision: str = "32-true") -> learned.Lesson | None:
        return lesson_here(torch.nn.Linear(2, 2), [forecast()], hardware, precision)

    monkeypatch.setenv(learned.SWITCH, "1")
    found = lesson(hardware)
    assert found is not None
    assert found.runs == 1
    assert found.own == 0
    assert found.speeds.seconds(STEP) == pytest.approx(slower(3).seconds(STEP), rel=0.1)
    assert lesson(replace(hardware, ranks=4)) is None
    assert lesson(hardware, "bf16-mixed") is None
    monkeypatch.setenv(learned.SWITCH, "0")
    assert lesson(hardware) is None


def test_what_would_have_helped_most_is_clearly_faster_and_comes_with_its_yaml():
    slow = forecast(Candidate(3), flops=10**10)
    fast = forecast(Candidate(2, TierConfig(tier="cpu")), flops=10**7)
    better = better_than(slow.candidate, [slow, fast], replace(HERE, host_update=1e8))
    assert better is not None
    assert better.name == "zero2_offload"
    assert json.loads(better.yaml) == {
        "class_path": "ls_strategy.ZeROStrategy", "init_args": {"stage": 2, "offload": "cpu"}
    }  # fmt: skip
    assert yaml_of(Candidate(1)) == "zero1"
    assert better_than(slow.candidate, [slow, replace(fast, work=slow.work)], HERE) is None
    run = measured(slow.work, slower(3))
    text = "\n".join(compared(run, HERE, better).lines())
    assert text.count("\n") == 2
    assert better.yaml in text


def test_the_file_keeps_the_newest_runs(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learned, "_MOST_RUNS", 3)
    for at in range(5):
        add(measured(STEP, HERE, at=at))
    assert [run.at for run in load()] == [2, 3, 4]


def damages() -> dict[str, str]:
    """Contents that no run has written, by what is wrong."""
    run = {"at": 1, "machine": "m", "workload": "w", "name": "n", "work": {}, "speeds": {}, "seconds": {}}
    return {
        "cut off": '{"format": 1, "runs": [{"at": 1',
        "another format": '{"format": 2, "runs": []}',
        "no object": "[]",
        "empty": "",
        "a run without numbers": json.dumps({"format": 1, "runs": [run]}),
        "nested": "[" * 100_000,
    }


@pytest.mark.parametrize("what", damages())
def test_a_damaged_file_is_ignored_with_one_line_and_replaced_by_the_next_run(cache: Path, what: str):
    file = cache / "measured_steps.json"
    file.write_text(damages()[what])
    file.chmod(0o600)
    with pytest.warns(UserWarning, match=r"measured_steps\.json.* is ignored.*plan --forget") as caught:
        assert load() == []
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    with pytest.warns(UserWarning, match="is ignored"):
        assert add(measured(STEP, HERE))
    assert len(load()) == 1


TIMES = [{"step": 0.0}, {"step": math.nan}, {"step": -1.0}, {}, {"step": 1.0, "forward": math.inf}]


@pytest.mark.parametrize("damage", TIMES)
def test_times_that_cannot_be_are_damage(cache: Path, damage: dict[str, float]):
    add(replace(measured(STEP, HERE), seconds=damage))
    with pytest.warns(UserWarning, match="is ignored"):
        assert load() == []


def test_a_file_that_others_may_write_is_not_read_and_their_folder_not_written(cache: Path):
    add(measured(STEP, HERE))
    learned.path().chmod(0o666)
    with pytest.warns(UserWarning, match="all users may write"):
        assert load() == []
    learned.path().chmod(0o600)
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match="all users may write"):
        assert load() == []
    assert not add(measured(STEP, HERE))


def test_no_time_in_a_file_ends_a_plan(cache: Path):
    add(replace(measured(STEP, HERE), seconds={"step": 1.0, "forward": 5e-324}))
    assert 0 < taught(HERE, load(), "model").speeds.seconds(STEP) < math.inf


class LoggerWithoutFolder:
    @property
    def log_dir(self) -> str:
        raise OSError("the disk is gone")


def test_a_logger_that_fails_does_not_end_the_rank_that_learns(cache: Path):
    chosen = forecast(Candidate(2))
    choice = Choice(chosen.candidate, "", (chosen,), taught(HERE, [], "model"))
    with pytest.warns(UserWarning, match="were not kept for the next plan.*the disk is gone"):
        planner_fit._learn(SimpleNamespace(logger=LoggerWithoutFolder()), choice, "machine", {"step": 1.0})
    assert load() == []


def _add_many(folder: str, count: int) -> None:
    learned.cache_dir = lambda: Path(folder)  # type: ignore[assignment]
    for at in range(count):
        add(measured(STEP, HERE, at=at))
    os._exit(0)


def test_processes_that_write_at_once_lose_nothing(cache: Path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add_many, args=(str(cache), 5)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(load()) == 15
    assert sorted(p.name for p in cache.iterdir()) == ["measured_steps.json", "measured_steps.lock"]
