"""The user's optimizer, re-pointed at master shards while it steps.

The object stays the user's own: schedulers, hooks and loggers keep working on it. Between two steps its
``param_groups`` hold the model's parameters, as in plain torch; only where a rank has a part of the model (tensor,
pipeline and expert parallelism) they hold *pieces*: one 1-d view per parameter, the range of it that this rank steps.
During `step` they hold *runs*: stretches of adjacent pieces with the same group and the same history, so that an
optimizer meets a few long tensors instead of many short ones::

    pieces  | a | b |   | c | d | e |        c unused since the start, say: no decay, no momentum, no step count
    runs    |  a b  |       |  d e  |

An element-wise optimizer computes the same either way; `elementwise.py` tries out whether it is one.

What steps the runs: the optimizer's own ``step``, or a fused update (`kernels.py`), for classes that have one. States
on the NVMe tier need a fused update, since a ``step`` of the optimizer's own wants all of them at once.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.config import MomentFormat
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.layout import Slot, round_up
from ls_strategy.ops.update import native_available
from ls_strategy.zero.elementwise import is_elementwise, takes_closure
from ls_strategy.zero.kernels import kernel_for
from ls_strategy.zero.lazy import parts_of
from ls_strategy.zero.parts import part_of, whole_of
from ls_strategy.zero.states import FlatStates
from ls_strategy.zero.units import Flat
from ls_strategy.zero.update import Update, UpdatePart

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that torch can run as one pass over memory; used where the user left the choice to torch."""

_ELEMENTWISE = "elementwise"
"""Stands for a state tensor with one element per parameter element, kept in the flat store."""


@dataclass
class _Run:
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


@dataclass
class _Pending:
    """The step that is about to begin."""

    used: list[bool]
    clip: Tensor | None
    submit: Callable[[list[Update]], None]
    shown: bool


class _Elsewhere(defaultdict):
    """An optimizer's ``state`` between steps: empty, and an error for who looks a parameter's up."""

    def __init__(self, name: str) -> None:
        super().__init__(dict)
        self._name = name

    def __missing__(self, key: Any) -> Any:
        raise _sharded_state(f"{self._name}.state[...]")

    def __contains__(self, key: object) -> bool:
        return self.__missing__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self.__missing__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Elsewhere, (self._name,))


def _sharded_state(what: str) -> StateError:
    return StateError(
        f"{what} was asked for the state of parameters, which is sharded over the ranks. Take it from "
        "trainer.strategy.optimizer_state(optimizer), on every rank: rank 0 gets it in full."
    )


class ShardedOptimizer:
    """One optimizer of the user and its sharded state."""

    def __init__(
        self,
        optimizer: Optimizer,
        flats: list[Flat],
        mesh: Mesh,
        moment_format: MomentFormat = "fp32",
        group_names: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Cut the groups' parameters into pieces. State that exists already (Adagrad makes it at once) is cut too."""
        self.optimizer = optimizer
        self._group_names = group_names
        self.flats = flats
        self.mesh = mesh
        self.shows_pieces = bool(mesh.shape.kinds)
        """Whether the groups hold pieces between two steps, too, in place of the model's parameters."""
        self.takes_closure = takes_closure(optimizer)
        self.kernel = kernel_for(optimizer)
        self._fused_flats = [self._takes_fused_update(flat, moment_format) for flat in flats]
        for flat, fused in zip(flats, self._fused_flats, strict=True):
            flat.averages.folds_factors = fused
        self._taken = 0
        self.cuts = any(flat.policy.optimizer for flat in flats) or is_elementwise(optimizer)
        """Whether parameters may be cut and joined. Otherwise (stage 0) the optimizer gets each as it is."""
        place = {id(p): (n, i) for n, flat in enumerate(flats) for i, p in enumerate(flat.params)}
        self._offsets = [0]
        for flat in flats:
            self._offsets.append(self._offsets[-1] + len(flat.params))
        self.order: list[int] = []
        """Position of every parameter in ``[p for flat in flats for p in flat.params]``, in the optimizer's order."""
        self.group_of: dict[int, int] = {}
        self.pieces: list[Tensor] = [torch.empty(0)] * self._offsets[-1]
        self._store = [self._states_of(n, flat, moment_format) for n, flat in enumerate(flats)]
        self._state: dict[int, dict[str, Any]] = {}
        self._runs: list[_Run] = []
        self._run_state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._composed_for: tuple[Any, ...] | None = None
        self._own_step = ExitStack()
        """What ends with the optimizer's own ``step``."""
        self._grad_views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._dropped: set[int] = set()
        """Parameters whose gradient user code has set to None where it sees it as it is: plain torch skips those."""
        early_state = {k: v for k, v in optimizer.state.items() if v}
        for g, group in enumerate(optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                n, i = place[id(param)]
                number = self._offsets[n] + i
                self.order.append(number)
                self.group_of[number] = g
                self._make_piece(number, flats[n], i, param)
                if param in early_state:
                    self._absorb(number, flats[n], i, early_state[param])
                if self.shows_pieces:
                    group["params"][j] = self.pieces[number]
        optimizer.state = _Elsewhere(type(optimizer).__name__)
        self._members: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        """What the groups hold between two steps."""

    def _takes_fused_update(self, flat: Flat, moment_format: MomentFormat) -> bool:
        """Whether a fused update steps this buffer: where it is faster, or where a tier or a format needs it."""
        if self.kernel is None or flat.master_dtype != torch.float32 or flat.plan.shared_by:
            return False
        if flat.optimizer_tier != "device" or moment_format != "fp32":
            return True
        if any(group.get("fused") for group in self.optimizer.param_groups):
            return False  # the user named torch's kernel
        device = flat.full.device.type
        return device == "cpu" or native_available(device)

    def _states_of(self, n: int, flat: Flat, moment_format: MomentFormat) -> FlatStates:
        moments: dict[str, bool] = {}
        if self._fused_flats[n] and self.kernel is not None:
            for group in self.optimizer.param_groups:
                moments |= self.kernel.moments(group)
        return FlatStates(flat, moments, moment_format)

    def _make_piece(self, number: int, flat: Flat, i: int, param: nn.Parameter) -> None:
        piece = flat.pieces[i]
        tensor = flat.master.detach()[piece.start : piece.stop]
        if not self.cuts:
            tensor = tensor.view(param.shape)
        self.pieces[number] = tensor.requires_grad_(param.requires_grad)

    def _locate(self, number: int) -> tuple[int, int]:
        n = next(k for k in range(len(self.flats)) if number < self._offsets[k + 1])
        return n, number - self._offsets[n]

    # step ------------------------------------------------------------------------------------------------------------

    def bind_grads(self, used: list[bool]) -> None:
        """Where groups hold pieces, show the averaged gradients as their ``.grad``: hooks may change them."""
        for n, flat in enumerate(self.flats):
            if flat.averages.on_drive or not self.shows_pieces:
                continue
            views = self._views_of(n, flat)
            for i, piece in enumerate(flat.pieces):
                number = self._offsets[n] + i
                shown = used[number] and piece.numel > 0
                self.pieces[number].grad = views[i].to(self.pieces[number].dtype) if shown else None

    def _views_of(self, flat_number: int, flat: Flat) -> list[Tensor]:
        """The averaged gradients cut into pieces; cut again only when the buffer is another one."""
        grads = flat.averages.tensor()
        if self._grad_views.get(flat_number, (None, []))[0] is not grads:
            shapes = [self.pieces[self._offsets[flat_number] + i].shape for i in range(len(flat.pieces))]
            views = [grads[p.start : p.stop].view(s) for p, s in zip(flat.pieces, shapes, strict=True)]
            self._grad_views[flat_number] = (grads, views)
        return self._grad_views[flat_number][1]

    def take_edits(self, used: list[bool]) -> None:
        """Take into the averages what user code has put in the place of gradients that it sees as they are.

        Those are ``p.grad`` at stage 0 and ``.grad`` of pieces. What was replaced is copied. What was set to None is
        zero here, so that it counts in no norm; its parameter is not stepped.
        """
        self._dropped.clear()
        for n, flat in enumerate(self.flats):
            if flat.averages.on_drive or not (self.shows_pieces or flat.averages.in_place):
                continue
            for i, view in enumerate(self._views_of(n, flat)):
                number = self._offsets[n] + i
                piece = self.pieces[number]
                if not used[number] or piece.numel() == 0:
                    continue
                if flat.averages.in_place and flat.take_replaced(i):
                    piece.grad = None
                    self._dropped.add(number)
                elif self.shows_pieces:
                    self._take_piece_grad(number, view)
                if number in self._dropped:
                    view.zero_()

    def _take_piece_grad(self, number: int, view: Tensor) -> None:
        piece = self.pieces[number]
        if piece.grad is None:
            self._dropped.add(number)
        elif piece.grad is not view:
            view.copy_(piece.grad)
            piece.grad = view if view.dtype == piece.dtype else piece.grad

    def show_again(self) -> None:
        """The averages have changed: so must gradients of pieces that are shown in another dtype, and so are copies."""
        for n, flat in enumerate(self.flats):
            if not self.shows_pieces or flat.averages.on_drive or flat.master_dtype == flat.average_dtype:
                continue
            for i, view in enumerate(self._views_of(n, flat)):
                shown = self.pieces[self._offsets[n] + i].grad
                if shown is not None:
                    shown.copy_(view)

    def step(
        self,
        used: list[bool],
        run: Callable[[], Any],
        *,
        clip: Tensor | None = None,
        shown: bool = True,
        submit: Callable[[list[Update]], None] | None = None,
    ) -> Any:
        """Step the parameters in ``used``: call ``run`` (the optimizer's own step) and the fused updates.

        Args:
            used: one flag per parameter of the flats, in their order.
            run: ``optimizer.step``; its hooks and whatever counts its calls see it run in any case.
            clip: factor of the gradients, where it was not multiplied in already.
            shown: the gradients were bound to the pieces, and changes there count.
            submit: takes the fused updates, in order of the flats; runs them at once by default.
        """
        if not self.is_current:
            raise PlanError(
                f"the parameter groups of {type(self.optimizer).__name__} were changed in the middle of a training "
                "step (add_param_group, or a replaced group), after its forward had begun. Change them before: in "
                "on_train_epoch_start, on_train_batch_start or at the end of the step before."
            )
        self._pending = _Pending(used, clip, submit or _run_all, shown)
        with self._own_step:
            return run()

    @property
    def is_current(self) -> bool:
        """Whether the optimizer's groups hold what they held when they were taken over. Takes microseconds."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._members) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._members, strict=True)
        )

    def begin_own_step(self, used: list[bool] | None = None) -> None:
        """Let the groups hold what the optimizer is to step, and run the fused updates.

        Called when the optimizer's ``step`` begins, after the user's own hooks before it.

        Args:
            used: what `step` was given, where those hooks have changed it.
        """
        pending = self._pending
        if used is not None:
            pending.used = used
        if pending.shown:
            self.take_edits(pending.used)
        self._compose(pending.used, shown=pending.shown)
        for r in self._runs:
            if not r.fused:
                r.flat.before_change()
        updates = self._fused_updates(pending.clip)
        self._own_step.enter_context(self._showing_runs())
        if updates:
            pending.submit(updates)

    def end_own_step(self) -> None:
        """Let the groups hold again what they held. Called before the user's own hooks after ``step``."""
        self._own_step.close()

    def describe(self) -> str:
        """Who steps, in one line."""
        name = type(self.optimizer).__name__
        if not any(self._fused_flats):
            return f"{name}: stepped by its own step()"
        device = "cpu" if any(f.optimizer_tier != "device" for f in self.flats) else self.flats[0].full.device.type
        path = "compiled" if native_available(device) else "plain torch: no compiled operation, see the log above"
        moments = self._store[0].moment_format
        return f"{name}: stepped by the fused update ({path}), moments in {moments}"

    def early_update(self, flat: Flat) -> Update | None:
        """The update of one offloaded buffer before the others' gradients are known; None if it has to wait for them.

        It has to in the first step, and whenever other parameters have gradients than in the step before: then the
        runs of the last step are not the runs of this one.
        """
        n = self.flats.index(flat)
        if not self._fused_flats[n] or flat.optimizer_tier == "device" or self._composed_for is None:
            return None
        used, dropped = self._composed_for
        numbers = range(self._offsets[n], self._offsets[n + 1])
        if dropped or [used[i] for i in numbers] != flat.used_here:
            return None
        parts = [self._part_of(r, self._taken + 1) for r in self._runs if r.flat_number == n]
        update = self._update_of(n, parts, None)
        sums = flat.averages.recorded_sums if update.grads is None else torch.zeros(2, dtype=torch.float64)
        flat.averages.recorded_sums = sums
        return replace(update, publish=flat.policy.parameters, sums=None if update.grads is None else sums)

    def _fused_updates(self, clip: Tensor | None) -> list[Update]:
        assert self.kernel is not None or not any(r.fused for r in self._runs)
        by_flat: defaultdict[int, list[UpdatePart]] = defaultdict(list)
        self._taken += 1
        for r in self._runs:
            if r.fused and not r.flat.updated_early:
                by_flat[r.flat_number].append(self._part_of(r, self._taken))
        return [self._update_of(n, parts, clip) for n, parts in by_flat.items()]

    def _part_of(self, r: _Run, taken: int) -> UpdatePart:
        """``taken``: steps of this optimizer with this one, for states that do not count them."""
        assert self.kernel is not None
        group = self.optimizer.param_groups[r.group]
        names = tuple(self.kernel.moments(group))
        for name in names:
            self._store[r.flat_number].ensure(name, torch.float32)
        r.steps += 1
        seed_step = r.steps if self.kernel.counts_steps else taken
        return UpdatePart(r.start, r.stop, r.steps, names, self.kernel.settings(group), seed_step)

    def _update_of(self, n: int, parts: list[UpdatePart], clip: Tensor | None) -> Update:
        assert self.kernel is not None
        flat = self.flats[n]
        averages = flat.averages
        offloaded = flat.optimizer_tier != "device"
        return Update(
            flat=flat,
            states=self._store[n],
            kernel=self.kernel,
            parts=tuple(parts),
            clip=clip,
            unscale=averages.unscale,
            grads=None if averages.on_drive else averages.at_hand(),
            landing=averages.landing,
            publish=offloaded,
        )

    @contextmanager
    def _showing_runs(self) -> Iterator[None]:
        """Inside, the groups hold the runs that no fused update takes: all that is left to the optimizer's ``step``."""
        groups = self.optimizer.param_groups
        pieces = [group["params"] for group in groups]
        piece_state = self.optimizer.state
        runs = [r for r in self._runs if not r.fused]
        fused = [g for i, g in enumerate(groups) if self._may_fuse(i)]
        try:
            for g, group in enumerate(groups):
                group["params"] = [r.tensor for r in runs if r.group == g]
            for group in fused:
                group["fused"] = True
            self.optimizer.state = self._run_state
            for r in runs:
                grads = r.flat.averages.tensor()[r.start : r.stop]
                r.tensor.grad = grads.view(r.tensor.shape).to(r.tensor.dtype)
            yield
        finally:
            self._run_state = self.optimizer.state  # type: ignore[assignment]
            self.optimizer.state = piece_state
            for group, members in zip(groups, pieces, strict=True):
                group["params"] = members
            for group in fused:
                group["fused"] = None
            for r in runs:
                r.tensor.grad = None

    def _may_fuse(self, group: int) -> bool:
        """Whether the group's update may run as one pass over memory: torch can, and the user has not chosen."""
        settings = self.optimizer.param_groups[group]
        if type(self.optimizer) not in _FUSED or settings.get("fused") is not None or settings.get("foreach"):
            return False
        # torch's fused SGD takes momentum of all tensors or of none; a run that begins late has none yet.
        begun = {bool(self._run_state.get(r.tensor)) for r in self._runs if r.group == group and not r.fused}
        return not (isinstance(self.optimizer, torch.optim.SGD) and len(begun) > 1)

    def _compose(self, used: list[bool], *, shown: bool) -> None:
        """Cut the used pieces into runs; nothing to do while the same parameters are used."""
        dropped = frozenset(self._dropped if shown else ())
        key = (tuple(used), dropped)
        if self._composed_for == key:
            return
        self.dissolve()
        for n, flat in enumerate(self.flats):
            current: _Run | None = None
            current_key: Any = None
            for i, piece in enumerate(flat.pieces):
                number = self._offsets[n] + i
                if not used[number] or number in dropped:
                    current = None
                    continue
                if piece.numel == 0:
                    continue
                run_key = (self.group_of[number], self._signature(number) if self.cuts else number)
                if current is not None and run_key == current_key:
                    current.stop = piece.stop
                    current.members.append(number)
                    continue
                current = _Run(flat, n, run_key[0], [number], piece.start, piece.stop, flat.master)
                current.fused = self._fused_flats[n]
                current_key = run_key
                self._runs.append(current)
        for r in self._runs:
            # To the end of the slot: wherever a shard ends, a vector loop meets the same elements. Not a run of one
            # element, whose state may be that of the parameter or of the step.
            if self.cuts and r.stop - r.start > 1:
                r.stop = round_up(r.stop, r.flat.layout.align)
            if r.fused:
                self._recall(r)
                continue
            r.tensor = r.flat.master.detach()[r.start : r.stop].view(self._shape_of(r)).requires_grad_()
            self._run_state[r.tensor] = self._state_of_run(r)
        self._composed_for = key

    def _recall(self, r: _Run) -> None:
        """What the fused update has to know of a run's past."""
        assert self.kernel is not None
        state = self._state.get(r.members[0], {})
        r.scalars = {k: v for k, v in state.items() if v is not _ELEMENTWISE and k != "step"}
        if self.kernel.counts_steps:
            r.steps = int(state["step"]) if "step" in state else 0
        else:
            r.steps = 1 if state else 0

    def _memorise(self, r: _Run) -> None:
        """The state of a run that a fused update stepped, per parameter, in torch's names."""
        assert self.kernel is not None
        if r.steps == 0:
            return
        group = self.optimizer.param_groups[r.group]
        state: dict[str, Any] = dict.fromkeys(self.kernel.moments(group), _ELEMENTWISE)
        if self.kernel.counts_steps:
            state["step"] = torch.tensor(float(r.steps))
        for number in r.members:
            self._state[number] = {**r.scalars, **state}

    def _shape_of(self, r: _Run) -> tuple[int, ...]:
        return (r.stop - r.start,) if self.cuts else tuple(self.pieces[r.members[0]].shape)

    def _signature(self, number: int) -> Any:
        """Equal for parameters whose state is equal but for the flat store: they may share a run."""
        state = self._state.get(number, {})
        return tuple(sorted((k, float(v) if isinstance(v, Tensor) else v) for k, v in state.items()))

    def _state_of_run(self, r: _Run) -> dict[str, Any]:
        group = self.optimizer.param_groups[r.group]
        on_device = group.get("capturable") or group.get("fused") or self._may_fuse(r.group)
        result: dict[str, Any] = {}
        for k, v in self._state.get(r.members[0], {}).items():
            if isinstance(v, str) and v == _ELEMENTWISE:
                store = self._store[r.flat_number].tensor(k, r.tensor.dtype)
                result[k] = store[r.start : r.stop].view(r.tensor.shape)
            elif isinstance(v, Tensor):
                result[k] = v.clone().to(r.tensor.device if on_device else "cpu")
            else:
                result[k] = v
        return result

    def dissolve(self) -> None:
        """Bring the runs' states back to their parameters: element-wise ones into the flat store, the rest per name."""
        for r in self._runs:
            if r.fused:
                self._memorise(r)
                continue
            state = self._run_state.get(r.tensor, {})
            for number in r.members:
                self._state[number] = {}
            for k, v in state.items():
                elementwise = isinstance(v, Tensor) and v.shape == r.tensor.shape
                if elementwise:
                    self._store[r.flat_number].write(k, r.start, v.reshape(-1))
                for number in r.members:
                    self._state[number][k] = (
                        _ELEMENTWISE if elementwise else (v.clone().cpu() if isinstance(v, Tensor) else v)
                    )
        self._runs = []
        self._run_state = defaultdict(dict)
        self._composed_for = None

    def refuse_state(self, what: str) -> Any:
        """What is asked of the bare optimizer, which has no state between steps.

        Raises:
            StateError: always.
        """
        raise _sharded_state(f"{type(self.optimizer).__name__}.{what}")

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank has in memory, without masters."""
        total = sum(store.nbytes() for store in self._store)
        tensors = [t for state in self._run_state.values() for t in state.values() if isinstance(t, Tensor)]
        held = {t.untyped_storage().data_ptr() for store in self._store for t in store.tensors()}
        others = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return total + sum(size for address, size in others.items() if address not in held)

    # state dict ------------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """State in torch's own format, with full tensors on the CPU of rank 0; other ranks get no state. Collective.

        Rank 0 of those over which ZeRO divides; with tensor parallelism each of the ranks that work with it.

        A plain optimizer over the unsharded parameters loads it.
        """
        self.dissolve()
        by_rank = self.mesh.stage.exchange_objects((self._state, [store.dtypes() for store in self._store]))
        scalars: dict[int, dict[str, Any]] = {}
        for state, _ in by_rank:
            for number, entries in state.items():
                scalars.setdefault(number, {}).update(entries)
        full: list[dict[str, Tensor]] = []
        for n, flat in enumerate(self.flats):
            keys = {k: dtype for _, dtypes in by_rank for k, dtype in dtypes[n].items()}
            full.append({k: self._gather(n, flat, k, keys[k]) for k in sorted(keys)})
        packed: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        position = 0
        for group in self.optimizer.param_groups:
            members = range(position, position + len(group["params"]))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": list(members)})
            position += len(group["params"])
        for index, number in enumerate(self.order):
            n, i = self._locate(number)
            flat = self.flats[n]
            if number in scalars and self._puts_together(flat):
                slot, values = flat.layout.slots[i], sorted(scalars[number].items())
                whole = {k: _full_value(full[n].get(k), slot, v, flat.axis) for k, v in values}
                if self.mesh.zero.rank == 0:
                    packed[index] = whole
        return {"state": packed, "param_groups": groups}

    def take_over(self, before: ShardedOptimizer) -> None:
        """Go on with the states that an earlier engine keeps for the same optimizer, by parameter name. Collective.

        One buffer at a time is gathered in full, on every rank. Parameters that are new start without state.
        """
        before.dissolve()
        by_rank = before.mesh.stage.exchange_objects((before._state, [s.dtypes() for s in before._store]))
        number_of = dict(zip(self.names, self.order, strict=True))
        for n, flat in enumerate(before.flats):
            keys = {k: dtype for _, dtypes in by_rank for k, dtype in dtypes[n].items()}
            full = {k: before._gather_here(n, flat, k, keys[k]) for k in sorted(keys)}
            for i, slot in enumerate(flat.layout.slots):
                entries: dict[str, Any] = {}
                for state, _ in by_rank:
                    entries |= state.get(before._offsets[n] + i, {})
                if entries and slot.name in number_of:
                    number = number_of[slot.name]
                    mine, place = self._locate(number)
                    state = {k: _full_value(full.get(k), slot, v, flat.axis) for k, v in entries.items()}
                    self._absorb(number, self.flats[mine], place, state)
        self._taken = before._taken

    def _puts_together(self, flat: Flat) -> bool:
        """Whether this rank joins those that make whole parameters of parts: all that hold one which rank 0 wants."""
        return self.mesh.zero.rank == 0 or flat.axis is self.mesh.expert

    def _gather(self, flat_number: int, flat: Flat, key: str, dtype: torch.dtype) -> Tensor:
        full = self._gather_here(flat_number, flat, key, dtype)
        return full.cpu() if self._puts_together(flat) or not flat.policy.optimizer else torch.empty(0)

    def _gather_here(self, flat_number: int, flat: Flat, key: str, dtype: torch.dtype) -> Tensor:
        """Gather a state of one buffer in full, on the device of every rank."""
        mine = self._store[flat_number].read(key, dtype)
        if not flat.policy.optimizer:
            return mine
        return flat.gather_shards(dtype, mine)

    def named_state(
        self, stand_in: Callable[[Flat, int, Callable[[int, int], Tensor], torch.dtype], Any]
    ) -> dict[str, Any]:
        """State by parameter name, of what this rank has a part of. Not collective.

        Args:
            stand_in: makes what stands for an element-wise state of one parameter, from its buffer, slot, a function
                that reads elements of this rank's stepped range, and the dtype.
        """
        self.dissolve()
        state: dict[str, dict[str, Any]] = {}
        for number, entries in self._state.items():
            n, i = self._locate(number)
            flat, store = self.flats[n], self._store[n]
            dtypes, piece = store.dtypes(), flat.pieces[i]
            owner = self._owns(flat, i) and flat.axis.rank == 0
            kept: dict[str, Any] = {}
            for key, value in entries.items():
                if isinstance(value, str) and value == _ELEMENTWISE:
                    if piece.numel:
                        kept[key] = stand_in(flat, i, partial(store.range, key), dtypes[key])
                elif owner:
                    kept[key] = value
            if kept:
                state[flat.layout.slots[i].name] = kept
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": list(names)}
            for group, names in zip(self.optimizer.param_groups, self.group_names, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    @staticmethod
    def _owns(flat: Flat, i: int) -> bool:
        """Whether the parameter's first element is in this rank's range; of an empty parameter, where it would be."""
        return flat.owned[0] <= flat.layout.slots[i].offset < flat.owned[1]

    @property
    def group_names(self) -> Sequence[Sequence[str]]:
        """Names of every group's parameters, in the optimizer's order; also of those that other ranks hold."""
        if self._group_names is not None:
            return self._group_names
        names = iter(self.names)
        return [[next(names) for _ in group["params"]] for group in self.optimizer.param_groups]

    @property
    def names(self) -> list[str]:
        """Names of the parameters, in the optimizer's order."""
        places = [self._locate(number) for number in self.order]
        return [self.flats[n].layout.slots[i].name for n, i in places]

    def load_named_state(self, states: Mapping[str, dict[str, Any]], groups: list[dict[str, Any]]) -> bool:
        """Take this rank's part of states by parameter name, whatever optimizers and groups they were saved from.

        Args:
            states: per parameter name; names of other optimizers' parameters are not looked at.
            groups: saved parameter groups of all optimizers, with names.

        Returns:
            whether the groups' settings (learning rates, ...) were taken too: where the same parameters form them.
        """
        by_members = {frozenset(group["params"]): group for group in groups}
        members = [frozenset(names) for names in self.group_names]
        same = all(m in by_members for m in members)
        self._load(states, [by_members[m] for m in members] if same else [])
        return same

    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's part of a full state (torch's format, from any world size, stage, or plain torch).

        Raises:
            StateError: the state belongs to an optimizer with other parameter groups.
        """
        ours = [len(names) for names in self.group_names]
        theirs = [len(group["params"]) for group in state["param_groups"]]
        if ours != theirs:
            raise StateError(
                f"the checkpoint's optimizer has {len(theirs)} parameter groups of sizes {theirs}, this run's "
                f"{type(self.optimizer).__name__} has {len(ours)} of sizes {ours}. Build the same groups in "
                "configure_optimizers, or load only the weights."
            )
        names = iter(name for group in self.group_names for name in group)
        known = {i: next(names) for group in state["param_groups"] for i in group["params"]}
        self._load({known[i]: v for i, v in state["state"].items() if i in known}, state["param_groups"])

    def _load(self, states: Mapping[str, dict[str, Any]], settings: Sequence[Mapping[str, Any]]) -> None:
        """``settings``: one of each group, or none at all."""
        self.dissolve()
        self._state.clear()
        for group, saved in zip(self.optimizer.param_groups, settings, strict=False):
            group.update({k: v for k, v in copy.deepcopy(dict(saved)).items() if k != "params"})
        for name, number in zip(self.names, self.order, strict=True):
            if name in states:
                n, i = self._locate(number)
                self._absorb(number, self.flats[n], i, states[name])

    def _absorb(self, number: int, flat: Flat, i: int, state: dict[str, Any]) -> None:
        n, _ = self._locate(number)
        slot, piece = flat.layout.slots[i], flat.pieces[i]
        if not piece.numel and not self._owns(flat, i):
            return  # this rank never steps it: what it remembers of it would be out of date after the next step
        kept: dict[str, Any] = {}
        for k, v in state.items():
            shape = tuple(v.shape) if isinstance(v, Tensor) and k != "step" else None
            if shape in (slot.full_shape, slot.shape):
                dtype = flat.master.dtype if v.is_floating_point() else v.dtype
                self._store[n].ensure(k, dtype)
                mine = part_of(v, slot.part) if shape == slot.full_shape else v  # made by the optimizer's constructor
                for at, part in parts_of(mine, piece.param_start, piece.param_start + piece.numel):
                    self._store[n].write(k, piece.start + at - piece.param_start, part.to(dtype))
                kept[k] = _ELEMENTWISE
            else:
                kept[k] = v.detach().clone().cpu() if isinstance(v, Tensor) else v
        self._state[number] = kept


def _full_value(whole: Tensor | None, slot: Slot, value: Any, axis: Axis) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if value == _ELEMENTWISE and whole is not None:
        return whole_of(whole[slot.offset : slot.end].view(slot.shape), slot.part, axis).clone()
    return value


def _run_all(updates: list[Update]) -> None:
    for update in updates:
        update.run()
