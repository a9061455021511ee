"""Each wait between device and host is needed: the programs of `test_fits` notice when it is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.simulated_device.device import run
from tests.simulated_device.waits import WAITS, Wait, WaitNotFoundError, place_of, program_of, ranks_of, without


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    return all(map(same, one, other)) if isinstance(one, list) else one == other


def test_every_wait_stands_where_it_is_taken_out() -> None:
    """A wait that has moved would be looked at by the slow run only."""
    for wait in WAITS:
        _, source = place_of(wait)
        assert wait.line in source


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_a_missing_wait_is_noticed(wait: Wait) -> None:
    program, arguments = program_of(wait)
    try:
        found = run(without, wait, program, *arguments, ranks=ranks_of(wait))
    except WaitNotFoundError:
        raise
    except Exception:
        return  # the program itself has noticed
    if not found.hazards and found.delayed <= run(program, *arguments).delayed:
        assert not same(found.result, run(program, *arguments, simulated=False).result)
