"""Keep the states of tensors that are stepped in full: at their owner in training, in the flat store for checkpoints.

`OwnerStates.collect` moves them to where all other states are stored: element-wise ones to the flat store, in shards,
others to the owner's entries. The next step moves them to the owner again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ls_strategy.distributed.comm import Comm
from ls_strategy.zero.step.optimizer_state import ELEMENTWISE, OptimizerStates, is_elementwise_state
from ls_strategy.zero.step.owner.full_tensors import FullTensor, FullTensorExchange
from ls_strategy.zero.step.owner.split_tensors import SplitTensors


class OwnerStates:
    """The states of the tensors of one optimizer that are stepped whole."""

    def __init__(
        self,
        states: OptimizerStates,
        members: Sequence[FullTensor],
        split: SplitTensors | None,
        in_shards: frozenset[int],
    ) -> None:
        """``in_shards``: numbers of the tensors whose states ``split`` has, next to their ranges."""
        self._states = states
        self._members = members
        self._split = split
        self._in_shards = in_shards
        self.held: dict[int, dict[str, Any]] = {}
        """States of this rank's tensors by number, while they are here."""
        self.collected = True
        """Whether the states are in ``states``; the same on all ranks."""

    def collect(self) -> None:
        """Move the states of the owners to where all other states are: element-wise ones into shards. Collective."""
        if self.collected or not self._members:
            return
        self.collected = True
        if self._split is not None:
            self._split.collect(m for m in self._members if m.number in self._in_shards)
        mine = {
            m.number: {k: v.dtype for k, v in self.held[m.number].items() if is_elementwise_state(k, v, tuple(m.shape))}
            for m in self._members
            if m.is_mine and self.held.get(m.number)
        }
        for name, dtype, members in self._named(mine):
            exchange = FullTensorExchange(members[0].comm, dtype, members[0].flat.full.device)
            values = exchange.start_scatter(members, lambda m, name=name: self.held[m.number].pop(name))
            for store in {id(m.flat): self._store(m) for m in members}.values():
                store.ensure(name, dtype)
            for member, part in values():
                self._store(member).write(name, member.mine[0], part)
        for number, state in self.held.items():
            kept = self._states.entries.setdefault(number, {})
            kept.update({k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()})
        self.held = {}

    def _named(self, mine: dict[int, dict[str, torch.dtype]]) -> Iterator[tuple[str, torch.dtype, list[FullTensor]]]:
        """Agree on the element-wise states, and yield the tensors that have each of them. Collective.

        Every rank marks them in the entries of the tensors of which it has a part, or which it owns.
        """
        by_comm: dict[Comm, list[FullTensor]] = {}
        for member in self._members:
            if member.number not in self._in_shards:
                by_comm.setdefault(member.comm, []).append(member)
        for comm, members in by_comm.items():
            own = {m.number: mine[m.number] for m in members if m.number in mine}
            agreed: dict[int, dict[str, torch.dtype]] = {}
            for each in comm.exchange_objects(own):
                agreed.update(each)
            found: defaultdict[tuple[str, torch.dtype], list[FullTensor]] = defaultdict(list)
            for member in members:
                names = agreed.get(member.number, {})
                if names and (member.is_mine or member.flat.pieces[member.index].numel):
                    self._states.entries.setdefault(member.number, {}).update(dict.fromkeys(names, ELEMENTWISE))
                for name, dtype in names.items():
                    found[name, dtype].append(member)
            for (name, dtype), having in sorted(found.items(), key=lambda item: str(item[0])):
                yield name, dtype, having

    def restore(self) -> None:
        """Bring the states to the owners, if `collect` or a checkpoint has moved them. Collective then."""
        if not self.collected:
            return
        self.collected = False
        if self._split is not None:
            self._split.restore([m for m in self._members if m.number in self._in_shards])
        entries = self._states.entries
        marked = {
            m.number: {k: self._store(m).dtypes()[k] for k, v in entries[m.number].items() if _is_mark(v)}
            for m in self._members
            if m.is_mine and m.number in entries
        }
        for name, dtype, members in self._named(marked):
            for member in members:
                self._store(member).flat.before_change()
            exchange = FullTensorExchange(members[0].comm, dtype, members[0].flat.full.device)

            def parts(member: FullTensor, name: str = name) -> list[Tensor]:
                return [self._store(member).range(name, *member.mine)]

            home = members[0].flat.master.device
            for number, (value,) in exchange.start_gather(members, parts, 1)(home).items():
                self.held.setdefault(number, {})[name] = value
        for member in self._members:
            if member.number in self._in_shards:
                continue
            kept = entries.pop(member.number, {})
            if member.is_mine and kept:
                device = member.flat.master.device
                own = {k: _copied(v, device) for k, v in kept.items() if not _is_mark(v)}
                state = self.held.setdefault(member.number, {})
                self.held[member.number] = {k: own.get(k, state.get(k)) for k in kept}
        self._forget_stored()

    def _forget_stored(self) -> None:
        """Free the flat stores of states that no other parameter has."""
        for n, store in enumerate(self._states.store):
            others = range(self._states.offsets[n], self._states.offsets[n + 1])
            kept = {k for i in others for k, v in self._states.entries.get(i, {}).items() if _is_mark(v)}
            if any(m.flat is store.flat for m in self._members):
                store.forget(kept)

    def _store(self, member: FullTensor) -> Any:
        return self._states.store[self._states.locate(member.number)[0]]

    def tensors(self) -> list[Tensor]:
        """Return the states in memory that this rank owns."""
        own = [v for state in self.held.values() for v in state.values() if isinstance(v, Tensor)]
        return own if self._split is None else [*own, *self._split.tensors()]


def _is_mark(value: Any) -> bool:
    return isinstance(value, str) and value == ELEMENTWISE


def _copied(value: Any, device: torch.device) -> Any:
    """Return a state for the optimizer. Numbers, such as step counts, stay on the CPU, as torch creates them."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.to(device, copy=True)
