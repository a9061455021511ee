"""The states of one optimizer by parameter: sharded during training, full or by name in checkpoints.

Element-wise states (moments) are in one `ElementwiseStates` per buffer, at the offsets of their parameters. All others
(step counts) are stored per parameter::

    store[n]     | exp_avg of a | exp_avg of b | ...           one tensor per state and flat buffer, sharded
    entries[a]   {"step": 3, "exp_avg": ELEMENTWISE}           per parameter, on the ranks that step a range of it

Between two steps, the updaters may have them (`updater.py`); `OptimizerStates.collect` moves them here.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import StateError, of_tensor_class
from ls_strategy.layout import Slot
from ls_strategy.meta_init.lazy import LazyTensor, parts_of
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.state_store import chunks
from ls_strategy.zero.parts import full_of, part_of
from ls_strategy.zero.step.elementwise_states import ElementwiseStates
from ls_strategy.zero.user_code.optimizer_protocol import OptimizerProtocol

ELEMENTWISE = "elementwise"
"""Placeholder for a state tensor with one element per parameter element, which is in the flat store."""


StandIn = Callable[[FlatBuffer, int, Callable[[int, int], Tensor], torch.dtype], Any]
"""Makes the placeholder for an element-wise state of one parameter: see `OptimizerStates.named_state`."""


def is_elementwise_state(key: Any, value: Any, *shapes: tuple[int, ...]) -> bool:
    """Return whether a state of a tensor that is stepped in full has a number per element, which shards may cut.

    Codes of 8 bits, and tensors of classes of their own, have a meaning only with the scales of their blocks.
    """
    if not isinstance(value, Tensor) or key == "step" or tuple(value.shape) not in shapes:
        return False
    is_plain = type(value) in (Tensor, nn.Parameter) or isinstance(value, LazyTensor)
    return is_plain and (value.is_floating_point() or value.is_complex())


@dataclass(frozen=True)
class StateRole:
    """Role of this rank for the non-element-wise states of a parameter that one rank steps as a full tensor."""

    saves: bool
    """It is the one that saves them."""

    loads: bool
    """It needs them."""


class OptimizerStates:
    """The states of one optimizer's parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        store: list[ElementwiseStates],
        mesh: Mesh,
        group_names: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Start without any state.

        ``store`` has one entry per flat buffer of the optimizer. ``group_names`` are the parameter names of every
        group, if other ranks hold some of the parameters.
        """
        self._optimizer = optimizer
        self.mesh = mesh
        self._group_names = group_names
        self.store = store
        self.flats = [each.flat for each in store]
        self.offsets = [0]
        """Number of the first parameter of every flat buffer, then the total."""
        for flat in self.flats:
            self.offsets.append(self.offsets[-1] + len(flat.params))
        number_of = {id(p): self.offsets[n] + i for n, flat in enumerate(self.flats) for i, p in enumerate(flat.params)}
        self.order = [number_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
        """Numbers of the parameters, in the optimizer's order: positions in the parameters of all flats."""
        order = iter(self.order)
        self.group_of = {next(order): g for g, group in enumerate(optimizer.param_groups) for _ in group["params"]}
        """Parameter group by parameter number."""
        self.entries: dict[int, dict[str, Any]] = {}
        """States by parameter number, with torch's names."""
        self.owners: dict[int, StateRole] = {}
        """What this rank does with parameters whose states are whole too, by number; no entry for those in shards."""
        self.cuts = True
        """Whether shards or runs may cut the states of those without an entry in `owners`."""
        self.steps_taken = 0
        """Number of steps so far, for states that do not count steps."""
        self.unfreeze: Callable[[list[FlatBuffer]], None] = lambda _: None
        """Gives frozen buffers states, which are to be loaded."""
        self.protocol = OptimizerProtocol(optimizer)
        self.others: dict[Any, Any] = {}
        """States that the optimizer keeps under keys that are no parameters, as in ``self.state["global"]``."""
        self.begun = False
        """Whether there may be any state, equal on every rank."""
        self.collect: Callable[[], None] = lambda: None
        """Moves states that the updaters have into `store` and `entries`."""

    def locate(self, number: int) -> tuple[int, int]:
        """Return the number of a parameter's flat buffer, and the parameter's position in it."""
        n = bisect_right(self.offsets, number) - 1
        return n, number - self.offsets[n]

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, with full tensors on the CPU of rank 0. Collective.

        A plain optimizer over the full parameters can load it. Other ranks get no state. Rank 0 is the first rank of
        the ZeRO group; with tensor parallelism, there is one in every ZeRO group.
        """
        entries, dtypes = self._of_all_ranks()
        full = [
            {k: self._gather(n, flat, k, dtype) for k, dtype in dtypes[n].items()} for n, flat in enumerate(self.flats)
        ]
        packed: dict[int, dict[str, Any]] = {}
        for index, number in enumerate(self.order):
            n, i = self.locate(number)
            flat = self.flats[n]
            if number in entries and self._puts_together(flat):
                slot = flat.layout.slots[i]
                value = {k: _full_value(full[n].get(k), slot, v, flat.axis) for k, v in entries[number].items()}
                if self.mesh.zero.rank == 0:
                    packed[index] = value
        return self._numbered(packed)

    def numbered_state(self, stand_in: StandIn) -> dict[str, Any]:
        """Return what `full_state_dict` does, on every rank, with stand-ins for element-wise states. Collective.

        Only where every rank has the same parameters, whole or in shards.
        """
        entries, dtypes = self._of_all_ranks()
        packed: dict[int, dict[str, Any]] = {}
        for index, number in enumerate(self.order):
            if number in entries:
                n, i = self.locate(number)
                flat, store = self.flats[n], self.store[n]
                packed[index] = value = {}
                for key, kept in entries[number].items():
                    if isinstance(kept, str) and kept == ELEMENTWISE and key in dtypes[n]:
                        store.ensure(key, dtypes[n][key])
                        value[key] = stand_in(flat, i, partial(store.range, key), dtypes[n][key])
                    else:
                        value[key] = _full_value(None, flat.layout.slots[i], kept, flat.axis)
        return self._numbered(packed)

    def _numbered(self, states: dict[int, dict[str, Any]]) -> dict[str, Any]:
        position = count()
        groups = self._groups([[next(position) for _ in g] for g in self._members])
        return self.protocol.saved({"state": {**states, **self.others}, "param_groups": groups})

    @property
    def _members(self) -> list[list[Tensor]]:
        return [group["params"] for group in self._optimizer.param_groups]

    def _groups(self, members: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """Return the groups' settings, with ``members`` in place of the parameters."""
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(own)}
            for group, own in zip(self._optimizer.param_groups, members, strict=True)
        ]

    def _of_all_ranks(self) -> tuple[dict[int, dict[str, Any]], list[dict[str, torch.dtype]]]:
        """Return the entries of all ranks of the stage by parameter, and the dtypes of their stores. Collective.

        Names are sorted, so that all ranks gather in the same order.

        Raises:
            StateError: a state is of a tensor class that cannot be copied; on every rank.
        """
        self.collect()
        by_rank = self.mesh.stage.exchange_objects((self.entries, [store.dtypes() for store in self.store]))
        entries: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        dtypes: list[dict[str, torch.dtype]] = [{} for _ in self.store]
        for rank_entries, rank_dtypes in by_rank:
            for number, kept in rank_entries.items():
                entries[number] = dict(sorted({**entries[number], **kept}.items()))
            dtypes = [dict(sorted({**d, **more}.items())) for d, more in zip(dtypes, rank_dtypes, strict=True)]
        for kept in entries.values():
            _require_copies(kept)
        return entries, dtypes

    def take_over(self, before: OptimizerStates) -> None:
        """Load the states that an earlier engine has for the same optimizer. Collective.

        Buffers are gathered one at a time, on every rank. New parameters start without state. As in torch, a parameter
        keeps its states under another name: pruning and parametrizations rename parameters while training runs.
        """
        entries, dtypes = before._of_all_ranks()
        places = [self.locate(number) for number in self.order]
        number_of = {id(self.flats[n].params[i]): number for (n, i), number in zip(places, self.order, strict=True)}
        for n, flat in enumerate(before.flats):
            full = {k: before._gather_here(n, flat, k, dtype) for k, dtype in dtypes[n].items()}
            for i, (slot, param) in enumerate(zip(flat.layout.slots, flat.params, strict=True)):
                kept = entries.get(before.offsets[n] + i)
                if kept and id(param) in number_of:
                    state = {k: _full_value(full.get(k), slot, v, flat.axis) for k, v in kept.items()}
                    self.absorb(number_of[id(param)], state)
        self.steps_taken, self.begun = before.steps_taken, before.begun
        self.others = dict(before.others)

    def _puts_together(self, flat: FlatBuffer) -> bool:
        """Return whether this rank takes part in assembling full parameters from parts."""
        return self.mesh.zero.rank == 0 or flat.axis is self.mesh.expert

    def _gather(self, flat_number: int, flat: FlatBuffer, key: str, dtype: torch.dtype) -> Tensor:
        full = self._gather_here(flat_number, flat, key, dtype)
        return full.cpu() if self._puts_together(flat) or not flat.policy.optimizer else torch.empty(0)

    def _gather_here(self, flat_number: int, flat: FlatBuffer, key: str, dtype: torch.dtype) -> Tensor:
        """Return the full state of one buffer, on the device of every rank."""
        shard = self.store[flat_number].read(key, dtype)
        return flat.gather_shards(dtype, shard) if flat.policy.optimizer else shard

    def named_state(self, stand_in: StandIn) -> dict[str, Any]:
        """Return the states by parameter name, for parameters of which this rank has a part.

        Collective if some parameters are stepped whole.

        Args:
            stand_in: creates the placeholder for an element-wise state of one parameter, from its buffer, slot, a
                function that reads elements of this rank's stepped range, and the dtype.
        """
        self.collect()
        state: dict[str, dict[str, Any]] = {}
        for number, entries in self.entries.items():
            n, i = self.locate(number)
            flat, store = self.flats[n], self.store[n]
            dtypes, piece = store.dtypes(), flat.pieces[i]
            owner = self._owns(flat, i) and flat.axis.rank == 0
            if number in self.owners:
                owner = self.owners[number].saves
            kept: dict[str, Any] = {}
            for key, value in entries.items():
                if isinstance(value, str) and value == ELEMENTWISE:
                    if piece.numel:
                        kept[key] = stand_in(flat, i, partial(store.range, key), dtypes[key])
                elif owner:
                    kept[key] = value
            if kept:
                state[flat.layout.slots[i].name] = kept
        if self.mesh.world.rank == 0:
            state.update(self.others)
        names = self.group_names
        return self.protocol.saved_by_name({"state": state, "param_groups": self._groups(names)}, names)

    def _loads_others(self, number: int) -> bool:
        """Return whether this rank needs a parameter's states that are not element-wise.

        It may need them even without a part of the parameter.
        """
        n, i = self.locate(number)
        return self.owners[number].loads if number in self.owners else self._owns(self.flats[n], i)

    @staticmethod
    def _owns(flat: FlatBuffer, i: int) -> bool:
        """Return whether this rank's range contains the parameter's first element.

        For an empty parameter, its offset counts.
        """
        return flat.owned[0] <= flat.layout.slots[i].offset < flat.owned[1]

    @property
    def group_names(self) -> Sequence[Sequence[str]]:
        """Return the parameter names of every group, including parameters of other ranks, in the optimizer's order."""
        if self._group_names is not None:
            return self._group_names
        names = iter(self.names)
        return [[next(names) for _ in params] for params in self._members]

    @property
    def names(self) -> list[str]:
        """Return the names of this rank's parameters, in the optimizer's order."""
        places = [self.locate(number) for number in self.order]
        return [self.flats[n].layout.slots[i].name for n, i in places]

    def load_named_state(
        self,
        states: Mapping[str, dict[str, Any]],
        groups: list[dict[str, Any]],
        entries: Mapping[str, Any] | None = None,
    ) -> bool:
        """Load this rank's part of states by parameter name, saved from any optimizers and groups.

        Args:
            states: by parameter name. Parameters of other optimizers are ignored.
            groups: saved parameter groups of all optimizers, with names.
            entries: what this optimizer's ``state_dict`` had besides.

        Returns:
            Whether the groups' settings (learning rates, ...) were loaded too, since the groups have equal members.
        """
        by_members = {frozenset(group["params"]): group for group in groups}
        members = [frozenset(names) for names in self.group_names]
        same = all(m in by_members for m in members)
        settings = [by_members[m] for m in members] if same else []
        saved = {name for group in groups for name in group["params"]}
        known = {name for names in self.group_names for name in names}
        state = {
            **(entries or {}),
            "state": {k: v for k, v in states.items() if k in known or k not in saved},
            "param_groups": settings or self._groups(self.group_names),
        }

        def load(given: Mapping[str, Any]) -> None:
            found = given["state"]
            others = {k: v for k, v in found.items() if k not in known}
            self._load(found, given["param_groups"] if same else [], others)

        self.protocol.load_by_name(state, self.group_names, load)
        return same

    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part of a full state in torch's format, from any world size and stage, or from plain torch.

        Raises:
            StateError: the state has different parameter groups.
        """
        self.protocol.load(state, self._load_numbered)

    def _load_numbered(self, state: Mapping[str, Any]) -> None:
        sizes = [len(names) for names in self.group_names]
        saved = [len(group["params"]) for group in state["param_groups"]]
        if sizes != saved:
            raise StateError(
                f"the checkpoint's optimizer has {len(saved)} parameter groups of sizes {saved}, but this run's "
                f"{type(self._optimizer).__name__} has {len(sizes)} of sizes {sizes}. Build the same groups in "
                "configure_optimizers, or load only the weights."
            )
        names = iter(name for group in self.group_names for name in group)
        known = {i: next(names) for group in state["param_groups"] for i in group["params"]}
        others = {k: v for k, v in state["state"].items() if k not in known}
        self._load({known[i]: v for i, v in state["state"].items() if i in known}, state["param_groups"], others)

    def reset(self) -> None:
        """Remove the states of all parameters. Collective."""
        self._load({}, [])

    def replace(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of parameters, by number, by full ones; an empty one starts afresh. Collective."""
        self.collect()
        for number, state in states.items():
            self.entries.pop(number, None)
            if state:
                self.begun = True
                self.absorb(number, dict(state))
            self._clear_rest(number)

    def _load(
        self,
        states: Mapping[str, Any],
        settings: Sequence[Mapping[str, Any]],
        others: Mapping[Any, Any] | None = None,
    ) -> None:
        """Load states by name, settings of all groups or of none, and states under keys that are no parameters."""
        self.collect()
        self.entries.clear()
        self.begun = bool(states)
        self.others = dict(others or {})
        for group, saved in zip(self._optimizer.param_groups, settings, strict=False):
            group.update({k: v for k, v in copy.deepcopy(dict(saved)).items() if k != "params"})
        for name, number in zip(self.names, self.order, strict=True):
            if name in states:
                self.absorb(number, states[name])
            self._clear_rest(number)

    def _clear_rest(self, number: int) -> None:
        """Zero the element-wise states that a parameter does not have any more: updates go on from what is stored."""
        n, i = self.locate(number)
        store, piece, kept = self.store[n], self.flats[n].pieces[i], self.entries.get(number, {})
        for name, dtype in store.dtypes().items():
            if name not in kept and piece.numel and store.has(name, piece.start, piece.stop):
                for start, stop in chunks(piece.start, piece.stop):
                    store.write(name, start, torch.zeros(stop - start, dtype=dtype))

    def absorb(self, number: int, state: dict[str, Any]) -> None:
        """Store this rank's range of one parameter's state, given the full state or that of this rank's part."""
        n, i = self.locate(number)
        flat = self.flats[n]
        slot, piece = flat.layout.slots[i], flat.pieces[i]
        if not piece.numel and not self._loads_others(number):
            return  # this rank never steps it, so the state would be outdated after the next step
        if state:
            self.unfreeze([flat])
        kept: dict[str, Any] = {}
        for k, v in state.items():
            shape = tuple(v.shape) if isinstance(v, Tensor) and k != "step" else None
            cut = self.cuts and number not in self.owners
            if shape in (slot.full_shape, slot.shape) and (cut or is_elementwise_state(k, v, shape)):
                if not self.store[n].has(k, piece.start, piece.stop):
                    continue  # of another group, whose update had this state
                dtype = flat.master.dtype if v.is_floating_point() and self.protocol.casts else v.dtype
                self.store[n].ensure(k, dtype)
                own = part_of(v, slot.part) if shape == slot.full_shape else v  # created by the constructor
                for at, part in parts_of(own, piece.param_start, piece.param_start + piece.numel):
                    self.store[n].write(k, piece.start + at - piece.param_start, part.to(dtype))
                kept[k] = ELEMENTWISE
            elif number not in self.owners or self._loads_others(number):
                kept[k] = v.detach().clone().cpu() if isinstance(v, Tensor) else v
        self.entries[number] = kept


def _full_value(buffer: Tensor | None, slot: Slot, value: Any, axis: Axis) -> Any:
    """Return the full state of one parameter. ``buffer``: the full state of its flat buffer, if element-wise."""
    if isinstance(value, Tensor):
        return value.clone()
    if value == ELEMENTWISE and buffer is not None:
        return full_of(buffer[slot.offset : slot.end].view(slot.shape), slot.part, axis).clone()
    return value


def _require_copies(state: Mapping[str, Any]) -> None:
    """Refuse states of tensor classes that cannot be copied, such as those of torchao's optimizers. Not collective."""
    for value in state.values():
        if isinstance(value, Tensor) and type(value) is not Tensor:
            try:
                value.clone()
            except NotImplementedError as error:
                raise StateError(of_tensor_class(type(value).__name__)) from error
