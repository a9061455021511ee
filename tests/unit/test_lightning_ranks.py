"""The strategy's ranks: collectives before there are groups, and errors that reach every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import CheckpointError, ConfigError, PlanError, RankFailedError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.trainers import bare_trainer


@pytest.fixture
def strategy() -> ZeROStrategy:
    return ZeROStrategy(1)


def test_nothing_is_reduced_before_there_are_groups(strategy: ZeROStrategy) -> None:
    tensor = torch.ones(2)
    assert strategy.reduce(tensor) is tensor
    assert strategy.reduce("text") == "text"
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(False)


def test_a_rank_that_failed_alone_waits_for_none(strategy: ZeROStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr("lightning.pytorch.strategies.ddp.DDPStrategy.barrier", lambda self, name: waited.append(name))
    strategy.barrier("first")
    strategy._alone = True
    strategy.barrier("second")
    assert waited == ["first"]


def comm(*messages: Any, **more: Any) -> Any:
    """A communicator whose other ranks have sent these messages."""
    made = Comm(None, None)
    vars(made).update(world_size=2, exchange_objects=lambda mine: [mine, *messages], **more)
    return made


@pytest.mark.parametrize(
    ("theirs", "mine", "error"),
    [
        (None, 7, None),
        ("rank 1: other", ValueError("mine"), (ValueError, "mine")),
        ("rank 1: no such file", 7, (CheckpointError, "rank 1: no such file")),
    ],
    ids=["succeeds everywhere", "fails here", "fails elsewhere"],
)
def test_work_gives_its_result_or_an_error_everywhere(
    strategy: ZeROStrategy, theirs: Any, mine: Any, error: Any
) -> None:
    strategy._comm = comm(theirs)

    def work() -> int:
        if isinstance(mine, Exception):
            raise mine
        return mine

    if error is None:
        assert strategy.on_all_ranks(work) == 7
    else:
        with pytest.raises(error[0], match=error[1]):
            strategy.on_all_ranks(work)


class Failed:
    """What `on_exception` does with the failures and the connections."""

    def __init__(self, strategy: ZeROStrategy, monkeypatch: pytest.MonkeyPatch, *, all_failed: bool) -> None:
        self.events: list[str] = []
        failures = SimpleNamespace(announce=lambda *_, **__: self.events.append("announce") or all_failed)
        strategy._comm = comm(failures=failures, break_connections=lambda: self.events.append("break"))
        monkeypatch.setattr(strategy.saves, "abandon", lambda: self.events.append("abandon"))
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "destroy_process_group", lambda: self.events.append("destroy"))


@pytest.mark.parametrize(
    ("error", "all_failed", "events"),
    [
        (ValueError("mine"), False, ["announce", "abandon", "break", "destroy"]),
        (PlanError("of one pipeline stage"), False, ["announce", "abandon", "break", "destroy"]),
        (ValueError("mine"), True, ["announce"]),
        (RankFailedError("rank 1: ..."), True, ["announce", "break", "destroy"]),
    ],
    ids=["on one rank", "a refusal on one rank", "on all ranks keeps the group", "of another rank"],
)
def test_an_error_breaks_the_connections(
    strategy: ZeROStrategy, monkeypatch: pytest.MonkeyPatch, error: Exception, all_failed: bool, events: list[str]
) -> None:
    failed = Failed(strategy, monkeypatch, all_failed=all_failed)
    strategy.on_exception(error)
    assert failed.events == events


def test_an_error_is_announced_even_if_the_engine_cannot_give_up_its_step(
    strategy: ZeROStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Failed(strategy, monkeypatch, all_failed=False)

    def abort() -> None:
        raise OSError("of the drive")

    reducer = SimpleNamespace(abandoned=0)
    monkeypatch.setattr(strategy, "engine", SimpleNamespace(abort=abort, reducer=reducer))
    with pytest.raises(OSError, match="of the drive"):
        strategy.on_exception(ValueError("mine"))
    assert failed.events == ["announce", "abandon", "break", "destroy"]


@pytest.mark.parametrize("stopped", [False, True], ids=["saves", "unless another rank has failed before"])
def test_an_interrupt_of_one_process(strategy: ZeROStrategy, stopped: bool) -> None:
    if stopped:
        strategy._comm = comm(failures=SimpleNamespace(stopped=True))
    assert strategy.all_interrupted() is not stopped
    assert strategy._alone is stopped


def test_a_backend_that_torch_does_not_know() -> None:
    for name in ("x", "cuda:x", "cpu:gloo,cuda:ncl"):
        trainer = bare_trainer(ZeROStrategy(2, process_group_backend=name), max_steps=1)
        with pytest.raises(ConfigError, match=f"Got process_group_backend='{name}', but torch knows 'gloo', 'nccl'"):
            trainer.fit(BoringModel())
