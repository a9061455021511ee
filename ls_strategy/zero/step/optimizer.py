"""The user's optimizer, which holds master shards while it steps.

Schedulers, hooks and loggers keep working on the user's object. Between two steps, its ``param_groups`` hold the
model's parameters, as in plain torch. With tensor, pipeline or expert parallelism they hold *pieces* instead: one 1-d
view per parameter, the range of it that this rank steps. While ``step`` runs, they hold *runs* of adjacent pieces
(`runs.py`), so that the optimizer steps a few long tensors instead of many short ones. For an element-wise optimizer
the result is the same; `elementwise.py` tests that.

Runs are stepped by the optimizer's own ``step``, or by a fused update (`fused_optimizers.py`) for classes that have
one. States on the NVMe tier need a fused update, since ``step`` needs all states in memory at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.config import MomentFormat
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError
from ls_strategy.layout import round_up
from ls_strategy.ops.update import native_available
from ls_strategy.plan import MOMENT_BYTES
from ls_strategy.tiers import TIERS
from ls_strategy.tiers.stream import Stream
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.states import UpdateState
from ls_strategy.zero.step.elementwise import is_elementwise, takes_closure
from ls_strategy.zero.step.fused_optimizers import kernel_for, kernels_of
from ls_strategy.zero.step.logit_clip import clip_logits, may_clip_logits
from ls_strategy.zero.step.optimizer_state import OptimizerStates
from ls_strategy.zero.step.runs import Run, Runs
from ls_strategy.zero.step.split_step import streamed_states
from ls_strategy.zero.step.states import FlatStates
from ls_strategy.zero.step.update import Update, UpdatePart
from ls_strategy.zero.step.whole_groups import steps_one_by_one, whole_groups
from ls_strategy.zero.step.whole_tensors import WholeTensors, splits_tensors_of
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
        self._kernels = kernels_of(optimizer)
        """The fused update of every group."""
        self.is_mixed = len(set(map(bool, self._kernels))) > 1
        """Whether fused updates step some groups only. Then masters are published after both have stepped."""
        self._group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._moment_format: MomentFormat = moment_format
        self._fused_flats = [self._takes_fused_update(flat) for flat in flats]
        for flat, fused in zip(flats, self._fused_flats, strict=True):
            flat.averages.folds_factors = fused and not self.is_mixed
        by_rows = any(flat.local.rows for flat in flats)
        self._cuts = not by_rows and (any(map(splits_tensors_of, flats)) or is_elementwise(optimizer))
        """Whether parameters may be split and joined. Otherwise (stage 0) the optimizer gets each one unchanged."""
        store = [self._states_of(n, flat) for n, flat in enumerate(flats)]
        self.states = OptimizerStates(optimizer, store, mesh, group_names)
        self.whole = self._whole_tensors()
        self._steps_whole = bool(self.whole)
        self._runs = Runs(optimizer, self.states, self._kernels, self._fused_flats, cuts=self._cuts)
        self.states.collect = self._collect
        self._grad_views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._clips = may_clip_logits(optimizer)
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

    # tiers and kernels -----------------------------------------------------------------------------------------------

    def _takes_fused_update(self, flat: FlatBuffer) -> bool:
        """Return whether a fused update steps this buffer: it is faster, or a tier or a format needs it."""
        if not any(self._kernels) or flat.master_dtype != torch.float32 or flat.plan.shared_by:
            return False
        if flat.optimizer_tier != "device" or self._moment_format != "fp32":
            return True
        if any(group.get("fused") for group in self.optimizer.param_groups):
            return False  # the user selected torch's kernel
        device = flat.full.device.type
        return device == "cpu" or native_available(device)

    @property
    def bytes_per_element(self) -> float | None:
        """Return the bytes of state per element; None if the optimizer's own step creates them."""
        if not all(self._kernels) or not all(self._fused_flats):
            return None
        groups = zip(self.optimizer.param_groups, self._kernels, strict=True)
        names = {name for group, kernel in groups if kernel is not None for name in kernel.moments(group)}
        return MOMENT_BYTES[self._moment_format] * len(names)

    def _states_of(self, n: int, flat: FlatBuffer) -> FlatStates:
        moments: dict[str, bool] = {}
        spans: dict[str, list[tuple[int, int]]] = {}
        for g, (group, kernel) in enumerate(zip(self.optimizer.param_groups, self._kernels, strict=True)):
            if not self._fused_flats[n] or kernel is None:
                continue
            moments |= kernel.moments(group)
            for name in kernel.moments(group):
                spans.setdefault(name, []).extend(self._spans_of(flat, g))
        resident = TIERS[flat.optimizer_tier].resident
        if not resident and flat.master_dtype == torch.float32:
            moments |= streamed_states(self.optimizer)
        return FlatStates(flat, moments, self._moment_format, spans if self.is_mixed and resident else None)

    def _spans_of(self, flat: FlatBuffer, group: int) -> Iterator[tuple[int, int]]:
        """Yield this rank's ranges of a group's parameters, with what a run takes of the padding behind them."""
        for param, piece in zip(flat.params, flat.pieces, strict=True):
            if piece.numel and self._group_of.get(id(param)) == group:
                yield piece.start, round_up(piece.stop, flat.layout.align)

    def _whole_tensors(self) -> WholeTensors:
        """Return the parameters that need to be stepped whole, and all that this optimizer has on the NVMe tier."""
        split = any(map(splits_tensors_of, self.flats))
        needed = whole_groups(self.optimizer) if split and kernel_for(self.optimizer) is None else ()
        one_by_one = steps_one_by_one(self.optimizer)
        fused = [kernel is not None for kernel in self._kernels] if all(self._fused_flats) else [False] * len(needed)
        return WholeTensors(self.optimizer, self.states, needed, fused, one_by_one=one_by_one)

    def _collect(self) -> None:
        self.take_replaced_state()
        self._runs.dissolve()
        self.whole.states.collect()

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
        self._fused_flats[n] = self._takes_fused_update(flat)
        flat.averages.folds_factors = self._fused_flats[n] and not self.is_mixed
        self.states.store[n] = self._states_of(n, flat)
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

    def bind_grads(self, used: list[bool]) -> None:
        """Set the averaged gradients as ``.grad`` of pieces in the groups, where hooks may change them."""
        for n, flat in enumerate(self.flats):
            if flat.averages.on_nvme or not self.shows_pieces or not flat.trainable:
                continue
            views = self._views_of(n, flat)
            for i, piece in enumerate(flat.pieces):
                number = self.states.offsets[n] + i
                shown = used[number] and piece.numel > 0
                self.pieces[number].grad = views[i].to(self.pieces[number].dtype) if shown else None

    def _views_of(self, flat_number: int, flat: FlatBuffer) -> list[Tensor]:
        """Return the averaged gradients as views per piece, cached per buffer."""
        grads = flat.averages.tensor()
        if self._grad_views.get(flat_number, (None, []))[0] is not grads:
            shapes = [self.pieces[self.states.offsets[flat_number] + i].shape for i in range(len(flat.pieces))]
            views = [grads[p.start : p.stop].view(s) for p, s in zip(flat.pieces, shapes, strict=True)]
            self._grad_views[flat_number] = (grads, views)
        return self._grad_views[flat_number][1]

    def take_edits(self, used: list[bool]) -> None:
        """Load the changes of user code to gradients that it sees directly into the averages.

        Those are ``p.grad`` at stage 0 and ``.grad`` of pieces. Replaced gradients are copied. Gradients that were set
        to None become zero, so that they do not count in a norm, and their parameters are not stepped.
        """
        self._dropped.clear()
        for n, flat in enumerate(self.flats):
            seen = flat.trainable and (self.shows_pieces or flat.averages.in_place)
            if flat.averages.on_nvme or not seen:
                continue
            for i, view in enumerate(self._views_of(n, flat)):
                number = self.states.offsets[n] + i
                piece = self.pieces[number]
                if not used[number] or piece.numel() == 0:
                    continue
                if flat.averages.in_place and flat.local.take_replaced(i):
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
        """Copy changed averages to ``.grad`` of pieces with another dtype, which are copies and not views."""
        for n, flat in enumerate(self.flats):
            copied = flat.trainable and flat.master_dtype != flat.average_dtype
            if not self.shows_pieces or flat.averages.on_nvme or not copied:
                continue
            for i, view in enumerate(self._views_of(n, flat)):
                shown = self.pieces[self.states.offsets[n] + i].grad
                if shown is not None:
                    shown.copy_(view)

    def own_step(
        self,
        used: list[bool],
        *,
        clip: Tensor | None = None,
        shown: bool = True,
        submit: Callable[[list[Update]], None] | None = None,
        stream: Stream | None = None,
    ) -> OwnStep:
        """Prepare one call of ``optimizer.step``, which steps the parameters in ``used``.

        Args:
            used: one flag per parameter of the flats, in their order.
            clip: factor for the gradients that was not applied yet.
            shown: the gradients were bound to the pieces, and changes there count.
            submit: receives the fused updates, in order of the flats. Default: run them at once.
            stream: may still be at work on the master weights afterwards. None: they are complete.

        Raises:
            PlanError: the optimizer's groups have changed.
        """
        if not self.is_current:
            raise PlanError(
                f"the parameter groups of {type(self.optimizer).__name__} were changed in the middle of a training "
                "step (add_param_group, or a replaced group), after its forward had begun. Change them in "
                "on_train_epoch_start, in on_train_batch_start or at the end of the previous step."
            )
        return OwnStep(self, used, clip=clip, shown=shown, submit=submit or _run_all, stream=stream)

    @property
    def is_current(self) -> bool:
        """Return whether the optimizer's groups still hold the same parameters. Takes microseconds."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._members) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._members, strict=True)
        )

    def compose(
        self,
        used: list[bool],
        *,
        shown: bool,
        fused: Callable[[], None] = lambda: None,
        stream: Stream | None = None,
    ) -> None:
        """Compose the runs to step, and step what is stepped whole.

        Args:
            used: one flag per parameter of the flats.
            shown: leave out parameters that `take_edits` found dropped.
            fused: begins the fused updates of the composed runs.
            stream: see `WholeTensors.begin`.
        """
        self.take_replaced_state()
        self.states.begun = True
        dropped = frozenset(self._dropped if shown else ())
        if self._steps_whole and shown and self.shows_pieces:
            dropped = self.whole.agree(dropped)
        self._clip_due = self._clips
        self._runs.compose(used, dropped)
        if self._steps_whole:
            self.whole.begin(used, dropped, fused, stream)
        else:
            fused()
        for r in self._runs:
            if not r.fused:
                r.flat.before_change()

    @contextmanager
    def showing_runs(self) -> Iterator[None]:
        """Let the optimizer's groups hold the tensors that its own ``step`` updates, inside the context."""
        with self._runs.shown():
            if not self._steps_whole:
                yield
                return
            for g, group in enumerate(self.optimizer.param_groups):
                group["params"] += self.whole.shown(g)
            self.whole.lend(self.optimizer.state)
            try:
                yield
            finally:
                self.whole.take_back(self.optimizer.state)

    def end_whole(self) -> None:
        """Send what the optimizer's own ``step`` has made of whole tensors to their shards. Collective."""
        if self._steps_whole:
            self.whole.end()
        if self._clip_due:
            self._clip_due = False
            clip_logits(self.optimizer, self.flats)

    def describe(self) -> str:
        """Return one line that says what steps the parameters."""
        name = type(self.optimizer).__name__
        if self.whole:
            members = self.whole.members
            ranks = members[0].comm.world_size
            rest = "" if len(members) == self.states.offsets[-1] else "; the others in shards, by its own step()"
            sent = f"{self.whole.bytes_sent:,} bytes sent for it per step by all of them"
            return f"{name}: {len(members)} parameters are stepped whole, each by one of {ranks} ranks, {sent}{rest}"
        if not any(self._fused_flats):
            return f"{name}: stepped by its own step()"
        device = "cpu" if any(f.optimizer_tier != "device" for f in self.flats) else self.flats[0].full.device.type
        path = "compiled" if native_available(device) else "plain torch: no compiled operation, see the log above"
        moments = self.states.store[0].moment_format
        return f"{name}: stepped by the fused update ({path}), moments in {moments}"

    def early_update(self, flat: FlatBuffer) -> Update | None:
        """Return the update of one offloaded buffer before the others' gradients are known; None if it has to wait.

        It has to wait in the first step, and if the set of parameters with gradients differs from the previous step:
        then the runs differ too.
        """
        n = self.flats.index(flat)
        fused = self._fused_flats[n] and not self.is_mixed
        if not fused or flat.optimizer_tier == "device" or self._runs.composed_for is None:
            return None
        used, dropped = self._runs.composed_for
        numbers = range(self.states.offsets[n], self.states.offsets[n + 1])
        if dropped or [used[i] for i in numbers] != flat.local.mask:
            return None
        parts = [self._part_of(r, self.states.steps_taken + 1) for r in self._runs if r.flat_number == n]
        update = self._update_of(n, parts, None)
        sums: list[Sequence[float]] | None = None
        if update.grads is not None:
            flat.averages.recorded_sums = sums = []
        return replace(update, publish=flat.policy.parameters, sums=sums)

    def fused_updates(self, clip: Tensor | None) -> list[Update]:
        """Return the fused updates of this step, except those that began while backward ran. Count the step."""
        by_flat: defaultdict[int, list[UpdatePart]] = defaultdict(list)
        self.states.steps_taken += 1
        for r in self._runs:
            if r.fused and r.flat.update is not UpdateState.UPDATED_EARLY:
                by_flat[r.flat_number].append(self._part_of(r, self.states.steps_taken))
        return [self._update_of(n, parts, clip) for n, parts in by_flat.items()]

    def _part_of(self, r: Run, taken: int) -> UpdatePart:
        """Return the part for one run. ``taken`` is the number of this step, for states that do not count steps."""
        group, kernel = self.optimizer.param_groups[r.group], self._kernels[r.group]
        assert kernel is not None
        names = tuple(kernel.moments(group))
        for name in names:
            self.states.store[r.flat_number].ensure(name, torch.float32)
        r.steps += 1
        seed_step = r.steps if kernel.counts_steps else taken
        return UpdatePart(r.start, r.stop, r.steps, names, kernel.settings(group), seed_step)

    def _update_of(self, n: int, parts: list[UpdatePart], clip: Tensor | None) -> Update:
        kernel = next(kernel for kernel in self._kernels if kernel is not None)  # the same for all groups with one
        flat = self.flats[n]
        averages = flat.averages
        offloaded = flat.optimizer_tier != "device"
        return Update(
            flat=flat,
            states=self.states.store[n],
            kernel=kernel,
            parts=tuple(parts),
            clip=clip,
            unscale=averages.unscale,
            grads=None if averages.on_nvme else averages.in_memory(),
            landing=averages.landing,
            publish=offloaded and not self.is_mixed,
            in_parts=self.is_mixed,
        )

    def refuse_state(self, what: str) -> Any:
        """Refuse a request for the state of the bare optimizer, which has none between steps.

        Raises:
            StateError: always.
        """
        raise sharded_state(f"{type(self.optimizer).__name__}.{what}")

    def state_tensors(self) -> list[Tensor]:
        """Return the optimizer's states in memory, without masters."""
        stored = [t for each in self.states.store for t in each.tensors()]
        return [*stored, *self._runs.tensors(), *self.whole.states.tensors()]

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state that this rank has in memory, without masters."""
        store = self.states.store
        held = {t.untyped_storage().data_ptr() for each in store for t in each.tensors()}
        own = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*self._runs.tensors(), *self.whole.states.tensors())
        }
        return sum(each.nbytes() for each in store) + sum(n for address, n in own.items() if address not in held)


def _run_all(updates: list[Update]) -> None:
    for update in updates:
        update.run()


class OwnStep:
    """One call of the optimizer's own ``step``: the groups hold runs while it computes.

    ::

        with sharded.own_step(...) as step:
            optimizer.step()                the user's pre-hooks see the groups as usual
                step.begin()                called by the engine's hook, the last pre-hook
                ...                         torch's code, on the runs
                step.end()                  called by the engine's hook, the first post-hook

    Leaving the ``with`` block ends the step too, after an error or if an optimizer skips its hooks.
    """

    def __init__(
        self,
        sharded: ShardedOptimizer,
        used: list[bool],
        *,
        clip: Tensor | None,
        shown: bool,
        submit: Callable[[list[Update]], None],
        stream: Stream | None = None,
    ) -> None:
        """Record the arguments, which `ShardedOptimizer.own_step` documents."""
        self.sharded = sharded
        self._used = used
        self._clip = clip
        self._shown = shown
        self._submit = submit
        self._stream = stream
        self._while_stepping = ExitStack()
        self._depth = 0
        """Calls of ``step`` that are running: torch runs the hooks for each class that overrides it."""

    def begin(self, used: list[bool] | None = None) -> None:
        """Let the groups hold the runs that the optimizer steps, and submit the fused updates.

        Args:
            used: the parameters to step, if the user's pre-hooks may have changed them.
        """
        self._depth += 1
        sharded, used = self.sharded, self._used if used is None else used
        if self._shown:
            sharded.take_edits(used)
        sharded.compose(used, shown=self._shown, fused=self._begin_fused, stream=self._stream)
        self._while_stepping.enter_context(sharded.showing_runs())

    def nests(self) -> bool:
        """Return whether a running ``step`` has called this one, as a subclass does, and if so only count the call."""
        if self._depth == 0:
            return False
        self._depth += 1
        return True

    def _begin_fused(self) -> None:
        updates = self.sharded.fused_updates(self._clip)
        if updates:
            self._submit(updates)

    def end(self) -> None:
        """Restore the groups, and send whole tensors back to their shards. Collective if there are any."""
        self._depth -= 1
        if self._depth > 0:
            return
        self._while_stepping.close()
        self.sharded.end_whole()

    def __enter__(self) -> OwnStep:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step."""
        self._while_stepping.__exit__(kind, error, trace)
        if kind is None:
            self.sharded.end_whole()
