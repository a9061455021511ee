"""Runs that the optimizer's own ``step`` updates, as it would update parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy.zero.step.optimizer_state import ELEMENTWISE, OptimizerStates, is_elementwise_state
from ls_strategy.zero.step.runs import Run
from ls_strategy.zero.step.updater import StepArguments, Updater

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers with a fused kernel in torch, which is used unless the user has chosen an implementation."""


@dataclass(frozen=True)
class _ShownRun:
    """A run, and the view of the masters that stands for it in the optimizer's groups."""

    run: Run
    tensor: Tensor


class TorchUpdater(Updater):
    """Lets the optimizer's own ``step`` update the runs. It takes every parameter that no other updater takes."""

    def __init__(self, optimizer: Optimizer, states: OptimizerStates, *, cuts: bool) -> None:
        """Start without any run. ``cuts``: runs are 1-d. Otherwise each one is a parameter, in its own shape."""
        self._optimizer = optimizer
        self._states = states
        self._cuts = cuts
        self._runs: list[_ShownRun] = []
        self._state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._is_prepared = False

    @override
    def takes(self, number: int) -> bool:
        return True

    @override
    def prepare(self, runs: Sequence[Run]) -> None:
        for run in runs:
            tensor = run.flat.master.detach()[run.start : run.stop]
            if not self._cuts:
                slot = run.flat.layout.slots[run.members[0] - self._states.offsets[run.flat_number]]
                tensor = tensor.view(slot.shape)
            self._runs.append(_ShownRun(run, tensor.requires_grad_()))
        for shown in self._runs:
            self._state[shown.tensor] = self._state_of(shown)
        self._state.update(self._states.others)
        self._is_prepared = True

    @override
    def begin(self, step: StepArguments, dropped: frozenset[int], others: Callable[[], None]) -> None:
        for shown in self._runs:
            if shown.run.flat.hold is not None:
                shown.run.flat.before_change()
        others()

    @override
    @contextmanager
    def stepping(self, *, gradients: bool = True) -> Iterator[None]:
        """Let the optimizer's groups and its state hold the runs inside the context.

        ``gradients``: with their gradients, and for torch's fused kernels where there are such.
        """
        groups = self._optimizer.param_groups
        pieces = [group["params"] for group in groups]
        piece_state = self._optimizer.state
        fused = [g for i, g in enumerate(groups) if gradients and self._may_fuse(i)]
        try:
            for g, group in enumerate(groups):
                group["params"] = [s.tensor for s in self._runs if s.run.group == g]
            for group in fused:
                group["fused"] = True
            self._optimizer.state = self._state
            for shown in self._runs if gradients else ():
                self._show_gradient(shown)
            yield
        finally:
            self._state = self._optimizer.state  # type: ignore[assignment]
            self._optimizer.state = piece_state
            for group, members in zip(groups, pieces, strict=True):
                group["params"] = members
            for group in fused:
                group["fused"] = None
            for shown in self._runs:
                shown.tensor.grad = None

    def _show_gradient(self, shown: _ShownRun) -> None:
        run, flat = shown.run, shown.run.flat
        grads = flat.averages.tensor()[run.start : run.stop]
        shown.tensor.grad = grads.view(shown.tensor.shape).to(shown.tensor.dtype)
        if flat.local.rows:
            index = run.members[0] - self._states.offsets[run.flat_number]
            shown.tensor.grad = flat.local.as_stepped(index, shown.tensor.grad)

    def _may_fuse(self, group: int) -> bool:
        """Return whether to use torch's fused kernel for a group.

        There has to be one, and the user must not have chosen another implementation.
        """
        settings = self._optimizer.param_groups[group]
        if type(self._optimizer) not in _FUSED or settings.get("fused") is not None or settings.get("foreach"):
            return False
        mine = [shown.tensor for shown in self._runs if shown.run.group == group]
        if any(tensor.is_complex() for tensor in mine):
            return False  # torch has no such kernel
        # torch's fused SGD needs momentum for all tensors or for none; a new run has none yet.
        begun = {bool(self._state.get(tensor)) for tensor in mine}
        return not (isinstance(self._optimizer, torch.optim.SGD) and len(begun) > 1)

    def _state_of(self, shown: _ShownRun) -> dict[str, Any]:
        run, tensor = shown.run, shown.tensor
        group = self._optimizer.param_groups[run.group]
        on_device = group.get("capturable") or group.get("fused") or self._may_fuse(run.group)
        result: dict[str, Any] = {}
        for k, v in self._states.entries.get(run.members[0], {}).items():
            if isinstance(v, str) and v == ELEMENTWISE:
                store = self._states.store[run.flat_number].tensor(k, tensor.dtype)
                result[k] = store[run.start : run.stop].view(tensor.shape)
            elif isinstance(v, Tensor):
                result[k] = v.clone().to(tensor.device if on_device or v.dim() else "cpu")
            else:
                result[k] = v
        return result

    @override
    def collect(self) -> None:
        """Move element-wise states to the flat store, and others to the parameters. Not collective."""
        for shown in self._runs:
            run, tensor = shown.run, shown.tensor
            for number in run.members:
                self._states.entries[number] = {}
            for k, v in self._state.get(tensor, {}).items():
                elementwise = isinstance(v, Tensor) and v.shape == tensor.shape
                if not self._cuts:
                    elementwise = is_elementwise_state(k, v, tuple(tensor.shape))
                if elementwise:
                    self._states.store[run.flat_number].write(k, run.start, v.reshape(-1))
                for number in run.members:
                    self._states.entries[number][k] = (
                        ELEMENTWISE if elementwise else (v.clone().cpu() if isinstance(v, Tensor) else v)
                    )
        if self._is_prepared:
            self._states.others = {k: v for k, v in self._state.items() if not isinstance(k, Tensor)}
        self._runs = []
        self._state = defaultdict(dict)
        self._is_prepared = False

    @override
    def tensors(self) -> list[Tensor]:
        return [t for state in self._state.values() for t in state.values() if isinstance(t, Tensor)]
