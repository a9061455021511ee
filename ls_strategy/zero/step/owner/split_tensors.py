"""The states of tensors whose step is split (`split_step.py`): in shards, each beside its range of the parameter."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.layout import round_up
from ls_strategy.tiers.buffers import PAGE
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.state_store import chunks
from ls_strategy.zero.step.elementwise_states import ElementwiseStates
from ls_strategy.zero.step.optimizer_state import ELEMENTWISE, OptimizerStates
from ls_strategy.zero.step.owner.full_tensors import FullTensor
from ls_strategy.zero.step.split_step import SplitStep


class SplitTensors:
    """Runs the element-wise parts of a step on this rank's ranges."""

    def __init__(self, optimizer: Optimizer, states: OptimizerStates, step: SplitStep, groups: dict[int, int]) -> None:
        """``groups``: parameter group by number of the parameter."""
        self._optimizer = optimizer
        self._states = states
        self._step = step
        self._groups = groups
        self._state: dict[int, dict[str, Any]] = {}
        """States of this rank's ranges by number, while they are here."""

    def _group(self, member: FullTensor) -> dict[str, Any]:
        return self._optimizer.param_groups[self._groups[member.number]]

    def dtype(self, member: FullTensor) -> torch.dtype:
        """Return the dtype of what is sent of a tensor."""
        return self._step.dtype(self._group(member))

    def direction(self, member: FullTensor, grad: Tensor) -> Tensor:
        """Return what the owner needs of this rank's range, and change its states."""
        if not self._streams(member):
            state = self._state.setdefault(member.number, {})
            return self._step.direction(self._group(member), grad, state)
        (start, stop), store, states = member.mine, member.flat.store, self._store(member)
        for name in self._step.states:
            states.ensure(name, torch.float32)
        self._states.entries[member.number] = dict.fromkeys(self._step.states, ELEMENTWISE)
        out = torch.empty(stop - start, dtype=self.dtype(member))
        for lo, hi in chunks(start // PAGE * PAGE, stop):
            end, first = min(round_up(hi, PAGE), states.numel), max(lo, start)
            leases = {name: store.get(name, lo, end) for name in self._step.states}
            state = {name: lease.wait()[first - lo : hi - lo] for name, lease in leases.items()}
            part = slice(first - start, hi - start)
            out[part].copy_(self._step.direction(self._group(member), grad[part], state))
            for name, lease in leases.items():
                store.put(name, lease, lo)
        return out

    def _store(self, member: FullTensor) -> ElementwiseStates:
        return self._states.store[self._states.locate(member.number)[0]]

    def _streams(self, member: FullTensor) -> bool:
        """Return whether the states of a tensor are out of memory, so that the step streams them in chunks."""
        store = self._store(member)
        return bool(self._step.states) and not store.resident and all(n in store.moments for n in self._step.states)

    def update(self, member: FullTensor, direction: Tensor) -> Tensor:
        """Return the update of a tensor that this rank owns."""
        with torch.no_grad():
            return self._step.update(self._group(member), direction)

    def settings(self, members: Iterable[FullTensor]) -> list[dict[str, Any]]:
        """Return the settings of each tensor's parameter group as they are now, for `write`."""
        groups = [self._groups[member.number] for member in members]
        copies = {
            g: {k: deepcopy(v) for k, v in self._optimizer.param_groups[g].items() if k != "params"}
            for g in set(groups)
        }
        return [copies[g] for g in groups]

    def write(self, member: FullTensor, update: Tensor, settings: dict[str, Any] | None = None) -> None:
        """Change this rank's range of the master weights. ``settings``: by default, those of the group."""
        flat, (start, stop) = member.flat, member.mine
        master = flat.master_range(start, stop)
        settings = self._group(member) if settings is None else settings
        self._step.apply(settings, master, update.to(master.device), member.shape)
        flat.store.write("master", start, master)

    # states ----------------------------------------------------------------------------------------------------------

    def collect(self, members: Iterable[FullTensor]) -> None:
        """Move the states to where all other states are. Not collective."""
        for member in members:
            state = self._state.pop(member.number, None)
            if not state:
                continue
            start, stop = member.mine
            store = self._store(member)
            kept = self._states.entries[member.number] = {}
            for name, value in state.items():
                elementwise = isinstance(value, Tensor) and value.shape == (stop - start,)
                if elementwise:
                    store.write(name, start, value)
                kept[name] = ELEMENTWISE if elementwise else value

    def restore(self, members: Iterable[FullTensor]) -> None:
        """Take the states from there. Not collective."""
        for member in members:
            if self._streams(member):
                continue
            entries = self._states.entries.pop(member.number, {})
            flat: FlatBuffer = member.flat
            if not entries or not flat.pieces[member.index].numel:
                continue
            flat.before_change()
            store = self._store(member)
            self._state[member.number] = {
                k: store.range(k, *member.mine).clone() if v is ELEMENTWISE else v for k, v in entries.items()
            }

    def tensors(self) -> list[Tensor]:
        """Return the states in memory."""
        return [v for state in self._state.values() for v in state.values() if isinstance(v, Tensor)]
