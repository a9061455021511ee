"""The states of a flat buffer's parameters and of its update, and which follow which.

Handles of what is in flight (``reading``, ``gathering``, ``updating``, ``arriving``) are states of their own: an update
may run in any state of the parameters. Only `FlatBuffer` moves from one state to another.

::

    RELEASED ──> ON_DEMAND ──┐              NONE ──> DIRECTED_EARLY ──> NONE
       ^  └───────┬──────────┤                ├────> UPDATED_EARLY ───> NONE
       │          v          v                └────> DELAYED ─────────> NONE
       └────── GATHERED <──> AWAITED

A buffer that is gathered in 16 bits goes from RELEASED to CAST and back; ON_DEMAND or GATHERED may follow, and CAST
again.
"""

from __future__ import annotations

from enum import Enum


class _State(Enum):
    __hash__ = object.__hash__  # as it compares; that of `Enum` is Python, and every move looks states up


class ParameterState(_State):
    """Where the parameters of a buffer have their values."""

    RELEASED = "released"
    """Nowhere in full: each rank has its shard. Any use gathers them."""

    CAST = "cast"
    """In 16 bits, for what autocast casts: see `ls_strategy.zero.flat.cast`. Any other use gathers them."""

    GATHERED = "gathered"
    """In the buffer, for their own module or for good: they are ordinary tensors."""

    ON_DEMAND = "gathered on demand"
    """In the buffer for a while, because code outside of their own module has used one."""

    AWAITED = "awaited"
    """In the buffer, but newer ones are in flight, for which any use waits."""


class UpdateState(_State):
    """What has been done with a buffer's gradients apart from the optimizer's own step."""

    NONE = "none"
    """Nothing."""

    DIRECTED_EARLY = "directed early"
    """The current backward pass has begun the split steps of its tensors."""

    UPDATED_EARLY = "updated early"
    """The current backward pass has begun its update."""

    DELAYED = "delayed"
    """Its update runs, or has run, while the next step computes with the old parameters."""


EARLY = (UpdateState.DIRECTED_EARLY, UpdateState.UPDATED_EARLY)
"""What ends with the step, or with the backward pass if it is given up."""

_P, _U = ParameterState, UpdateState

FOLLOWS: dict[Enum, frozenset[Enum]] = {
    _P.RELEASED: frozenset({_P.RELEASED, _P.CAST, _P.GATHERED, _P.ON_DEMAND}),
    _P.CAST: frozenset({_P.CAST, _P.RELEASED, _P.ON_DEMAND, _P.GATHERED}),
    _P.GATHERED: frozenset({_P.GATHERED, _P.RELEASED, _P.AWAITED}),
    _P.ON_DEMAND: frozenset({_P.GATHERED, _P.RELEASED, _P.CAST, _P.AWAITED}),
    _P.AWAITED: frozenset({_P.GATHERED, _P.RELEASED, _P.AWAITED}),
    _U.NONE: frozenset({_U.NONE, _U.DIRECTED_EARLY, _U.UPDATED_EARLY, _U.DELAYED}),
    _U.DIRECTED_EARLY: frozenset({_U.NONE, _U.DIRECTED_EARLY}),
    _U.UPDATED_EARLY: frozenset({_U.NONE}),
    _U.DELAYED: frozenset({_U.NONE}),
}
"""The states that may follow each state."""


def not_next(now: Enum, to: Enum, name: str) -> RuntimeError:
    """Return the error of a move that `FOLLOWS` does not have: a mistake of the engine."""
    return RuntimeError(f"the buffer of {name!r} cannot go from {now.value!r} to {to.value!r}")
