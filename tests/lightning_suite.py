"""Lightning's own tests on two ranks, with a strategy of this package in DDP's place.

``python -m tests.lightning_suite CHECKOUT [--record]``, where CHECKOUT is a clone of Lightning at the installed tag.

Every test of `MODULES` runs unchanged in two processes, as under torchrun on two nodes with one device each: so
``Trainer(devices=1)`` trains on two ranks too, and both prepare data. Strategy and nodes, where a test does not say
them, come from the environment (``PL_TRAINER_STRATEGY``, ``PL_TRAINER_NUM_NODES``). What passes under ``ddp`` on a rank
has to pass there under every strategy that is compared, but for `EXPECTED`. Tests that train nothing on two ranks
are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.forkserver
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ls_strategy.testing import RankDiedError, RankTimeoutError, spawn
from tests.bench.record import environment

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "records" / "lightning_suite.json"
FILES = "zero3_file"
"""Stage 3 with ``save_as="file"``."""

STRATEGIES = ("zero1", "zero2", "zero3", FILES)
LIMIT_S = 60

MODULES = (
    "models/test_restore.py",
    "models/test_hooks.py",
    "trainer/optimization/test_manual_optimization.py",
    "trainer/optimization/test_multiple_optimizers.py",
    "trainer/optimization/test_optimizers.py",
    "checkpointing/test_trainer_checkpoint.py",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "checkpointing/test_model_checkpoint.py",
    "callbacks/test_finetuning_callback.py",
    "utilities/test_grads.py",
)
"""Restoring, hooks, manual optimization, several optimizers, checkpoint callbacks; below ``tests/tests_pytorch``."""

REASONS = {
    "folder": "opens the checkpoint by itself (torch.load, a server of files), where a folder stands",
    "torch.save": "counts calls of torch.save, which writes no checkpoint here",
}
"""Why a test cannot pass. Nothing of the first kind fails with ``save_as="file"``."""

EXPECTED = {
    "test_correct_step_and_epoch": ("folder", "IsADirectoryError"),
}
"""Name of a test, with or without parameters -> the reason, and what has to be in its error."""


@dataclass
class Recorder:
    """A plugin of pytest on one rank: shared folders, the outcome, and whether a Trainer trained on two ranks."""

    folder: str
    outcome: str = "not run"
    text: str = ""
    worlds: list[tuple[str, int]] = field(default_factory=list)

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One folder for both ranks."""
        path = Path(self.folder)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """End the thread that explains waits: it lasts as long as the process group, and the tests count threads."""
        for thread in threading.enumerate():
            if thread.name == "ls_whereabouts":
                thread._target.__self__.stop()  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst."""
        if report.failed:
            self.outcome, self.text = "failed", str(report.longrepr)[-1500:]
        elif report.skipped:
            self.outcome = "skipped"
        elif report.when == "call" and self.outcome == "not run":
            self.outcome = "passed"


def run_test(rank: int, world_size: int, tests: str, test: str, folder: str) -> dict[str, Any]:
    """Run one test on one rank."""
    from lightning.pytorch.strategies import Strategy, StrategyRegistry

    from ls_strategy import ZeROStrategy

    os.environ["GROUP_RANK"] = str(rank)  # two nodes
    os.chdir(tests)
    sys.path.insert(0, tests)
    recorder = Recorder(folder)
    StrategyRegistry.register(FILES, ZeROStrategy, stage=3, save_as="file")
    setup = Strategy.setup_environment

    def noted(strategy: Any) -> None:
        setup(strategy)
        recorder.worlds.append((type(strategy).__name__, getattr(strategy, "world_size", 1)))

    Strategy.setup_environment = noted  # type: ignore[method-assign]
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        without = [f"-pno:{name}" for name in ("cacheprovider", "xdist", "timeout", "anyio", "hypothesispytest")]
        options = ["-q", *without, "-c", os.devnull]
        pytest.main([*options, f"--rootdir={tests}", "-W", "ignore", test], plugins=[recorder])
    return {"outcome": recorder.outcome, "text": recorder.text, "worlds": recorder.worlds}


def outcome_of(tests: str, test: str, strategy: str, folder: str) -> list[dict[str, Any]]:
    """Of every rank: ``passed``, ``failed``, ``skipped``, ``hung`` or ``one rank`` (nothing was trained on two)."""
    environment_of_ranks = {
        "PL_TRAINER_STRATEGY": strategy,
        "PL_TRAINER_DEVICES": "1",
        "PL_TRAINER_NUM_NODES": "2",
        "PL_TRAINER_ACCELERATOR": "cpu",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "2",
        "PYTEST_ADDOPTS": None,
    }
    try:
        ranks = spawn(
            run_test, 2, tests, test, folder, timeout_s=LIMIT_S, env=environment_of_ranks, init_process_group=False
        )
    except RankTimeoutError as error:
        return [{"outcome": "hung", "text": str(error)[-3000:]}] * 2
    except (RankDiedError, Exception) as error:
        return [{"outcome": "failed", "text": str(error)[-1500:]}] * 2
    on_two = any(world == 2 for each in ranks for _, world in each["worlds"])
    for each in ranks:
        if each["outcome"] == "passed" and not on_two:
            each["outcome"] = "one rank"
    return ranks


def collect(tests: str) -> list[str]:
    """Every test of `MODULES`."""
    modules = [f"tests_pytorch/{module}" for module in MODULES]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", os.devnull, f"--rootdir={tests}", *modules]
    found = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False)
    result = [line for line in found.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]
    if found.returncode or not result:
        raise RuntimeError(found.stdout[-2000:] + found.stderr[-2000:])
    return result


def preload() -> None:
    """Let ranks start with what most tests import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["lightning.pytorch", "ls_strategy.lightning.strategy", "torch.utils.tensorboard", "pytest"]
    )
    multiprocessing.forkserver.ensure_running()


def expected(test: str, text: str) -> str | None:
    """The reason why a test that failed with ``text`` cannot pass, if it is the reason."""
    name = test.rsplit("::", 1)[1]
    reason, sign = EXPECTED.get(name) or EXPECTED.get(name.split("[")[0]) or (None, "")
    return reason if sign in text else None


def compare(tests: str, test: str, strategies: Sequence[str], folder: str) -> dict[str, list[str]]:
    """Outcomes on both ranks by strategy, ``ddp`` first; print what differs."""
    trusted = outcome_of(tests, test, "ddp", f"{folder}-ddp")
    found = {"ddp": [each["outcome"] for each in trusted]}
    for strategy in strategies if "passed" in found["ddp"] else ():
        ranks = outcome_of(tests, test, strategy, f"{folder}-{strategy}")
        found[strategy] = [each["outcome"] for each in ranks]
        for rank, (ours, theirs) in enumerate(zip(ranks, trusted, strict=True)):
            if theirs["outcome"] != "passed" or ours["outcome"] == "passed":
                continue
            reason = expected(test, ours["text"])
            if reason is not None:
                found[strategy][rank] = f"expected: {reason}"
            else:
                print(f"--- {strategy} {test} on rank {rank}: {ours['outcome']}\n{ours['text']}", flush=True)
    return found


def summary(found: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, int]]:
    """Numbers of tests by strategy: what passes that passes under ``ddp``, on all ranks where it does; the others."""
    result: dict[str, dict[str, int]] = {}
    for outcomes in found.values():
        for strategy, ranks in outcomes.items():
            pairs = list(zip(ranks, outcomes["ddp"], strict=True))
            here = {ours for ours, theirs in pairs if theirs == "passed"} or {pairs[0][0]}
            counts = result.setdefault(strategy, {})
            which = next(iter(here - {"passed"}), "passed")
            counts[which] = counts.get(which, 0) + 1
    return result


def main() -> int:
    """Run, print what differs, and the counts; the exit status is 0 if nothing does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a clone of Lightning")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--only", nargs="+", default=[""], help="tests whose name contains one of these")
    parser.add_argument(
        "--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}, in place of these tests"
    )
    asked = parser.parse_args()
    tests = str((asked.checkout / "tests").resolve())
    preload()
    found: dict[str, dict[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, test in enumerate(t for t in collect(tests) if any(only in t for only in asked.only)):
            found[test] = compare(tests, test, asked.strategies, f"{scratch}/{number}")
    print(json.dumps(summary(found), indent=1))
    if asked.record:
        record(found)
    failed = {strategy: counts.keys() & {"failed", "hung"} for strategy, counts in summary(found).items()}
    return int(any(failed[strategy] for strategy in failed if strategy != "ddp"))


def record(found: dict[str, dict[str, list[str]]]) -> None:
    """Write what was found; tests that were not run keep what they have in the record."""
    before = json.loads(RECORD.read_text())["tests"] if RECORD.exists() else {}
    tests = {**before, **found}
    head = {"command": "python -m tests.lightning_suite CHECKOUT --record", **environment()}
    whole = {**head, "summary": summary(tests), "reasons": REASONS, "tests": tests}
    RECORD.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
