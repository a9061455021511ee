"""Ranks that are reused: a case finds what it would find in a new process, and what it leaves behind ends its ranks."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook

from ls_strategy.testing import RankDiedError, RankTimeoutError
from tests import rank_pool


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pool of this test alone, and no report of what its cases leave behind on purpose."""
    own = rank_pool._Pool()
    monkeypatch.setattr(rank_pool, "_pool", own)
    monkeypatch.setattr(rank_pool, "left_behind", [])
    yield
    own.close()


def pid(rank: int, world_size: int) -> int:
    return os.getpid()


def raises(rank: int, world_size: int) -> None:
    raise KeyError("on purpose")


def hangs(rank: int, world_size: int) -> None:
    time.sleep(600)


def dies(rank: int, world_size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def found(rank: int, world_size: int) -> dict[str, Any]:
    """Look at what a new process has, and change what a rank puts back."""
    total = torch.ones(1)
    dist.all_reduce(total)
    seen = {
        "drawn": torch.rand(2),
        "variable": os.environ.get("LS_TESTS_LEFT"),
        "folder": str(Path.cwd()),
        "path": "left" in sys.path,
        "rank": (os.environ["RANK"], os.environ["WORLD_SIZE"], dist.get_rank(), dist.get_world_size()),
        "sum": total.item(),
        "filters": len(warnings.filters),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }
    os.environ["LS_TESTS_LEFT"] = "1"
    os.chdir("/")
    sys.path.append("left")
    warnings.simplefilter("ignore")
    random.seed(1)
    dist.new_group([rank])
    return seen


@pytest.fixture(autouse=True)
def lent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend ranks to wide tests, too, which get some of their own elsewhere."""
    if not request.node.get_closest_marker("own_ranks"):
        monkeypatch.setattr(rank_pool, "own", False)


def plain(seen: dict[str, Any]) -> dict[str, Any]:
    return {**seen, "drawn": seen["drawn"].tolist()}


def test_a_case_finds_a_new_process_in_one_that_has_run_another() -> None:
    pids = rank_pool.spawn(pid, 2)
    first = [plain(seen) for seen in rank_pool.spawn(found, 2)]
    second = [plain(seen) for seen in rank_pool.spawn(found, 2)]
    alone = [plain(seen) for seen in rank_pool.spawn_processes(found, 2)]
    assert first == second
    assert first == alone
    assert set(rank_pool.spawn(pid, 2)) == set(pids)
    assert rank_pool.left_behind == []


def test_the_number_of_ranks_may_change_from_case_to_case() -> None:
    two = set(rank_pool.spawn(pid, 2))
    three = set(rank_pool.spawn(pid, 3))
    assert len(three) == 3
    assert two < three
    assert set(rank_pool.spawn(pid, 1)) < three


def leaves_dtype(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)


def leaves_function(rank: int, world_size: int) -> None:
    dist.all_reduce = print


def leaves_method(rank: int, world_size: int) -> None:
    from ls_strategy import ZeROStrategy

    ZeROStrategy.setup = print  # type: ignore[method-assign, assignment]


def leaves_constant(rank: int, world_size: int) -> None:
    import ls_strategy.distributed.watchdog.wait_report as module

    module._ANY_QUESTION = 7


def leaves_thread(rank: int, world_size: int) -> None:
    rank_pool.THREADS_S = 0.1  # this one never ends
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="left").start()


def leaves_hook(rank: int, world_size: int) -> None:
    register_module_forward_hook(lambda *_: None)


def leaves_signal(rank: int, world_size: int) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leaves_grad_mode(rank: int, world_size: int) -> None:
    torch.set_grad_enabled(False)


LEFT: dict[Callable[..., None], str] = {
    leaves_dtype: "dtype is torch.float64, was torch.float32",
    leaves_function: "torch.distributed.all_reduce is another",
    leaves_method: "ZeROStrategy.setup is another",
    leaves_constant: "ls_strategy.distributed.watchdog.wait_report._ANY_QUESTION is another",
    leaves_thread: "threads ['left']",
    leaves_hook: "hooks of all modules",
    leaves_signal: "signals",
    leaves_grad_mode: "grad mode is False, was True",
}


def leaves_one_each(rank: int, world_size: int) -> None:
    list(LEFT)[rank](rank, world_size)


@pytest.mark.wide
def test_what_a_case_leaves_behind_is_named_and_ends_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "left_behind", [])
    before = rank_pool.spawn(pid, len(LEFT))
    rank_pool.spawn(leaves_one_each, len(LEFT))
    assert not set(before) & set(rank_pool.spawn(pid, 1))
    case = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0]
    for rank, (leaves, what) in enumerate(LEFT.items()):
        found = [line for line in rank_pool.left_behind if line.startswith(f"{case}, rank {rank}: ")]
        assert any(what in line for line in found), (leaves, found)
    for each in before:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("fails", "error", "timeout_s"), [(raises, KeyError, 20), (dies, RankDiedError, 20), (hangs, RankTimeoutError, 0.5)]
)
def test_ranks_of_a_case_that_fails_are_ended(
    fails: Callable[..., None], error: type[Exception], timeout_s: float
) -> None:
    before = rank_pool.spawn(pid, 2)
    with pytest.raises(error):
        rank_pool.spawn(fails, 2, timeout_s=timeout_s)
    assert not set(before) & set(rank_pool.spawn(pid, 2))
    for each in before:
        with pytest.raises(ProcessLookupError):
            os.kill(each, 0)


def variable(rank: int, world_size: int) -> tuple[int, str | None]:
    return os.getpid(), os.environ.get("LS_TESTS_ASKED")


def test_variables_that_are_read_when_a_process_starts_need_a_new_one() -> None:
    before = set(rank_pool.spawn(pid, 2))
    asked = rank_pool.spawn(variable, 2, env={"LS_TESTS_ASKED": "1"})
    assert [value for _, value in asked] == ["1", "1"]
    assert not before & {each for each, _ in asked}


@pytest.mark.own_ranks
def test_a_test_that_is_marked_gets_ranks_of_its_own() -> None:
    first, second = (set(rank_pool.spawn(pid, 2)) for _ in range(2))
    assert not first & second


def test_a_rank_is_replaced_after_many_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "MOST_CASES", 2)
    pids = [rank_pool.spawn(pid, 1)[0] for _ in range(4)]
    assert pids[0] == pids[1]
    assert pids[1] != pids[2]
    assert pids[2] == pids[3]
