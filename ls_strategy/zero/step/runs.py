"""Runs: adjacent parameters with the same group and the same state, which an optimizer steps as one tensor.

::

    pieces  | a | b |   | c | d | e |        c was never used: no decay, no momentum, no step count
    runs    |  a b  |       |  d e  |

A run owns its states until `Runs.dissolve` moves them back to the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.layout import round_up
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.step.fused_optimizers import Kernel
from ls_strategy.zero.step.optimizer_state import ELEMENTWISE, OptimizerStates

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers with a fused kernel in torch, which is used unless the user has chosen an implementation."""


@dataclass
class Run:
    """Adjacent pieces that are stepped as one tensor."""

    flat: FlatBuffer
    flat_number: int
    group: int
    members: list[int]
    start: int
    stop: int
    tensor: Tensor
    fused: bool = False
    """Whether the fused update steps it, with `steps` and `scalars` as its state."""

    steps: int = 0
    scalars: dict[str, Any] = field(default_factory=dict)


class Runs:
    """The runs of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        states: OptimizerStates,
        kernels: Sequence[Kernel | None],
        fused: list[bool],
        *,
        cuts: bool,
    ) -> None:
        """Start without any run.

        ``fused`` has one flag per flat buffer: whether those of ``kernels`` step it, of which every group has one or
        none. ``cuts``: parameters may be split and joined. Otherwise each one is a run, in its own shape.
        """
        self._optimizer = optimizer
        self._states = states
        self._kernels = kernels
        self._fused = fused
        self._cuts = cuts
        self._group_of: dict[int, int] = {}
        """Parameter group by parameter number."""
        numbers = iter(states.order)
        for g, group in enumerate(optimizer.param_groups):
            self._group_of |= {next(numbers): g for _ in group["params"]}
        self.all: list[Run] = []
        self._state: defaultdict[Tensor, Any] = defaultdict(dict)
        self.composed_for: tuple[tuple[bool, ...], frozenset[int]] | None = None
        """Arguments of the last `compose`."""

    def __iter__(self) -> Iterator[Run]:
        """Return all runs, in the order of the flat buffers."""
        return iter(self.all)

    def compose(self, used: list[bool], dropped: frozenset[int]) -> None:
        """Join the used pieces into runs; keep the runs if the arguments are those of the last call.

        Args:
            used: one flag per parameter of the flats, in their order.
            dropped: numbers of used parameters that are not stepped.
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
                if not used[number] or number in dropped or number in self._states.whole:
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
                current.fused = self._fused[n] and self._kernels[run_key[0]] is not None
                current_key = run_key
                self.all.append(current)
        for r in self.all:
            # Extend to the end of the slot, so that a vector loop meets the same elements wherever a shard ends. Not
            # for a run of one element: a one-element state may be element-wise or per step.
            if self._cuts and r.stop - r.start > 1:
                r.stop = round_up(r.stop, r.flat.layout.align)
            if r.fused:
                self._recall(r)
                continue
            r.tensor = r.flat.master.detach()[r.start : r.stop].view(self._shape_of(r)).requires_grad_()
            self._state[r.tensor] = self._state_of_run(r)
        self._state.update(self._states.others)
        self.composed_for = key

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the groups hold the runs without a fused update inside the context, for the optimizer's ``step``."""
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
                if r.flat.local.rows:
                    index = r.members[0] - self._states.offsets[r.flat_number]
                    r.tensor.grad = r.flat.local.as_stepped(index, r.tensor.grad)
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
        """Return whether to use torch's fused kernel for a group.

        There has to be one, and the user must not have chosen another implementation.
        """
        settings = self._optimizer.param_groups[group]
        if type(self._optimizer) not in _FUSED or settings.get("fused") is not None or settings.get("foreach"):
            return False
        if any(r.tensor.is_complex() for r in self.all if r.group == group):
            return False  # torch has no such kernel
        # torch's fused SGD needs momentum for all tensors or for none; a new run has none yet.
        begun = {bool(self._state.get(r.tensor)) for r in self.all if r.group == group and not r.fused}
        return not (isinstance(self._optimizer, torch.optim.SGD) and len(begun) > 1)

    def _recall(self, r: Run) -> None:
        """Load the state that the fused update needs into a run."""
        kernel = self._kernels[r.group]
        assert kernel is not None
        state = self._states.entries.get(r.members[0], {})
        r.scalars = {k: v for k, v in state.items() if v is not ELEMENTWISE and k != "step"}
        if kernel.counts_steps:
            r.steps = int(state["step"]) if "step" in state else 0
        else:
            r.steps = 1 if state else 0

    def _memorise(self, r: Run) -> None:
        """Store the state of a run with a fused update, per parameter, with torch's names."""
        kernel = self._kernels[r.group]
        assert kernel is not None
        if r.steps == 0:
            return
        group = self._optimizer.param_groups[r.group]
        state: dict[str, Any] = dict.fromkeys(kernel.moments(group), ELEMENTWISE)
        if kernel.counts_steps:
            state["step"] = torch.tensor(float(r.steps))
        for number in r.members:
            self._states.entries[number] = {**r.scalars, **state}

    def _shape_of(self, r: Run) -> tuple[int, ...]:
        if self._cuts:
            return (r.stop - r.start,)
        return r.flat.layout.slots[r.members[0] - self._states.offsets[r.flat_number]].shape

    def _signature(self, number: int) -> Any:
        """Return a key that is equal for parameters that may share a run: their per-parameter states are equal."""
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
        """Move the runs' states back to their parameters: element-wise ones to the flat store, others per name."""
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
        if self.composed_for is not None:
            self._states.others = {k: v for k, v in self._state.items() if not isinstance(k, Tensor)}
        self.all = []
        self._state = defaultdict(dict)
        self.composed_for = None

    def tensors(self) -> list[Tensor]:
        """Return the state tensors of the optimizer's own ``step``."""
        return [t for state in self._state.values() for t in state.values() if isinstance(t, Tensor)]
