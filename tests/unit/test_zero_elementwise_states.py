"""Which states of a flat buffer follow which."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ls_strategy.zero.flat.states import EARLY, FOLLOWS, ParameterState, UpdateState
from tests.unit.flat_buffers import flat_of


def test_every_state_has_a_row_of_its_own_kind() -> None:
    assert FOLLOWS.keys() == {*ParameterState, *UpdateState}
    assert all(type(to) is type(now) for now, row in FOLLOWS.items() for to in row)


def test_every_state_is_reached_and_left() -> None:
    for kind, first in ((ParameterState, ParameterState.GATHERED), (UpdateState, UpdateState.NONE)):
        for state in kind:
            seen = {state}
            while more := {to for now in seen for to in FOLLOWS[now]} - seen:
                seen |= more
            assert first in seen, f"{state} never ends"
        assert {to for now in kind if now is first for to in FOLLOWS[now]} | {first} <= set(kind)


def test_what_does_not_follow_is_a_mistake_of_the_engine() -> None:
    ticket: Any = None  # of an update in flight
    for early in ("begin_early_directions", "begin_early_update"):
        flat = flat_of(nn.Linear(2, 3), "layer", 1)
        getattr(flat, early)(*([ticket] if early == "begin_early_update" else []))
        with pytest.raises(RuntimeError, match=f"of 'layer.weight' cannot go from {flat.update.value!r} to 'delayed'"):
            flat.begin_delayed_update(ticket)
    released = flat_of(nn.Linear(2, 3), "layer", 3)
    with pytest.raises(RuntimeError, match="cannot go from 'released' to 'awaited'"):
        released.hide()


@pytest.mark.parametrize("stage", [1, 3])
def test_flags_follow_from_the_state(stage: int) -> None:
    flat = flat_of(nn.Linear(2, 3), "layer", stage)  # type: ignore[arg-type]
    walk = ["hide", "finish_gather"] if stage == 1 else ["start_gather", "finish_gather", "release"]
    seen = [flat.state]
    for call in walk:
        getattr(flat, call)()
        seen.append(flat.state)
        assert flat.is_gathered is (flat.state is not ParameterState.RELEASED)
        assert flat.hidden is (flat.state is ParameterState.AWAITED)
        assert flat.gathered_on_demand is (flat.state is ParameterState.ON_DEMAND)
    released, gathered, awaited = ParameterState.RELEASED, ParameterState.GATHERED, ParameterState.AWAITED
    assert seen == ([gathered, awaited, gathered] if stage == 1 else [released, released, gathered, released])


def test_a_failed_operation_leaves_no_update_begun() -> None:
    flat = flat_of(nn.Linear(2, 3), "layer", 1)
    flat.begin_early_directions()
    assert flat.update in EARLY
    flat.give_up()
    assert flat.update is UpdateState.NONE
