"""Runs: adjacent parameters with the same group and the same state, which are stepped as one tensor.

::

    pieces  | a | b |   | c | d | e |        c was never used: no decay, no momentum, no step count
    runs    |  a b  |       |  d e  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from ls_strategy.layout import round_up
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.step.optimizer_state import OptimizerStates


class _Steps(Protocol):
    in_runs: ClassVar[bool]


T = TypeVar("T", bound=_Steps)


@dataclass
class Run:
    """Adjacent pieces of one flat buffer that are stepped as one tensor."""

    flat: FlatBuffer
    flat_number: int
    """Of the buffer, among those of the optimizer."""

    group: int
    members: list[int]
    """Numbers of the parameters, in `OptimizerStates`."""

    start: int
    stop: int
    """Range of the buffer's stepped range."""


def compose(
    states: OptimizerStates, stepped: Sequence[bool], updaters: Sequence[T], *, cuts: bool
) -> list[tuple[T, Run]]:
    """Join the pieces of the parameters that are stepped into runs, each with what steps it.

    Args:
        states: the parameters, with their numbers and states.
        stepped: which parameters are stepped, by number. A run ends at one that is not.
        updaters: what steps each parameter, by number. A run ends at one that is not stepped in runs.
        cuts: parameters may be split and joined. Otherwise each one is a run.
    """
    result: list[tuple[T, Run]] = []
    for n, flat in enumerate(states.flats):
        current: Run | None = None
        current_key: Any = None
        for i, piece in enumerate(flat.pieces):
            number = states.offsets[n] + i
            updater = updaters[number]
            if not (stepped[number] and updater.in_runs):
                current = None
                continue
            if piece.numel == 0:
                continue
            key = (id(updater), states.group_of[number], _signature(states.entries.get(number, {})) if cuts else number)
            if current is not None and key == current_key:
                current.stop = piece.stop
                current.members.append(number)
                continue
            current, current_key = Run(flat, n, states.group_of[number], [number], piece.start, piece.stop), key
            result.append((updater, current))
    for _, run in result:
        # Extend to the end of the slot, so that a vector loop meets the same elements wherever a shard ends. Not for a
        # run of one element: a one-element state may be element-wise or per step.
        if cuts and run.stop - run.start > 1:
            run.stop = round_up(run.stop, run.flat.layout.align)
    return result


def _signature(state: dict[str, Any]) -> Any:
    """Return a key that is equal for parameters that may share a run: their per-parameter states are equal."""
    return tuple(sorted((k, float(v) if isinstance(v, Tensor) else v) for k, v in state.items()))
