"""Ranks end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from ls_strategy import ZeROStrategy
from ls_strategy.distributed.launch.launcher import VARIABLE, LauncherWatch, end_processes
from ls_strategy.distributed.launch.rendezvous import free_port
from tests.limits import wall
from tests.marks import slow

RANK = """
import os, sys, time
import ls_strategy.distributed.launch.launcher as launcher
launcher._GRACE_S = launcher._GRACE_WHILE_STARTING_S = 0.5
watch = launcher.LauncherWatch()
watch.start(by_lightning=True)
if sys.argv[1] == "stopped":
    watch.stop()
print(os.getpid(), flush=True)
time.sleep(60)
"""

LAUNCHER = """
import os, subprocess, sys
os.environ[sys.argv[3]] = str(os.getpid())
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True)
print(rank.stdout.readline(), end="", flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("what", "names_itself_in", "ends"),
    [
        ("watched", VARIABLE, True),
        ("watched", "TORCHELASTIC_RUN_ID", True),  # an agent of torchrun, which writes something else there
        ("stopped", VARIABLE, False),
        ("watched", "ANY_OTHER_PARENT", False),
    ],
)
def test_a_rank_ends_after_its_launcher(what: str, names_itself_in: str, ends: bool) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "TORCHELASTIC_RUN_ID")}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, what, names_itself_in], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=clean,
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
        watch.start(by_lightning=True)
        assert watch._thread is None
        watch.stop()


def _forked_rank(report: Connection) -> None:
    """The first of two ranks: it waits for the second one, which nobody starts any more."""
    os.environ.update(LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    watch = LauncherWatch()
    watch.start(by_lightning=False)
    report.send(os.getpid())
    dist.init_process_group("gloo", rank=0, world_size=2)


FORKING = """
import multiprocessing, os, sys
from tests.unit.test_launcher import VARIABLE, _forked_rank
if __name__ == "__main__":
    os.environ[VARIABLE] = str(os.getpid())
    context = multiprocessing.get_context(sys.argv[1])
    here, there = context.Pipe()
    context.Process(target=_forked_rank, args=(there,)).start()
    print(here.recv(), flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.wide
@pytest.mark.parametrize("method", ["fork", slow("spawn"), slow("forkserver")])
def test_a_forked_rank_0_ends_with_its_launcher(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORKING)
    command = [sys.executable, str(program), method]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdin is not None
        rank = int(launcher.stdout.readline())
        time.sleep(1.0)
        assert _is_running(rank)
        launcher.stdin.close()
        deadline = time.monotonic() + wall(10)
        while _is_running(rank):
            assert time.monotonic() < deadline
            time.sleep(0.05)


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
