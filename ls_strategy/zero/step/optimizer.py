"""The user's optimizer, which holds master shards while it steps.

Schedulers, hooks and loggers keep working on the user's object. Between two steps, its ``param_groups`` hold the
model's parameters, as in plain torch. With tensor, pipeline or expert parallelism they hold *pieces* instead: one 1-d
view per parameter, the range of it that this rank steps. While ``step`` runs, they hold *runs* of adjacent pieces
(`runs.py`), so that the optimizer steps a few long tensors instead of many short ones. For an element-wise optimizer
the result is the same; `elementwise.py` tests that.

Several updaters step the parameters (`updater.py`): the optimizer's own ``step``, a fused operation for classes that
have one, and the owner of a tensor that needs to be full. This is a list of them, and what is common to all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.config import MomentFormat
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.ops.native import available as native_available
from ls_strategy.optimizers.muon import Muon
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.step.elementwise import is_elementwise, takes_closure
from ls_strategy.zero.step.fused_optimizers import kernel_for
from ls_strategy.zero.step.fused_updater import FusedUpdater
from ls_strategy.zero.step.logit_clip import clip_logits
from ls_strategy.zero.step.optimizer_state import OptimizerStates
from ls_strategy.zero.step.owner.full_tensor_groups import full_tensor_groups, steps_one_by_one
from ls_strategy.zero.step.owner.owner_updater import OwnerUpdater, splits_tensors_of
from ls_strategy.zero.step.runs import compose
from ls_strategy.zero.step.torch_updater import TorchUpdater
from ls_strategy.zero.step.update import Update
from ls_strategy.zero.step.updater import UPDATERS, StepArguments, Updater
from ls_strategy.zero.user_code.optimizer_state import ShardedState, replaced_states, sharded_state


class ShardedOptimizer:
    """One optimizer of the user, with sharded states."""

    def __init__(
        self,
        optimizer: Optimizer,
        flats: list[FlatBuffer],
        mesh: Mesh,
        moment_format: MomentFormat = "fp32",
        group_names: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Split the groups' parameters, and existing state (Adagrad's constructor creates some), into pieces."""
        self.optimizer = optimizer
        self.flats = flats
        self.shows_pieces = bool(mesh.shape.kinds)
        """Whether the groups hold pieces between two steps, instead of the model's parameters."""
        self.takes_closure = takes_closure(optimizer)
        by_rows = any(flat.local.rows for flat in flats)
        self._cuts = not by_rows and (any(map(splits_tensors_of, flats)) or is_elementwise(optimizer))
        """Whether parameters may be split and joined. Otherwise (stage 0) the optimizer gets each one unchanged."""
        self.fused = FusedUpdater(optimizer, flats, moment_format)
        self.states = OptimizerStates(
            optimizer, [self.fused.states_of(n) for n in range(len(flats))], mesh, group_names
        )
        self.fused.bind(self.states)
        self.states.collect = self._collect
        self.states.cuts = self._cuts
        self.owner = self._make_owner()
        self._torch = TorchUpdater(optimizer, self.states, cuts=self._cuts)
        self._others = [make(optimizer, self.states) for make in UPDATERS]
        self._choose_updaters()
        self._prepared_for: tuple[tuple[bool, ...], frozenset[int]] | None = None
        """The used and the dropped parameters that the updaters are prepared for; None: they have no states."""
        self._grad_views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._clips = isinstance(optimizer, Muon)
        self._clip_due = False
        """Whether a step has begun whose attention logits were not clipped yet."""
        self._dropped: set[int] = set()
        """Numbers of parameters with a gradient that user code has set to None; plain torch skips those."""
        self.pieces: list[Tensor] = [torch.empty(0)] * self.states.offsets[-1]
        early_state = {k: v for k, v in optimizer.state.items() if v}
        numbers = iter(self.states.order)
        for group in optimizer.param_groups:
            for j, (param, number) in enumerate(zip(list(group["params"]), numbers, strict=False)):
                self._make_piece(number, param)
                if param in early_state:
                    self.states.absorb(number, early_state[param])
                if self.shows_pieces:
                    group["params"][j] = self.pieces[number]
                    self.flats[self.states.locate(number)[0]].master_is_shown = True
        self.states.begun = bool(early_state)
        optimizer.state = ShardedState(type(optimizer).__name__, self)
        self._members: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        """The groups' parameters between two steps."""

    # what user code does with ``optimizer.state`` --------------------------------------------------------------------

    def has_state(self) -> bool:
        """Return whether any parameter may have a state, equal on every rank."""
        return self.states.begun

    def number_of(self, param: Any) -> int | None:
        """Return the number of a parameter or piece, or None if this rank does not have it in the optimizer."""
        for n, flat in enumerate(self.flats):
            for i, own in enumerate(flat.params):
                number = self.states.offsets[n] + i
                if param is own or param is self.pieces[number]:
                    return number
        return None

    def replace(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of parameters, by number, by full ones; an empty one starts afresh. Collective."""
        self.states.replace(states)

    def reset(self) -> None:
        """Remove all states. Collective."""
        self.states.reset()

    def take_replaced_state(self) -> None:
        """Take what user code has assigned to ``optimizer.state`` since the last call. Collective if it has."""
        given = self.optimizer.state
        if isinstance(given, ShardedState):  # this one's, or that of an engine which has adopted the optimizer since
            return
        name = type(self.optimizer).__name__
        self.optimizer.state = ShardedState(name, self)
        states = replaced_states(given, self, name)
        self.reset()
        self.replace(states)

    # what steps which parameter ---------------------------------------------------------------------------------------

    def _make_owner(self) -> OwnerUpdater:
        """Return what steps the parameters that need to be full, and all that has no operation on the NVMe tier."""
        split = any(map(splits_tensors_of, self.flats))
        needed = full_tensor_groups(self.optimizer) if split and kernel_for(self.optimizer) is None else ()
        fused = self.fused.kernels if all(self.fused.steps_flat) else [None for _ in needed]
        one_by_one = steps_one_by_one(self.optimizer)
        has_fused = [kernel is not None for kernel in fused]
        return OwnerUpdater(self.optimizer, self.states, needed, has_fused, one_by_one=one_by_one)

    def _choose_updaters(self) -> None:
        """Give every parameter to the first updater that takes it."""
        updaters = [*self._others, self.owner, self.fused, self._torch]
        numbers = range(self.states.offsets[-1])
        self._updater_of: list[Updater] = [next(u for u in updaters if u.takes(number)) for number in numbers]
        for number, updater in enumerate(self._updater_of):
            if updater in self._others:
                self._require_in_memory(updater, *self.states.locate(number))
        chosen = {id(u) for u in self._updater_of}
        self._all_fused = chosen == {id(self.fused)}
        """Whether fused updates step all parameters, so that there are none for the optimizer's own ``step``."""
        if not self._all_fused:
            chosen.add(id(self._torch))
        self._updaters = [u for u in updaters if id(u) in chosen]
        for n, flat in enumerate(self.flats):
            own = self._updater_of[self.states.offsets[n] : self.states.offsets[n + 1]]
            flat.averages.fold_factors(not self.is_mixed and all(updater is self.fused for updater in own))

    def _require_in_memory(self, updater: Updater, flat_number: int, index: int) -> None:
        """Refuse masters to an updater of another package that it would change without effect.

        Raises:
            PlanError: they are not in memory.
        """
        flat = self.flats[flat_number]
        if flat.states_in_memory and not flat.plan.split_masters:
            return
        where, cure = f"on {flat.optimizer_tier!r}", "offload.optimizer='cpu'"
        if flat.plan.split_masters:
            where, cure = "split", "precision.master_weights=True"
        raise PlanError(
            f"Got {flat.layout.slots[index].name!r} for {type(updater).__name__}, an updater of another package, but "
            f"its master weights are {where}, and such an updater changes fp32 tensors in memory. Set {cure}, or let "
            "takes() return False for it."
        )

    @property
    def is_mixed(self) -> bool:
        """Return whether fused updates step some groups only. Then masters are published after all have stepped."""
        return self.fused.is_mixed

    @property
    def bytes_per_element(self) -> float | None:
        """Return the bytes of state per element; None if the optimizer's own step creates them."""
        return self.fused.bytes_per_element

    def _collect(self) -> None:
        self.take_replaced_state()
        self._prepared_for = None
        for updater in reversed(self._updaters):
            updater.collect()

    def _make_piece(self, number: int, param: nn.Parameter) -> None:
        n, i = self.states.locate(number)
        flat = self.flats[n]
        piece = flat.pieces[i]
        tensor = flat.master.detach()[piece.start : piece.stop]
        if not self._cuts:
            tensor = tensor.view(param.shape)
        self.pieces[number] = tensor.requires_grad_(param.requires_grad)

    def follow(self, flat: FlatBuffer) -> None:
        """Step a buffer that was frozen from now on; it has got other masters. Not collective."""
        n = self.flats.index(flat)
        self.fused.follow(n)
        self.states.store[n] = self.fused.states_of(n)
        self._choose_updaters()
        self._grad_views.pop(n, None)
        numbers = range(self.states.offsets[n], self.states.offsets[n + 1])
        number_of = {id(self.pieces[number]): number for number in numbers}
        for number, param in zip(numbers, flat.params, strict=True):
            self._make_piece(number, param)
        for group, members in zip(self.optimizer.param_groups, self._members, strict=False):
            for j, piece in enumerate(members if self.shows_pieces else ()):
                if id(piece) in number_of:
                    group["params"][j] = members[j] = self.pieces[number_of[id(piece)]]

    # step ------------------------------------------------------------------------------------------------------------

    def bind_grads(self, used: Sequence[bool]) -> None:
        """Set the averaged gradients as ``.grad`` of pieces in the groups, where hooks may change them."""
        for n, flat in self._flats_with_gradients() if self.shows_pieces else ():
            views = self._views_of(n, flat)
            for i, piece in enumerate(flat.pieces):
                number = self.states.offsets[n] + i
                shown = used[number] and piece.numel > 0
                self.pieces[number].grad = views[i].to(self.pieces[number].dtype) if shown else None

    def _flats_with_gradients(self) -> Iterator[tuple[int, FlatBuffer]]:
        """Yield the buffers, with their numbers, whose averaged gradients are in memory, where user code sees them."""
        for n, flat in enumerate(self.flats):
            if flat.trainable and not flat.averages.on_nvme:
                yield n, flat

    def _views_of(self, flat_number: int, flat: FlatBuffer) -> list[Tensor]:
        """Return the averaged gradients as views per piece, cached per buffer."""
        grads = flat.averages.tensor()
        if self._grad_views.get(flat_number, (None, []))[0] is not grads:
            shapes = [self.pieces[self.states.offsets[flat_number] + i].shape for i in range(len(flat.pieces))]
            views = [grads[p.start : p.stop].view(s) for p, s in zip(flat.pieces, shapes, strict=True)]
            self._grad_views[flat_number] = (grads, views)
        return self._grad_views[flat_number][1]

    def take_edits(self, used: Sequence[bool]) -> None:
        """Load the changes of user code to gradients that it sees directly into the averages.

        Those are ``p.grad`` at stage 0 and ``.grad`` of pieces. Replaced gradients are copied. Gradients that were set
        to None become zero, so that they do not count in a norm, and their parameters are not stepped.
        """
        self._dropped.clear()
        for n, flat in self._flats_with_gradients():
            if not (self.shows_pieces or flat.averages.in_place):
                continue
            for i, view in enumerate(self._views_of(n, flat)):
                number = self.states.offsets[n] + i
                piece = self.pieces[number]
                if not used[number] or piece.numel() == 0:
                    continue
                if flat.averages.in_place and flat.local.take_replaced(i):
                    piece.grad = None
                    self._dropped.add(number)
                elif self.shows_pieces and (grad := piece.grad) is not view:
                    if grad is None:
                        self._dropped.add(number)
                    else:
                        view.copy_(grad)
                        piece.grad = view if view.dtype == piece.dtype else grad
                if number in self._dropped:
                    view.zero_()

    def show_again(self) -> None:
        """Copy changed averages to ``.grad`` of pieces with another dtype, which are copies and not views."""
        for n, flat in self._flats_with_gradients() if self.shows_pieces else ():
            if flat.master_dtype == flat.average_dtype:
                continue
            for i, view in enumerate(self._views_of(n, flat)):
                shown = self.pieces[self.states.offsets[n] + i].grad
                if shown is not None:
                    shown.copy_(view)

    @property
    def is_current(self) -> bool:
        """Return whether the optimizer's groups still hold the same parameters. Takes microseconds."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._members) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._members, strict=True)
        )

    def prepare(self, used: Sequence[bool], *, shown: bool) -> frozenset[int]:
        """Give the updaters the runs of the parameters to step, if these are others than in the last step.

        Args:
            used: one flag per parameter of the flats.
            shown: leave out parameters that `take_edits` found dropped.

        Returns:
            The numbers of the parameters that are left out, the same on all ranks.
        """
        self.take_replaced_state()
        self.states.begun = True
        dropped = frozenset(self._dropped if shown else ())
        if shown and self.shows_pieces:
            for updater in self._updaters:
                dropped = updater.agree(dropped)
        if self._prepared_for == (tuple(used), dropped):
            return dropped
        in_runs = [updater for updater in self._updaters if updater.in_runs]
        for updater in in_runs:
            updater.collect()
        stepped = [flag and number not in dropped for number, flag in enumerate(used)]
        runs = compose(self.states, stepped, self._updater_of, cuts=self._cuts)
        for updater in in_runs:
            updater.prepare([run for by, run in runs if by is updater])
        self._prepared_for = (tuple(used), dropped)
        return dropped

    def begin(self, step: StepArguments) -> None:
        """Begin the updates of one step. Collective, if an updater sends."""
        dropped = self.prepare(step.used, shown=step.shown)
        self.states.steps_taken += 1
        self._clip_due = self._clips
        begin: Callable[[], None] = _nothing_left
        for updater in reversed(self._updaters):
            begin = partial(updater.begin, step, dropped, begin)
        begin()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Wrap the optimizer's own ``step``, whose groups hold the tensors that it updates; see `Updater.stepping`."""
        with ExitStack() as around:
            if self._all_fused:
                around.enter_context(_showing_nothing(self.optimizer))
            else:
                for updater in reversed(self._updaters):
                    around.enter_context(updater.stepping())
            yield
        if self._clip_due:
            self._clip_due = False
            clip_logits(self.optimizer, self.flats)

    @contextmanager
    def showing_states(self) -> Iterator[None]:
        """Let the groups hold this rank's ranges of all parameters that have states, with these, and no gradients.

        For code of the optimizer that changes weights or states apart from ``step``, on all ranks alike.

        Raises:
            StateError: not only the optimizer's own ``step`` has the states.
        """
        if any(updater is not self._torch for updater in self._updater_of):
            name = type(self.optimizer).__name__
            raise StateError(
                f"{name}.train() and eval() change weights by states that are with one rank per tensor, or not in "
                "memory. Use stage 0, or for an element-wise optimizer offload.optimizer='cpu' in place of 'nvme'."
            )
        self._collect()
        for flat in self.flats:
            flat.wait_updated()
            flat.before_change()
        begun = [bool(self.states.entries.get(number)) for number in range(self.states.offsets[-1])]
        self._torch.prepare([run for _, run in compose(self.states, begun, self._updater_of, cuts=self._cuts)])
        with self._torch.stepping(gradients=False):
            yield

    def describe(self) -> str:
        """Return one line that says what steps the parameters."""
        name = type(self.optimizer).__name__
        members = self.owner.members
        if members:
            ranks = members[0].comm.world_size
            rest = "" if len(members) == self.states.offsets[-1] else "; the others in shards, by its own step()"
            sent = f"{self.owner.bytes_sent:,} bytes sent for it per step by all of them"
            return f"{name}: {len(members)} parameters are stepped whole, each by one of {ranks} ranks, {sent}{rest}"
        if not any(self.fused.steps_flat):
            return f"{name}: stepped by its own step()"
        device = "cpu" if any(flat.steps_in_background for flat in self.flats) else self.flats[0].full.device.type
        path = "compiled" if native_available(device) else "plain torch: no compiled operation, see the log above"
        moments = self.states.store[0].moment_format
        return f"{name}: stepped by the fused update ({path}), moments in {moments}"

    def early_update(self, flat: FlatBuffer) -> Update | None:
        """Return the update of one buffer before the others' gradients are known; None if it has to wait.

        It has to wait in the first step, and if the set of parameters with gradients differs from the previous step:
        then the runs differ too.
        """
        if self._prepared_for is None:
            return None
        used, dropped = self._prepared_for
        n = self.flats.index(flat)
        if dropped or list(used[self.states.offsets[n] : self.states.offsets[n + 1]]) != flat.local.mask:
            return None
        return self.fused.early_update(flat)

    def refuse_state(self, what: str) -> Any:
        """Refuse a request for the state of the bare optimizer, which has none between steps.

        Raises:
            StateError: always.
        """
        raise sharded_state(f"{type(self.optimizer).__name__}.{what}")

    def state_tensors(self) -> list[Tensor]:
        """Return the optimizer's states in memory, without masters."""
        stored = [t for each in self.states.store for t in each.tensors()]
        return [*stored, *self._tensors()]

    def _tensors(self) -> list[Tensor]:
        """Return the states in memory that the updaters have outside of the stores."""
        return [tensor for updater in self._updaters for tensor in updater.tensors()]

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state that this rank has in memory, without masters."""
        store = self.states.store
        held = {t.untyped_storage().data_ptr() for each in store for t in each.tensors()}
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._tensors()}
        return sum(each.nbytes() for each in store) + sum(n for address, n in own.items() if address not in held)


@contextmanager
def _showing_nothing(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimizer's groups and its state be empty inside the context."""
    groups, state = optimizer.param_groups, optimizer.state
    members = [group["params"] for group in groups]
    for group in groups:
        group["params"] = []
    optimizer.state = defaultdict(dict)
    try:
        yield
    finally:
        optimizer.state = state
        for group, params in zip(groups, members, strict=True):
            group["params"] = params


def _nothing_left() -> None:
    """Do nothing: the last updater has begun."""


class OwnStep(ExitStack):
    """One call of the optimizer's own ``step``: the groups hold runs while it computes.

    ::

        with OwnStep(sharded, ...) as step:
            optimizer.step()                the user's pre-hooks see the groups as usual
                step.begin()                called by the engine's hook, the last pre-hook
                ...                         torch's code, on the runs
                step.end()                  called by the engine's hook, the first post-hook

    Leaving the ``with`` block ends the step too, after an error or if an optimizer skips its hooks.
    """

    def __init__(self, sharded: ShardedOptimizer, step: StepArguments) -> None:
        """Record the arguments.

        Raises:
            PlanError: the optimizer's groups have changed.
        """
        if not sharded.is_current:
            raise PlanError(
                f"the parameter groups of {type(sharded.optimizer).__name__} were changed in the middle of a training "
                "step (add_param_group, or a replaced group), after its forward had begun. Change them in "
                "on_train_epoch_start, in on_train_batch_start or at the end of the previous step."
            )
        super().__init__()
        self.sharded = sharded
        self._step = step
        self._depth = 0
        """Calls of ``step`` that are running: torch runs the hooks for each class that overrides it."""

    def begin(self, used: list[bool] | None = None) -> None:
        """Begin the updates, and let the groups hold the runs that the optimizer steps.

        Args:
            used: the parameters to step, if the user's pre-hooks may have changed them.
        """
        self._depth += 1
        step = self._step if used is None else replace(self._step, used=used)
        if step.shown:
            self.sharded.take_edits(step.used)
        self.sharded.begin(step)
        self.enter_context(self.sharded.stepping())

    def nests(self) -> bool:
        """Return whether a running ``step`` has called this one, as a subclass does, and if so only count the call."""
        if self._depth == 0:
            return False
        self._depth += 1
        return True

    def end(self) -> None:
        """Restore the groups, and end the updates. Collective, if an updater sends."""
        self._depth -= 1
        if self._depth > 0:
            return
        self.close()
