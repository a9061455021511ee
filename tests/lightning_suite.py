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
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ls_strategy.testing import RankDiedError, RankTimeoutError, spawn
from tests.bench.record import environment

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "records" / "lightning_suite.json"
STRATEGIES = ("zero1", "zero2", "zero3")
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

_COUNTS = "counts calls of Strategy.backward, which this strategy overrides"
_FOLDER = "opens the path by torch.load, and a checkpoint is a folder; save_as='file' makes files"
EXPECTED = {
    "test_step_with_optimizer_closure": _COUNTS,
    "test_step_with_optimizer_closure_2": _COUNTS,
    "test_step_with_optimizer_closure_with_different_frequencies": _COUNTS,
    "test_correct_step_and_epoch": _FOLDER,
    "test_load_model_from_checkpoint": _FOLDER,
    "test_strict_model_load_less_params[True]": "serves the checkpoint as a file over HTTP, and it is a folder",
}
"""Name of a test, with or without parameters -> why it cannot pass."""


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
    from lightning.pytorch.strategies import Strategy

    os.environ["GROUP_RANK"] = str(rank)  # two nodes
    os.chdir(tests)
    sys.path.insert(0, tests)
    recorder = Recorder(folder)
    setup = Strategy.setup_environment

    def noted(strategy: Any) -> None:
        setup(strategy)
        recorder.worlds.append((type(strategy).__name__, getattr(strategy, "world_size", 1)))

    Strategy.setup_environment = noted  # type: ignore[method-assign]
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "-c", os.devnull]
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


def main() -> int:
    """Run, print what differs, and the counts; the exit status is 0 if nothing does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a clone of Lightning")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--only", default="", help="tests whose name contains this")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    asked = parser.parse_args()
    tests = str((asked.checkout / "tests").resolve())
    begin = time.monotonic()
    compared: list[str] = []
    differ: dict[str, dict[str, str]] = {name: {} for name in asked.strategies}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, test in enumerate(t for t in collect(tests) if asked.only in t):
            trusted = outcome_of(tests, test, "ddp", f"{scratch}/{number}-ddp")["outcome"]
            counts[trusted] = counts.get(trusted, 0) + 1
            if trusted != "passed":
                continue
            compared.append(test)
            for strategy in asked.strategies:
                found = outcome_of(tests, test, strategy, f"{scratch}/{number}-{strategy}")
                name = test.rsplit("::", 1)[1]
                expected = name in EXPECTED or name.split("[")[0] in EXPECTED
                if found["outcome"] not in ("passed", "skipped") and not expected:
                    differ[strategy][test] = found["text"]
                    print(f"--- {strategy} {test}: {found['outcome']}\n{found['text']}", flush=True)
    print(f"under ddp: {counts}; compared: {len(compared)}")
    for strategy, tests_that_differ in differ.items():
        print(f"{strategy}: {len(compared) - len(tests_that_differ)} of {len(compared)} pass")
    if asked.record:
        record = {
            "command": "python -m tests.lightning_suite CHECKOUT --record", **environment(), "under_ddp": counts,
            "compared": len(compared), "differ": {s: sorted(d) for s, d in differ.items()}, "expected": EXPECTED,
            "seconds": round(time.monotonic() - begin),
        }  # fmt: skip
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(differ.values()))


if __name__ == "__main__":
    raise SystemExit(main())
