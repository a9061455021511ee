"""Copies that a state dict returns at stage 3: writes to them count until the next boundary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.user_code.state_dict_copies import StateDictCopies
from tests.unit.flat_buffers import sharded


@pytest.fixture
def flat() -> FlatBuffer:
    flat = sharded(3).flats[1]
    flat.on_demand = None
    return flat


def values_of(flat: FlatBuffer) -> Tensor:
    return flat.master[:9].view(3, 3).clone()


def test_written_elements_of_a_copy_reach_the_masters_and_others_stay(flat: FlatBuffer) -> None:
    given, values, before = StateDictCopies(), values_of(flat), flat.master.clone()
    given.add(flat, 0, values)
    values[0, 0] = 7.0
    given.take_writes()
    assert flat.master[0] == 7.0
    assert torch.equal(flat.master[1:], before[1:])


def test_a_write_to_a_copy_reaches_a_gathered_parameter(flat: FlatBuffer) -> None:
    given, values = StateDictCopies(), values_of(flat)
    flat.start_gather()
    flat.finish_gather()
    given.add(flat, 0, values)
    values.fill_(2.0)
    given.take_writes()
    assert bool((flat.views[0] == 2).all())
    assert not flat.writes.take()


@pytest.mark.parametrize("through_data", [False, True], ids=["", "no version counts it"])
def test_a_write_after_the_boundary_is_an_error_with_the_cure(flat: FlatBuffer, through_data: bool) -> None:
    given, values = StateDictCopies(), values_of(flat)
    given.add(flat, 0, values)
    given.take_writes()
    (values.data if through_data else values).mul_(2)
    with pytest.raises(StateError, match=r"returned for 'blocks.0.weight'.*later than in the hook that called it"):
        given.take_writes()


@pytest.mark.parametrize("training", [True, False])
def test_a_copy_that_was_written_and_dropped_counts_while_training_runs(flat: FlatBuffer, training: bool) -> None:
    given, before = StateDictCopies(), flat.master.clone()
    given.training = training

    def write() -> None:
        values = values_of(flat)
        given.add(flat, 0, values)
        values.fill_(3.0)

    write()
    if not training:
        given.take_writes()
        assert torch.equal(flat.master, before)
        return
    given.drop()
    given.take_early(given.written())
    given.drop()
    assert not given.fresh
    assert bool((flat.master[:9] == 3).all())


def test_a_write_through_a_view_counts_though_the_copy_itself_was_dropped(flat: FlatBuffer) -> None:
    given = StateDictCopies()

    def row() -> Tensor:
        values = values_of(flat)
        given.add(flat, 0, values)
        return values[0]

    view = row()
    given.drop()
    view.fill_(3.0)
    given.take_writes()
    assert bool((flat.master[:3] == 3).all())
