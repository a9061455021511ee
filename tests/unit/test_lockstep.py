"""What signals ask for is not lost, and ranks that end at different batches are named, whenever they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist

from ls_strategy.distributed.comm import make_comm
from ls_strategy.distributed.lockstep import REQUEUE, STOP, Lockstep
from ls_strategy.errors import DataError
from ls_strategy.testing import spawn


def during_the_agreement(rank: int, world_size: int) -> list[int]:
    """Rank 1 gets its signal while ranks agree, on another one's request or on none."""
    lockstep = Lockstep(make_comm())
    lockstep.begin("training epoch", "limit_train_batches", lambda: False)
    reduce = dist.all_reduce

    def signalled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        lockstep.ask(STOP if rank == 1 else 0)
        return reduce(tensor, *args, **kwargs)

    agreed = []
    for request in (0, REQUEUE, 0):
        lockstep._due = 1
        if len(agreed) == 1:
            dist.all_reduce = signalled
        lockstep.ask(request if rank == 0 else 0)
        agreed.append(lockstep.agree())
        dist.all_reduce = reduce
    return agreed


@pytest.mark.timeout(120)
def test_a_signal_during_the_agreement_counts_at_the_next_one() -> None:
    assert spawn(during_the_agreement, 2) == [[0, REQUEUE, STOP]] * 2


def meets_those_that_compare(rank: int, world_size: int, known: bool) -> str:
    """Rank 0 is at its last batch, known or not; the others compare their batches before they begin the next one."""
    lockstep = Lockstep(make_comm())
    lockstep.reset()
    lockstep.begin("training epoch", "limit_train_batches", lambda: known and rank == 0)
    try:
        with lockstep.step():  # of rank 0 it waits for the others
            pass
        if rank == 0:
            lockstep.end()
        lockstep.agree()
    except DataError as error:
        return str(error)
    raise AssertionError("no rank noticed")


@pytest.mark.parametrize("known", [True, False])
def test_ranks_that_compare_when_another_one_has_ended_have_more_batches(known: bool) -> None:
    """All have begun as many: the message still says which ranks have more."""
    for message in spawn(meets_those_that_compare, 3, known):
        assert message.startswith(
            "Got 1 batch on rank 0 in this training epoch, and 2 batches on ranks 1, 2 or more. "
        ), message
