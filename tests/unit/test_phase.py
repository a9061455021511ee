"""The phases of an optimizer's gradients: each transition from where it may come, and an error from anywhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ls_strategy.errors import StateError
from ls_strategy.zero.step.stepper import OptimizerStep, Phase

ALLOWED = {
    "averaged": {Phase.ACCUMULATING, Phase.STEPPED},
    "clipped": {Phase.AVERAGED, Phase.CLIPPED},
    "stepped": {Phase.AVERAGED, Phase.CLIPPED},
    "reopen": set(Phase),
    "start_over": set(Phase),
}
TO = {
    "averaged": Phase.AVERAGED,
    "clipped": Phase.CLIPPED,
    "stepped": Phase.STEPPED,
    "reopen": Phase.ACCUMULATING,
    "start_over": Phase.ACCUMULATING,
}


def state_in(phase: Phase) -> OptimizerStep:
    state = OptimizerStep(cast(Any, SimpleNamespace(optimizer=object())), [])
    state.phase = phase
    state.norm, state.clip, state.folded = torch.tensor(3.0), torch.tensor(0.5), True
    return state


def move(state: OptimizerStep, transition: str) -> None:
    if transition in ("reopen", "start_over"):
        getattr(state, transition)()
    else:
        state.move(TO[transition])


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("transition", ALLOWED)
def test_a_transition_is_made_from_where_it_is_allowed_and_refused_from_elsewhere(
    transition: str, phase: Phase
) -> None:
    state = state_in(phase)
    if phase in ALLOWED[transition]:
        move(state, transition)
        assert state.phase is TO[transition]
    else:
        with pytest.raises(StateError, match=f"Got {phase.value} gradients"):
            move(state, transition)
        assert state.phase is phase


def test_reopened_gradients_have_no_norm_but_keep_what_was_left_to_the_update() -> None:
    state = state_in(Phase.STEPPED)
    state.reopen()
    assert state.norm is None
    assert state.folded
    assert state.clip is not None


def test_dropped_gradients_leave_nothing_to_the_update() -> None:
    state = state_in(Phase.STEPPED)
    state.start_over()
    assert (state.norm, state.clip, state.folded) == (None, None, False)
