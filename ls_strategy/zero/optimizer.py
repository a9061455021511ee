"""The user's optimizer, re-pointed at master shards while it steps.

The object stays the user's own: schedulers, hooks and loggers keep working on it. Between two steps its
``param_groups`` hold the model's parameters, as in plain torch; only where a rank has a part of the model (tensor,
pipeline and expert parallelism) they hold *pieces*: one 1-d view per parameter, the range of it that this rank steps.
While its own ``step`` runs they hold *runs* of adjacent pieces (`runs.py`), so that an optimizer meets a few long
tensors instead of many short ones. An element-wise optimizer computes the same either way; `elementwise.py` tries out
whether it is one.

What steps the runs: the optimizer's own ``step``, or a fused update (`kernels.py`), for classes that have one. States
on the NVMe tier need a fused update, since a ``step`` of the optimizer's own wants all of them at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.config import MomentFormat
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.ops.update import native_available
from ls_strategy.zero.elementwise import is_elementwise, takes_closure
from ls_strategy.zero.kernels import kernel_for
from ls_strategy.zero.optimizer_state import OptimizerStates
from ls_strategy.zero.runs import Run, Runs
from ls_strategy.zero.states import FlatStates
from ls_strategy.zero.units import Flat
from ls_strategy.zero.update import Update, UpdatePart


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
    """One optimizer of the user, with its states sharded."""

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
        self.flats = flats
        self.shows_pieces = bool(mesh.shape.kinds)
        """Whether the groups hold pieces between two steps, too, in place of the model's parameters."""
        self.takes_closure = takes_closure(optimizer)
        self._kernel = kernel_for(optimizer)
        self._fused_flats = [self._takes_fused_update(flat, moment_format) for flat in flats]
        for flat, fused in zip(flats, self._fused_flats, strict=True):
            flat.averages.folds_factors = fused
        self._cuts = any(flat.policy.optimizer for flat in flats) or is_elementwise(optimizer)
        """Whether parameters may be cut and joined. Otherwise (stage 0) the optimizer gets each as it is."""
        store = [self._states_of(n, flat, moment_format) for n, flat in enumerate(flats)]
        self.states = OptimizerStates(optimizer, store, mesh, group_names)
        self._runs = Runs(optimizer, self.states, self._kernel, self._fused_flats, cuts=self._cuts)
        self.states.collect = self._runs.dissolve
        self._grad_views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._dropped: set[int] = set()
        """Parameters whose gradient user code has set to None where it sees it as it is: plain torch skips those."""
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
        optimizer.state = _Elsewhere(type(optimizer).__name__)
        self._members: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        """What the groups hold between two steps."""

    def _takes_fused_update(self, flat: Flat, moment_format: MomentFormat) -> bool:
        """Whether a fused update steps this buffer: where it is faster, or where a tier or a format needs it."""
        if self._kernel is None or flat.master_dtype != torch.float32 or flat.plan.shared_by:
            return False
        if flat.optimizer_tier != "device" or moment_format != "fp32":
            return True
        if any(group.get("fused") for group in self.optimizer.param_groups):
            return False  # the user named torch's kernel
        device = flat.full.device.type
        return device == "cpu" or native_available(device)

    def _states_of(self, n: int, flat: Flat, moment_format: MomentFormat) -> FlatStates:
        moments: dict[str, bool] = {}
        if self._fused_flats[n] and self._kernel is not None:
            for group in self.optimizer.param_groups:
                moments |= self._kernel.moments(group)
        return FlatStates(flat, moments, moment_format)

    def _make_piece(self, number: int, param: nn.Parameter) -> None:
        n, i = self.states.locate(number)
        flat = self.flats[n]
        piece = flat.pieces[i]
        tensor = flat.master.detach()[piece.start : piece.stop]
        if not self._cuts:
            tensor = tensor.view(param.shape)
        self.pieces[number] = tensor.requires_grad_(param.requires_grad)

    # step ------------------------------------------------------------------------------------------------------------

    def bind_grads(self, used: list[bool]) -> None:
        """Where groups hold pieces, show the averaged gradients as their ``.grad``: hooks may change them."""
        for n, flat in enumerate(self.flats):
            if flat.averages.on_nvme or not self.shows_pieces:
                continue
            views = self._views_of(n, flat)
            for i, piece in enumerate(flat.pieces):
                number = self.states.offsets[n] + i
                shown = used[number] and piece.numel > 0
                self.pieces[number].grad = views[i].to(self.pieces[number].dtype) if shown else None

    def _views_of(self, flat_number: int, flat: Flat) -> list[Tensor]:
        """The averaged gradients cut into pieces; cut again only when the buffer is another one."""
        grads = flat.averages.tensor()
        if self._grad_views.get(flat_number, (None, []))[0] is not grads:
            shapes = [self.pieces[self.states.offsets[flat_number] + i].shape for i in range(len(flat.pieces))]
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
            if flat.averages.on_nvme or not (self.shows_pieces or flat.averages.in_place):
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
        """The averages have changed: so must gradients of pieces that are shown in another dtype, and so are copies."""
        for n, flat in enumerate(self.flats):
            if not self.shows_pieces or flat.averages.on_nvme or flat.master_dtype == flat.average_dtype:
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
    ) -> OwnStep:
        """Get ready for one call of ``optimizer.step``, which steps the parameters in ``used``.

        Args:
            used: one flag per parameter of the flats, in their order.
            clip: factor of the gradients, where it was not multiplied in already.
            shown: the gradients were bound to the pieces, and changes there count.
            submit: takes the fused updates, in order of the flats; runs them at once by default.

        Raises:
            PlanError: the optimizer's groups are not those that were taken over.
        """
        if not self.is_current:
            raise PlanError(
                f"the parameter groups of {type(self.optimizer).__name__} were changed in the middle of a training "
                "step (add_param_group, or a replaced group), after its forward had begun. Change them before: in "
                "on_train_epoch_start, on_train_batch_start or at the end of the step before."
            )
        return OwnStep(self, used, clip=clip, shown=shown, submit=submit or _run_all)

    @property
    def is_current(self) -> bool:
        """Whether the optimizer's groups hold what they held when they were taken over. Takes microseconds."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._members) and all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._members, strict=True)
        )

    def compose(self, used: list[bool], *, shown: bool) -> None:
        """Cut what is to be stepped into runs. ``shown``: leave out parameters that `take_edits` found dropped."""
        self._runs.compose(used, frozenset(self._dropped if shown else ()))
        for r in self._runs:
            if not r.fused:
                r.flat.before_change()

    def showing_runs(self) -> AbstractContextManager[None]:
        """Let the optimizer's groups hold, inside, the runs that are left to its own ``step``."""
        return self._runs.shown()

    def describe(self) -> str:
        """Who steps, in one line."""
        name = type(self.optimizer).__name__
        if not any(self._fused_flats):
            return f"{name}: stepped by its own step()"
        device = "cpu" if any(f.optimizer_tier != "device" for f in self.flats) else self.flats[0].full.device.type
        path = "compiled" if native_available(device) else "plain torch: no compiled operation, see the log above"
        moments = self.states.store[0].moment_format
        return f"{name}: stepped by the fused update ({path}), moments in {moments}"

    def early_update(self, flat: Flat) -> Update | None:
        """The update of one offloaded buffer before the others' gradients are known; None if it has to wait for them.

        It has to in the first step, and whenever other parameters have gradients than in the step before: then the
        runs of the last step are not the runs of this one.
        """
        n = self.flats.index(flat)
        if not self._fused_flats[n] or flat.optimizer_tier == "device" or self._runs.composed_for is None:
            return None
        used, dropped = self._runs.composed_for
        numbers = range(self.states.offsets[n], self.states.offsets[n + 1])
        if dropped or [used[i] for i in numbers] != flat.local.mask:
            return None
        parts = [self._part_of(r, self.states.steps_taken + 1) for r in self._runs if r.flat_number == n]
        update = self._update_of(n, parts, None)
        sums = flat.averages.recorded_sums if update.grads is None else torch.zeros(2, dtype=torch.float64)
        flat.averages.recorded_sums = sums
        return replace(update, publish=flat.policy.parameters, sums=None if update.grads is None else sums)

    def fused_updates(self, clip: Tensor | None) -> list[Update]:
        """Make the fused updates of this step, but for those that began while backward ran; counts the step."""
        assert self._kernel is not None or not any(r.fused for r in self._runs)
        by_flat: defaultdict[int, list[UpdatePart]] = defaultdict(list)
        self.states.steps_taken += 1
        for r in self._runs:
            if r.fused and not r.flat.updated_early:
                by_flat[r.flat_number].append(self._part_of(r, self.states.steps_taken))
        return [self._update_of(n, parts, clip) for n, parts in by_flat.items()]

    def _part_of(self, r: Run, taken: int) -> UpdatePart:
        """``taken``: steps of this optimizer with this one, for states that do not count them."""
        assert self._kernel is not None
        group = self.optimizer.param_groups[r.group]
        names = tuple(self._kernel.moments(group))
        for name in names:
            self.states.store[r.flat_number].ensure(name, torch.float32)
        r.steps += 1
        seed_step = r.steps if self._kernel.counts_steps else taken
        return UpdatePart(r.start, r.stop, r.steps, names, self._kernel.settings(group), seed_step)

    def _update_of(self, n: int, parts: list[UpdatePart], clip: Tensor | None) -> Update:
        assert self._kernel is not None
        flat = self.flats[n]
        averages = flat.averages
        offloaded = flat.optimizer_tier != "device"
        return Update(
            flat=flat,
            states=self.states.store[n],
            kernel=self._kernel,
            parts=tuple(parts),
            clip=clip,
            unscale=averages.unscale,
            grads=None if averages.on_nvme else averages.at_hand(),
            landing=averages.landing,
            publish=offloaded,
        )

    def refuse_state(self, what: str) -> Any:
        """What is asked of the bare optimizer, which has no state between steps.

        Raises:
            StateError: always.
        """
        raise _sharded_state(f"{type(self.optimizer).__name__}.{what}")

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank has in memory, without masters."""
        store = self.states.store
        held = {t.untyped_storage().data_ptr() for each in store for t in each.tensors()}
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._runs.tensors()}
        return sum(each.nbytes() for each in store) + sum(n for address, n in own.items() if address not in held)


class OwnStep:
    """One call of the optimizer's own ``step``: the groups hold runs while it computes, and pieces before and after.

    ::

        with sharded.own_step(...) as step:
            optimizer.step()                the user's hooks before it see the groups as they are
                step.begin()                called by the engine's hook, the last one before
                ...                         torch's code, on the runs
                step.end()                  called by the engine's hook, the first one after

    Leaving the ``with`` block ends it too, where an error or an optimizer that skips its hooks has not.
    """

    def __init__(
        self,
        sharded: ShardedOptimizer,
        used: list[bool],
        *,
        clip: Tensor | None,
        shown: bool,
        submit: Callable[[list[Update]], None],
    ) -> None:
        """Note what the step is of; `ShardedOptimizer.own_step` has the arguments."""
        self.sharded = sharded
        self._used = used
        self._clip = clip
        self._shown = shown
        self._submit = submit
        self._while_stepping = ExitStack()

    def begin(self, used: list[bool] | None = None) -> None:
        """Let the groups hold what the optimizer is to step, and hand over the fused updates.

        Args:
            used: what is to be stepped, where the user's hooks before ``step`` have changed it.
        """
        sharded, used = self.sharded, self._used if used is None else used
        if self._shown:
            sharded.take_edits(used)
        sharded.compose(used, shown=self._shown)
        updates = sharded.fused_updates(self._clip)
        self._while_stepping.enter_context(sharded.showing_runs())
        if updates:
            self._submit(updates)

    def end(self) -> None:
        """Let the groups hold again what they held."""
        self._while_stepping.close()

    def __enter__(self) -> OwnStep:
        """Give itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._while_stepping.__exit__(kind, error, trace)


def _run_all(updates: list[Update]) -> None:
    for update in updates:
        update.run()
