"""What `ls_strategy.testing.spawn` promises: every rank's result or an exception, in time, and nobody left behind."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from ls_strategy import testing
from ls_strategy.testing import RankDiedError, RankTimeoutError, RankTraceback, spawn
from tests.limits import wall

pytestmark = pytest.mark.own_ranks


@pytest.fixture(autouse=True, scope="module")
def server() -> None:
    """Start the process from which ranks are forked: its imports take longer than some limits below."""
    spawn(_nothing, 1)


def _nothing(rank: int, world_size: int) -> None:
    pass


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> torch.Tensor:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size
    assert torch.get_num_threads() == 1
    return value


def _raise_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise KeyError(f"told to fail on {rank}")
    dist.barrier()


class _TwoArgumentsError(Exception):
    """Cannot be unpickled: its constructor wants more than ``args`` holds."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _raise_unpicklable(rank: int, world_size: int) -> None:
    raise _TwoArgumentsError(1, 2)


def _hang_on(rank: int, world_size: int, bad: int, pid_file: str) -> int:
    Path(f"{pid_file}{rank}").write_text(str(os.getpid()))
    while rank == bad:
        time.sleep(0.1)
    return rank


def _exit_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        os._exit(3)
    dist.barrier()


def _exit_after_the_other_failed(rank: int, world_size: int, after_s: float) -> None:
    if rank == 1:
        time.sleep(after_s)
        os._exit(3)
    raise ConnectionError("connection reset by peer")


def _system_exit(rank: int, world_size: int) -> None:
    raise SystemExit(0)


def _environment(rank: int, world_size: int, *names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def _group_state(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def _trainer(rank: int, world_size: int) -> dict[str, object]:
    from lightning.pytorch.demos.boring_classes import BoringModel

    from tests.trainers import bare_trainer

    torch.manual_seed(0)
    trainer = bare_trainer("ddp", world_size, max_steps=2)
    model = BoringModel()
    trainer.fit(model)
    return {
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "world_size": trainer.world_size,
        "rank": trainer.global_rank,
        "weight": model.layer.weight.detach(),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order_from_a_working_group(world_size: int) -> None:
    results = spawn(_sum_of_ranks, world_size, 10)
    assert [r.item() for r in results] == [sum(range(10, 10 + world_size))] * world_size


def _lambda_result(rank: int, world_size: int) -> object:
    return lambda: rank


def test_an_exception_keeps_its_type_and_names_its_rank() -> None:
    with pytest.raises(KeyError, match="told to fail on 1") as caught:
        spawn(_raise_on, 2, 1)
    cause = caught.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == 1
    assert "_raise_on" in cause.text


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [(_raise_unpicklable, RankDiedError, "1 and 2"), (_lambda_result, Exception, "pickle")],
    ids=["an exception", "a result"],
)
def test_what_cannot_travel_is_still_reported(body: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        spawn(body, 1)
    assert body is _lambda_result or "_TwoArgumentsError" in str(caught.value.__cause__)


@pytest.mark.wide
def test_a_hang_ends_in_time_with_the_rank_and_its_stack(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"rank\(s\) 1") as caught:
        spawn(_hang_on, 2, 1, str(pid_file), timeout_s=5)
    assert time.monotonic() - start < wall(15)
    assert caught.value.missing == [1]
    assert "_hang_on" in str(caught.value)
    for rank in range(2):
        pid = int(Path(f"{pid_file}{rank}").read_text())
        assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    """A zombie that the server has not reaped yet counts as ended."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_exits_by_itself_is_an_error_with_its_exit_code() -> None:
    with pytest.raises(RankDiedError, match="rank 1 ended with exit code 3"):
        spawn(_exit_on, 2, 1)


@pytest.mark.parametrize(("slowness", "after_s"), [(1, 0.1), (4, 1.0)])
def test_a_death_is_the_cause_even_if_a_peers_error_arrives_first(
    slowness: int, after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long one may be the other's cause is counted by the clock of the limits, which a busy machine slows down."""
    monkeypatch.setattr(testing, "clock", lambda: time.monotonic() / slowness)
    with pytest.raises(RankDiedError, match="rank 1 ended with exit code 3"):
        spawn(_exit_after_the_other_failed, 2, after_s)


def test_system_exit_on_a_rank_does_not_end_the_caller() -> None:
    with pytest.raises(RankDiedError, match="SystemExit"):
        spawn(_system_exit, 1)


def temporary_folder(rank: int, world_size: int) -> str:
    return tempfile.gettempdir()


def test_temporary_folders_of_ranks_are_where_the_present_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server has asked for its own one, and remembers it; tests that run side by side would share it."""
    spawn(temporary_folder, 1)  # the server runs
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert spawn(temporary_folder, 1) == [str(tmp_path)]


def test_ranks_see_torchrun_variables_the_present_environment_and_extra_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LS_TEST_PRESENT", "yes")
    monkeypatch.setenv("LS_TEST_REMOVED", "yes")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "LS_TEST_PRESENT", "LS_TEST_REMOVED", "LS_TEST_NEW")
    results = spawn(_environment, 2, *names, env={"LS_TEST_NEW": "new", "LS_TEST_REMOVED": None})
    assert [list(r.values()) for r in results] == [
        [str(rank), str(rank), "2", "1", "yes", None, "new"] for rank in range(2)
    ]


def test_no_group_unless_asked_for() -> None:
    assert spawn(_group_state, 2, init_process_group=False) == [False, False]


def test_a_trainer_on_each_rank_takes_part_in_one_run() -> None:
    first, second = spawn(_trainer, 2, init_process_group=False)
    assert [(each["environment"], each["world_size"], each["rank"]) for each in (first, second)] == [
        ("TorchElasticEnvironment", 2, rank) for rank in range(2)
    ]
    assert torch.equal(first["weight"], second["weight"])


def test_a_function_without_a_name_is_refused_before_any_rank_starts() -> None:
    with pytest.raises(Exception, match=r"pickle|local"):
        spawn(lambda rank, world_size: rank, 2)


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        spawn(_group_state, 0)
