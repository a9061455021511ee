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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import environment
from ls_strategy.testing import RankDiedError, RankTimeoutError, free_port, spawn

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "records" / "lightning_suite.json"
FILES = "zero3_file"
"""Stage 3 with ``checkpoint.format="file"``."""

STRATEGIES = ("zero1", "zero2", "zero3", FILES)
LIMIT_S = 60
TOGETHER = 10
"""So many tests run in a pair of processes."""

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
    "folder": (
        "opens the checkpoint as a file, and it is a folder",
        ("IsADirectoryError", "isfile", "invalid load key, '<'"),
    ),
    "torch.save": (
        "replaces torch.save by a mock, so that nothing is written, and counts its calls, which are others here",
        ("call_count", "EOFError: Ran out of input"),
    ),
}
"""Why a test cannot pass, and what is in its error then. With ``checkpoint="file"`` no checkpoint is a folder."""

EXPECTED = {
    "test_correct_step_and_epoch": "folder",
    "test_current_score": "folder",
    "test_default_checkpoint_freq": "torch.save",
    "test_load_model_from_checkpoint": "folder",
    "test_model_checkpoint_on_exception_in_other_callbacks": "folder",
    "test_model_checkpoint_on_exception_parametrized": "folder",
    "test_model_checkpoint_on_exception_run_condition_on_train_batch_start": "folder",
    "test_model_checkpoint_save_last[True]": "folder",
    "test_model_checkpoint_save_last_checkpoint_contents": "folder",
    "test_model_checkpoint_save_last_none_monitor": "folder",
    "test_resume_training_preserves_old_ckpt_last": "folder",
    "test_strict_model_load_less_params[True]": "folder",
    "test_top_k": "torch.save",
}
"""Name of a test, with or without parameters -> the reason."""


@dataclass
class Recorder:
    """A plugin of pytest on one rank: shared folders, the outcome, and whether a Trainer trained on two ranks."""

    folder: str
    outcome: str = "not run"
    text: str = ""
    worlds: list[int] = field(default_factory=list)

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One folder for both ranks."""
        path = Path(self.folder)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst."""
        if report.failed:
            self.outcome, self.text = "failed", str(report.longrepr)[-1500:]
        elif report.skipped:
            self.outcome = "skipped"
        elif report.when == "call" and self.outcome == "not run":
            self.outcome = "passed"


def run_tests(rank: int, world_size: int, tests: str, names: list[str], folder: str, ports: list[int]) -> list[Any]:
    """Run tests one after the other on one rank."""
    from lightning.pytorch.strategies import Strategy, StrategyRegistry

    from ls_strategy import ZeROStrategy

    os.environ["GROUP_RANK"] = str(rank)  # two nodes
    os.chdir(tests)
    sys.path.insert(0, tests)
    StrategyRegistry.register(FILES, ZeROStrategy, stage=3, checkpoint="file")
    setup = Strategy.setup_environment
    found = [Recorder(f"{folder}/{number}") for number in range(len(names))]

    def noted(strategy: Any) -> None:
        setup(strategy)
        recorder.worlds.append(getattr(strategy, "world_size", 1))

    Strategy.setup_environment = noted  # type: ignore[method-assign]
    without = [f"-pno:{name}" for name in ("cacheprovider", "xdist", "timeout", "anyio", "hypothesispytest")]
    options = ["-q", *without, "-c", os.devnull, f"--rootdir={tests}", "-W", "ignore"]
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        for name, recorder, port in zip(names, found, ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            pytest.main([*options, name], plugins=[recorder])
    return [{"outcome": each.outcome, "text": each.text, "on_two": 2 in each.worlds} for each in found]


def outcomes_of(tests: str, names: list[str], strategy: str, folder: str) -> list[list[dict[str, Any]]]:
    """Of every test on every rank: ``passed``, ``failed``, ``skipped``, ``hung`` or ``one rank``.

    Tests run several in a pair of processes, and again by themselves if one does not pass.
    """
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
    ports = [free_port() for _ in names]
    limit = LIMIT_S + 5 * (len(names) - 1)
    try:
        ranks = spawn(
            run_tests, 2, tests, names, folder, ports, timeout_s=limit, env=environment_of_ranks,
            init_process_group=False,
        )  # fmt: skip
        found = [list(both) for both in zip(*ranks, strict=True)]
    except (RankDiedError, Exception) as error:
        outcome = "hung" if isinstance(error, RankTimeoutError) else "failed"
        found = [[{"outcome": outcome, "text": str(error)[-3000:], "on_two": True}] * 2 for _ in names]
    again = {"failed", "hung", "not run"} if len(names) > 1 else set()
    for number, ranks in enumerate(found):
        if again & {each["outcome"] for each in ranks}:
            found[number] = outcomes_of(tests, [names[number]], strategy, f"{folder}-{number}")[0]
        elif not ranks[0]["on_two"]:
            found[number] = [{**each, "outcome": each["outcome"].replace("passed", "one rank")} for each in ranks]
    return found


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
    reason = EXPECTED.get(name) or EXPECTED.get(name.split("[")[0])
    return reason if reason is not None and any(sign in text for sign in REASONS[reason][1]) else None


def compare(tests: str, names: list[str], strategies: Sequence[str], folder: str) -> dict[str, dict[str, list[str]]]:
    """Outcomes of tests on both ranks by strategy, ``ddp`` first; print what differs."""
    trusted = dict(zip(names, outcomes_of(tests, names, "ddp", f"{folder}-ddp"), strict=True))
    found = {name: {"ddp": [each["outcome"] for each in ranks]} for name, ranks in trusted.items()}
    compared = [name for name in names if "passed" in found[name]["ddp"]]
    for strategy in strategies if compared else ():
        outcomes = outcomes_of(tests, compared, strategy, f"{folder}-{strategy}")
        for name, ranks in zip(compared, outcomes, strict=True):
            found[name][strategy] = [
                _judge(f"{strategy} {name} on rank {rank}", name, ours, trusted[name][rank])
                for rank, ours in enumerate(ranks)
            ]
    return found


def _judge(what: str, name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    if theirs["outcome"] != "passed" or ours["outcome"] == "passed":
        return ours["outcome"]
    reason = expected(name, ours["text"])
    if reason is not None:
        return f"expected: {reason}"
    print(f"--- {what}: {ours['outcome']}\n{ours['text']}", flush=True)
    return ours["outcome"]


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
        names = [name for name in collect(tests) if any(only in name for only in asked.only)]
        for start in range(0, len(names), TOGETHER):
            found.update(compare(tests, names[start : start + TOGETHER], asked.strategies, f"{scratch}/{start}"))
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
    whole = {
        **head,
        "summary": summary(tests),
        "reasons": {name: why for name, (why, _) in REASONS.items()},
        "tests": tests,
    }
    RECORD.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
