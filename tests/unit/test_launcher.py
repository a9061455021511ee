"""Ranks end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from ls_strategy import ZeROStrategy
from ls_strategy.distributed.launcher import VARIABLE, LauncherWatch, end_processes

RANK = """
import os, sys, time
import ls_strategy.distributed.launcher as launcher
launcher._GRACE_S = 0.5
watch = launcher.LauncherWatch()
watch.start()
if sys.argv[1] == "stopped":
    watch.stop()
print(os.getpid(), flush=True)
time.sleep(60)
"""

LAUNCHER = """
import os, subprocess, sys
os.environ["LS_STRATEGY_LAUNCHER"] = str(os.getpid())
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True)
print(rank.stdout.readline(), end="", flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("what", "ends"), [("watched", True), ("stopped", False)])
def test_a_rank_ends_after_its_launcher(what: str, ends: bool) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stdin is not None
    rank = int(launcher.stdout.readline())
    time.sleep(0.2)
    assert _is_running(rank)
    launcher.stdin.close()
    launcher.wait(10)
    deadline = time.monotonic() + (20 if ends else 2)
    while _is_running(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _is_running(rank) is not ends
    if not ends:
        os.kill(rank, signal.SIGKILL)
    launcher.stdout.close()
    assert launcher.stderr is not None
    launcher.stderr.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/status") as status:  # noqa: PTH123
        return "State:\tZ" not in status.read()


def test_a_process_that_is_no_child_of_the_launcher_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in ("", "nonsense", str(os.getpid()), "1" if os.getppid() != 1 else str(os.getpid())):
        monkeypatch.setenv(VARIABLE, launcher)
        watch = LauncherWatch()
        watch.start()
        assert watch._thread is None
        watch.stop()


def test_a_strategy_can_be_sent_to_a_spawned_rank() -> None:
    assert pickle.loads(pickle.dumps(ZeROStrategy(2, start_method="spawn"))).config.stage == 2


def _deaf() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)


@pytest.mark.wide
def test_processes_that_do_not_listen_are_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_deaf), context.Process(target=time.sleep, args=(0.1,))]
    for process in processes:
        process.start()
    end_processes(processes)
    assert not any(process.is_alive() for process in processes)
