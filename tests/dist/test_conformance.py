"""The conformance suite finds what is wrong, and only that: on strategies that are right, and on some that are not."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ls_strategy import testing
from ls_strategy.extras.conformance.__main__ import main
from ls_strategy.extras.conformance.habits import all_habits
from ls_strategy.extras.conformance.specification import parse
from ls_strategy.extras.conformance.suite import Suite
from ls_strategy.extras.conformance.verdict import Verdict
from tests.limits import clock

WRONG = "tests.dist.wrong_strategies"


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    """The one server of this process: tests of other files fork their ranks from it as well."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(testing._PRELOAD)
    multiprocessing.forkserver.ensure_running()


def verdict(tmp_path: Path, strategy: str, habit: str, *, limit_s: float = 60.0) -> Verdict:
    suite = Suite(tmp_path, devices=2, accelerator="cpu", limit_s=limit_s, keep=True)
    return suite.one(all_habits()[habit], parse(strategy))


def test_the_table_tells_right_strategies_from_one_that_halves_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategies = ["ddp", "zero2", f"wrong={WRONG}.Halves"]
    arguments = ["--only", "plain_sgd", "synced_metrics", "--json", str(tmp_path / "out.json")]
    assert main(["--strategy", *strategies, *arguments]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["ddp", "zero2", "wrong"]
    assert shown[1].split() == ["plain_sgd", "equal", "equal", "OTHER"]
    assert shown[2].split() == ["synced_metrics", "equal", "equal", "OTHER"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["strategies"]["wrong"] == strategies[2]
    assert written["verdicts"]["plain_sgd"]["zero2"]["outcome"] == "equal"
    assert "loss of epoch 0 batch 1" in written["verdicts"]["plain_sgd"]["wrong"]["detail"]


def test_a_rank_that_never_ends_is_a_hang_and_is_ended(tmp_path: Path) -> None:
    found = verdict(tmp_path, f"{WRONG}.Hangs", "plain_sgd", limit_s=2.0)
    assert (found.outcome, found.detail[:13]) == ("hang", "rank 0, 1 had")


def test_a_save_that_destroys_the_one_before_it_loses_data(tmp_path: Path) -> None:
    assert verdict(tmp_path, f"{WRONG}.WritesInPlace", "killed_in_save").outcome == "lost data"


def test_a_resume_that_forgets_moments_is_found(tmp_path: Path) -> None:
    found = verdict(tmp_path, f"{WRONG}.Forgets", "resume_after_epoch")
    assert (found.outcome, "the loss of epoch 1 batch 1 has the same bits" in found.detail) == ("silently other", True)


def test_a_kill_between_two_saves_of_ours_loses_nothing(tmp_path: Path) -> None:
    found = verdict(tmp_path, "zero2", "killed_in_save")
    assert found.outcome == "equal", found
    assert "before the kill" not in found.detail


@pytest.mark.wide
def test_killing_the_suite_leaves_no_rank_that_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ls_strategy.conformance", "--strategy", f"{WRONG}.Hangs", "--only", "plain_sgd"]
    with subprocess.Popen([*command, "--keep", str(tmp_path / "kept")], stderr=subprocess.PIPE, text=True) as suite:
        log = tmp_path / "kept" / "Hangs" / "plain_sgd" / "phase0.rank1.log"
        assert within(60.0, log.exists)
        ranks = [pid for pid in processes() if str(log.parent) in files_of(pid)]
        suite.kill()
    assert ranks
    assert within(30.0, lambda: not set(ranks) & set(processes()))


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = clock() + seconds
    while not holds() and clock() < end:
        time.sleep(0.1)
    return holds()


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def files_of(pid: int) -> str:
    try:
        return " ".join(str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("strategy", "outcome", "detail"),
    [("Refuses", "refused", "Use DDP."), ("Fails", "raw error", "KeyError: 'shard 7'")],
)
def test_what_cannot_run_the_plainest_habit_runs_no_other(
    tmp_path: Path, strategy: str, outcome: str, detail: str
) -> None:
    suite = Suite(tmp_path, devices=2, accelerator="cpu", limit_s=60.0, keep=False)
    chosen = [all_habits()[name] for name in ("plain_sgd", "plain_adamw")]
    (_, _, first), (_, _, second) = suite.run(chosen, [parse(f"{WRONG}.{strategy}")])
    assert (first.outcome, second.outcome) == (outcome, "not run")
    assert detail in first.detail


@pytest.mark.wide
def test_an_error_on_one_rank_that_leaves_others_waiting_is_a_hang(tmp_path: Path) -> None:
    assert verdict(tmp_path, "zero2", "error_on_one_rank").outcome == "equal"
    assert verdict(tmp_path, f"{WRONG}.Hangs", "error_on_one_rank", limit_s=2.0).outcome == "hang"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_habit_is_silently_other_hangs_or_loses_data_under_ours() -> None:
    assert main(["--strategy", "zero1", "zero2", "zero3", "zero3_offload"]) == 0
