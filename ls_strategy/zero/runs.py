"""What an optimizer steps: runs of adjacent parameters with the same group and the same history, as one tensor each.

::

    pieces  | a | b |   | c | d | e |        c unused since the start, say: no decay, no momentum, no step count
    runs    |  a b  |       |  d e  |

The states of a run are the run's own while it lasts. `Runs.dissolve` moves them back to the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.layout import round_up
from ls_strategy.zero.kernels import Kernel
from ls_strategy.zero.optimizer_state import ELEMENTWISE, OptimizerStates
from ls_strategy.zero.units import Flat

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that torch can run as one pass over memory; used where the user left the choice to torch."""


@dataclass
class Run:
    """Adjacent pieces that are stepped as one tensor."""

    flat: Flat
    flat_number: int
    group: int
    members: list[int]
    start: int
    stop: int
    tensor: Tensor
    fused: bool = False
    """Stepped by the fused update; then these hold what it needs of the past."""

    steps: int = 0
    scalars: dict[str, Any] = field(default_factory=dict)


class Runs:
    """The runs of one optimizer."""

    def __init__(
        self, optimizer: Optimizer, states: OptimizerStates, kernel: Kernel | None, fused: list[bool], *, cuts: bool
    ) -> None:
        """Start without any run.

        Args:
            optimizer: the user's.
            states: of its parameters.
            kernel: its fused update, for optimizers that have one.
            fused: one flag per flat buffer: the fused update steps it.
            cuts: parameters may be cut and joined; otherwise each is a run of its own, in its own shape.
        """
        self._optimizer = optimizer
        self._states = states
        self._kernel = kernel
        self._fused = fused
        self._cuts = cuts
        self._group_of: dict[int, int] = {}
        """By a parameter's number."""
        numbers = iter(states.order)
        for g, group in enumerate(optimizer.param_groups):
            self._group_of |= {next(numbers): g for _ in group["params"]}
        self.all: list[Run] = []
        self._state: defaultdict[Tensor, Any] = defaultdict(dict)
        self.composed_for: tuple[tuple[bool, ...], frozenset[int]] | None = None
        """What the runs were composed of: one flag per parameter, and the numbers of those that were left out."""

    def __iter__(self) -> Iterator[Run]:
        """Give all runs, in the order of the flat buffers."""
        return iter(self.all)

    def compose(self, used: list[bool], dropped: frozenset[int]) -> None:
        """Cut the used pieces into runs; nothing to do while the same parameters are used.

        Args:
            used: one flag per parameter of the flats, in their order.
            dropped: numbers of those that are not stepped all the same.
        """
        key = (tuple(used), dropped)
        if self.composed_for == key:
            return
        self.dissolve()
        for n, flat in enumerate(self._states.flats):
            current: Run | None = None
            current_key: Any = None
            for i, piece in enumerate(flat.pieces):
                number = self._states.offsets[n] + i
                if not used[number] or number in dropped:
                    current = None
                    continue
                if piece.numel == 0:
                    continue
                run_key = (self._group_of[number], self._signature(number) if self._cuts else number)
                if current is not None and run_key == current_key:
                    current.stop = piece.stop
                    current.members.append(number)
                    continue
                current = Run(flat, n, run_key[0], [number], piece.start, piece.stop, flat.master)
                current.fused = self._fused[n]
                current_key = run_key
                self.all.append(current)
        for r in self.all:
            # To the end of the slot: wherever a shard ends, a vector loop meets the same elements. Not a run of one
            # element, whose state may be that of the parameter or of the step.
            if self._cuts and r.stop - r.start > 1:
                r.stop = round_up(r.stop, r.flat.layout.align)
            if r.fused:
                self._recall(r)
                continue
            r.tensor = r.flat.master.detach()[r.start : r.stop].view(self._shape_of(r)).requires_grad_()
            self._state[r.tensor] = self._state_of_run(r)
        self.composed_for = key

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the groups hold the runs that no fused update takes: all that is left to the optimizer's ``step``."""
        groups = self._optimizer.param_groups
        pieces = [group["params"] for group in groups]
        piece_state = self._optimizer.state
        runs = [r for r in self.all if not r.fused]
        fused = [g for i, g in enumerate(groups) if self._may_fuse(i)]
        try:
            for g, group in enumerate(groups):
                group["params"] = [r.tensor for r in runs if r.group == g]
            for group in fused:
                group["fused"] = True
            self._optimizer.state = self._state
            for r in runs:
                grads = r.flat.averages.tensor()[r.start : r.stop]
                r.tensor.grad = grads.view(r.tensor.shape).to(r.tensor.dtype)
            yield
        finally:
            self._state = self._optimizer.state  # type: ignore[assignment]
            self._optimizer.state = piece_state
            for group, members in zip(groups, pieces, strict=True):
                group["params"] = members
            for group in fused:
                group["fused"] = None
            for r in runs:
                r.tensor.grad = None

    def _may_fuse(self, group: int) -> bool:
        """Whether the group's update may run as one pass over memory: torch can, and the user has not chosen."""
        settings = self._optimizer.param_groups[group]
        if type(self._optimizer) not in _FUSED or settings.get("fused") is not None or settings.get("foreach"):
            return False
        # torch's fused SGD takes momentum of all tensors or of none; a run that begins late has none yet.
        begun = {bool(self._state.get(r.tensor)) for r in self.all if r.group == group and not r.fused}
        return not (isinstance(self._optimizer, torch.optim.SGD) and len(begun) > 1)

    def _recall(self, r: Run) -> None:
        """What the fused update has to know of a run's past."""
        assert self._kernel is not None
        state = self._states.entries.get(r.members[0], {})
        r.scalars = {k: v for k, v in state.items() if v is not ELEMENTWISE and k != "step"}
        if self._kernel.counts_steps:
            r.steps = int(state["step"]) if "step" in state else 0
        else:
            r.steps = 1 if state else 0

    def _memorise(self, r: Run) -> None:
        """The state of a run that a fused update stepped, per parameter, in torch's names."""
        assert self._kernel is not None
        if r.steps == 0:
            return
        group = self._optimizer.param_groups[r.group]
        state: dict[str, Any] = dict.fromkeys(self._kernel.moments(group), ELEMENTWISE)
        if self._kernel.counts_steps:
            state["step"] = torch.tensor(float(r.steps))
        for number in r.members:
            self._states.entries[number] = {**r.scalars, **state}

    def _shape_of(self, r: Run) -> tuple[int, ...]:
        if self._cuts:
            return (r.stop - r.start,)
        return r.flat.layout.slots[r.members[0] - self._states.offsets[r.flat_number]].shape

    def _signature(self, number: int) -> Any:
        """Equal for parameters whose state is equal but for the flat store: they may share a run."""
        state = self._states.entries.get(number, {})
        return tuple(sorted((k, float(v) if isinstance(v, Tensor) else v) for k, v in state.items()))

    def _state_of_run(self, r: Run) -> dict[str, Any]:
        group = self._optimizer.param_groups[r.group]
        on_device = group.get("capturable") or group.get("fused") or self._may_fuse(r.group)
        result: dict[str, Any] = {}
        for k, v in self._states.entries.get(r.members[0], {}).items():
            if isinstance(v, str) and v == ELEMENTWISE:
                store = self._states.store[r.flat_number].tensor(k, r.tensor.dtype)
                result[k] = store[r.start : r.stop].view(r.tensor.shape)
            elif isinstance(v, Tensor):
                result[k] = v.clone().to(r.tensor.device if on_device else "cpu")
            else:
                result[k] = v
        return result

    def dissolve(self) -> None:
        """Bring the runs' states back to their parameters: element-wise ones into the flat store, the rest per name."""
        for r in self.all:
            if r.fused:
                self._memorise(r)
                continue
            state = self._state.get(r.tensor, {})
            for number in r.members:
                self._states.entries[number] = {}
            for k, v in state.items():
                elementwise = isinstance(v, Tensor) and v.shape == r.tensor.shape
                if elementwise:
                    self._states.store[r.flat_number].write(k, r.start, v.reshape(-1))
                for number in r.members:
                    self._states.entries[number][k] = (
                        ELEMENTWISE if elementwise else (v.clone().cpu() if isinstance(v, Tensor) else v)
                    )
        self.all = []
        self._state = defaultdict(dict)
        self.composed_for = None

    def tensors(self) -> list[Tensor]:
        """Return the states that the optimizer's own ``step`` has, now or since the last step."""
        return [t for state in self._state.values() for t in state.values() if isinstance(t, Tensor)]
