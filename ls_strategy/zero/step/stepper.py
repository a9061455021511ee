"""Run the optimizer step, from the gradients of backward to new weights: average, check, clip, step, publish.

::

    finish         average remaining gradients, agree on which parameters have any, unscale, check for overflow
    clip_norm_     or clip_value_
    step           run the user's optimizer on the master shards, then publish the new weights
    zero_grad      drop the gradients

The phase of one optimizer's gradients, and its legal transitions::

    from                      to              when
    any                       ACCUMULATING    a backward, `zero_grad`, or a change by others
    ACCUMULATING, STEPPED     AVERAGED        before clipping and step, or when they are read
    AVERAGED, CLIPPED         CLIPPED         clipping by norm or value
    AVERAGED, CLIPPED         STEPPED         the optimizer has stepped, or skipped its step

Only `OptimizerStep.reopen` and `OptimizerStep.move` change a phase. Any other transition is an error. Every method of
`Stepper` is collective unless its docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy._torch import has_step_hooks, put_step_hooks_inside
from ls_strategy.errors import PlanError, StateError
from ls_strategy.loss_scale import LossScaler
from ls_strategy.transient import Method
from ls_strategy.zero.events import StepEvents
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.flat_states import states_offloaded
from ls_strategy.zero.flat.states import EARLY
from ls_strategy.zero.step import global_norm
from ls_strategy.zero.step.optimizer import OwnStep, ShardedOptimizer
from ls_strategy.zero.step.schedule import UpdateSchedule
from ls_strategy.zero.step.unfreezing import Unfreezing
from ls_strategy.zero.step.updater import StepArguments
from ls_strategy.zero.user_code.gradients import Gradients

if TYPE_CHECKING:
    from ls_strategy.zero.setup.shard import ShardedModel  # the floor above


MODES = ("train", "eval")
"""Methods by which a schedule-free optimizer swaps the weights that train with those that are used."""


class Phase(Enum):
    """The phase of an optimizer's gradients since the last backward."""

    ACCUMULATING = "accumulating"
    """Backward passes may still add to them, or there are none; they are not completely averaged."""
    AVERAGED = "averaged"
    """They are averaged on every rank, checked for overflow, and visible to user code."""
    CLIPPED = "clipped"
    """They were clipped after averaging."""
    STEPPED = "stepped"
    """The optimizer has stepped, or skipped its step after an overflow."""


COMPLETE = (Phase.AVERAGED, Phase.CLIPPED)
"""The gradients are complete, clipped or not, and not yet stepped."""

_BEFORE = {
    Phase.AVERAGED: (Phase.ACCUMULATING, Phase.STEPPED),
    Phase.CLIPPED: COMPLETE,
    Phase.STEPPED: COMPLETE,
}
"""The phases from which `OptimizerStep.move` leads to each."""


@dataclass(eq=False)
class OptimizerStep:
    """One optimizer, and the state of its gradients between backward and step."""

    sharded: ShardedOptimizer
    flats: list[FlatBuffer]
    kinds: list[int] = field(default_factory=list)
    """`FlatBuffer.optimizer_index` of its flats: its own number, and that of each set of optimizers it shares with."""
    hooks: tuple[Any, ...] = ()
    """Handles of the engine's hooks before and after the optimizer's own ``step``."""
    used: list[bool] = field(default_factory=list)
    """Which of its parameters have a gradient on any rank."""
    phase: Phase = Phase.ACCUMULATING
    overflow: bool = False
    norm: Tensor | None = None
    """Global norm before clipping, if it is known."""
    sums: list[Tensor] | None = None
    """`Averages.sums` of its flats, from the search for an overflow, until the gradients change."""
    norm_stands: bool = False
    """Whether ``norm`` stays valid because the gradients were clipped after it was computed."""
    clip: Tensor | None = None
    """Factor that the fused update applies to the gradients; None if it was applied in place, or is 1."""
    hooked: bool = False
    """Whether user code runs in the optimizer's step hooks, as `Stepper.finish` and `Stepper.step` have found it."""
    folded: bool = False
    """Whether the fused update applies loss scale and ``clip``, so that the averages do not include them."""
    left_out: bool = False
    """Whether the next step changes nothing; see `Stepper.leave_out`."""

    def reopen(self) -> None:
        """Record that more gradients follow, or that others have changed them."""
        self.phase = Phase.ACCUMULATING
        self.norm = self.sums = None

    def start_over(self) -> None:
        """Record that the gradients were dropped, or set to zero."""
        self.reopen()
        self.folded = False
        self.clip = None

    def move(self, to: Phase) -> None:
        """Record that the gradients are complete, clipped or stepped."""
        allowed = _BEFORE[to]
        if self.phase not in allowed:
            raise StateError(
                f"Got {self.phase.value} gradients of {type(self.sharded.optimizer).__name__}, but only "
                f"{' or '.join(each.value for each in allowed)} gradients can become {to.value}. Call finish() before "
                "clipping and step()."
            )
        self.phase = to
        if to is Phase.STEPPED:
            self.sums = None
        else:
            self.norm_stands = to is Phase.CLIPPED


def no_gradients() -> StateError:
    """Return the error for reading gradients where there are none."""
    return StateError("there is no gradient to read. Call this between backward and zero_grad().")


class Stepper:
    """Averages, checks, clips and steps the gradients of all optimizers of one model."""

    skipped_steps = 0
    """Number of steps that an overflow has skipped."""

    keeps_gradients = False
    """Ignore `zero_grad`, because the next step still needs the gradients."""

    has_stepped = False
    """Whether an optimizer has stepped in this fit, so that its hooks have run once."""

    _own_step: OwnStep | None = None
    """The running call of an optimizer's own ``step``, for torch's step hooks. Only `_run_own_step` sets it."""

    def __init__(
        self,
        model: ShardedModel,
        optimizers: list[Optimizer],
        scaler: LossScaler | None,
        events: StepEvents,
        previous: Stepper | None = None,
    ) -> None:
        """Adopt the user's optimizers. Those that ``previous``, of an earlier engine, has keep states. Collective."""
        self._model = model
        self._flats = model.flats
        self._events = events
        self._world = model.mesh.world
        self.scaler = scaler
        self._used: dict[int, list[bool]] = {}
        """Which parameters have a gradient, by `FlatBuffer.optimizer_index`."""
        self._given_up: set[int] = set()
        """`FlatBuffer.optimizer_index` of dropped gradients that a step may still need; see `go_on_from`."""
        self._tied_due: set[int] = set()
        """`FlatBuffer.optimizer_index` of gradients that have still to be summed over pipeline stages."""
        self.unfreezing = Unfreezing(model, events)
        self.optimizers = [self._adopt(i, optimizer, previous) for i, optimizer in enumerate(optimizers)]
        kinds = model.mesh.shape.kinds
        self.gradients = Gradients(model.flats, self._average, self._unfold_kind, model.on_demand, parallel=kinds)
        sharded = [state.sharded for state in self.optimizers]
        self.gradients.admit = self.unfreezing.admit
        self.gradients.hides_scale = scaler is not None and not scaler.is_shown
        self.schedule = UpdateSchedule(sharded, model.gatherer, model.offload, owner=self)

    # optimizers ------------------------------------------------------------------------------------------------------

    def _adopt(self, index: int, optimizer: Optimizer, previous: Stepper | None) -> OptimizerStep:
        """Adopt an optimizer, with its states if an earlier engine has them."""
        model = self._model
        flats = [f for f in model.flats if index in f.plan.owners]
        for flat in flats:
            flat.local.rows = {
                i: torch.zeros(1 + len(p), dtype=torch.uint8, device=flat.full.device)
                for i, p in enumerate(flat.params)
                if id(p) in model.rows
            }
        names = model.share.group_names[index] if model.share.group_names else None
        sharded = ShardedOptimizer(optimizer, flats, model.mesh, model.config.precision.moments, names)
        self.unfreezing.add(sharded)
        state = OptimizerStep(sharded, flats, list(dict.fromkeys(f.optimizer_index for f in flats)))
        number = None if previous is None else previous.index_of(optimizer)
        if previous is not None and number is not None:
            for hook in previous.optimizers[number].hooks:
                hook.remove()
            sharded.states.take_over(previous.optimizers[number].sharded.states)
        after = optimizer.register_step_post_hook(self._after_own_step)
        state.hooks = (optimizer.register_step_pre_hook(self._before_own_step), after)
        Method(optimizer, "zero_grad", partial(self._on_zero_grad, index))
        Method(optimizer, "state_dict", lambda _: sharded.refuse_state("state_dict()"))
        Method(optimizer, "load_state_dict", lambda _, state_dict: sharded.states.load_full_state_dict(state_dict))
        for name in MODES:
            if callable(getattr(type(optimizer), name, None)):
                Method(optimizer, name, partial(self._on_mode, index))
        return state

    @property
    def flats_that_train(self) -> list[FlatBuffer]:
        """Return the buffers whose gradients are sent, in order of the units."""
        return [flat for unit in self._model.units for flat in unit.trainable_flats]

    def index_of(self, optimizer: Optimizer) -> int | None:
        """Return the number of an optimizer, or None if this engine does not have it. Not collective."""
        for i, state in enumerate(self.optimizers):
            if state.sharded.optimizer is optimizer:
                return i
        return None

    def go_on_from(self, previous: Stepper) -> None:
        """Continue in the middle of a fit from an earlier engine of the model. Collective.

        Gradients in ``p.grad`` (stages 0 and 1) are kept. Sharded averages are dropped: an optimizer that then steps
        without a ``zero_grad`` raises an error.
        """
        self.scaler, self.skipped_steps = previous.scaler, previous.skipped_steps
        self.keeps_gradients = previous.keeps_gradients
        self.gradients.local = previous.gradients.local
        self.gradients.were_read = previous.gradients.were_read
        before = previous._model.flats
        scales = {id(p): flat.local.scale for flat in before for p in flat.params}
        held = {id(p): any(flat.local.mask) for flat in before for p in flat.params}
        for i, state in enumerate(self.optimizers):
            number = previous.index_of(state.sharded.optimizer)
            if number is not None:
                self.schedule.go_on_from(i, previous.schedule, number)
            if not self._model.policy.gradients:
                for flat in state.flats:
                    flat.local.take_held(scales)
        if self._model.policy.gradients:
            trained = [f for f in self._model.flats if f.trainable]
            flags = torch.tensor([any(held.get(id(p), False) for p in f.params) for f in trained], dtype=torch.uint8)
            agreed = self._world.agree(flags).tolist()
            self._given_up = {f.optimizer_index for f, dropped in zip(trained, agreed, strict=True) if dropped}

    # changes of the groups by user code in the middle of a fit --------------------------------------------------------

    def follows(self, optimizers: list[Optimizer]) -> bool:
        """Return whether these are the engine's optimizers with unchanged groups.

        Not collective; takes microseconds.
        """
        return len(optimizers) == len(self.optimizers) and all(
            state.sharded.optimizer is optimizer and state.sharded.is_current
            for state, optimizer in zip(self.optimizers, optimizers, strict=True)
        )

    def check_change(self, optimizers: list[Optimizer], parallel: str) -> None:
        """Refuse changes of groups that another engine could not adopt. Not collective; equal on all ranks.

        ``parallel`` names the kinds of parallelism that split the model; empty for none.

        Raises:
            PlanError: the model is split, or a parameter is in no group any more.
        """
        changed = [
            type(o).__name__
            for o in optimizers
            if (i := self.index_of(o)) is None or not self.optimizers[i].sharded.is_current
        ]
        what = f"the parameter groups of {', '.join(changed) or 'the optimizers'} changed while training runs"
        if parallel:
            raise PlanError(
                f"{what}, under {parallel} parallelism, which needs a fixed layout of the shards. Give all parameters "
                "to the optimizer in configure_optimizers, and freeze those that train later by requires_grad_(False)."
            )
        now = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for state in self.optimizers:
            for flat in state.flats:
                for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                    if id(param) not in now:
                        raise PlanError(
                            f"{what}, and {slot.name!r} is in none of them any more. Keep it in its group, and set the "
                            "group's learning rate and weight decay to 0, or freeze it by requires_grad_(False)."
                        )

    def mirror_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the pieces in the optimizers' groups to the parameters. Not collective."""
        for state in self.optimizers:
            if not state.sharded.shows_pieces:
                continue
            params = [p for f in state.flats for p in f.params]
            for piece, p in zip(state.sharded.pieces, params, strict=True):
                p.requires_grad_(piece.requires_grad)

    # backward --------------------------------------------------------------------------------------------------------

    def take_replaced_states(self) -> None:
        """Take what user code has assigned to ``state`` of the optimizers. Collective if it has."""
        for state in self.optimizers:
            state.sharded.take_replaced_state()

    def begin_backward(self) -> None:
        """Let a backward pass add to the gradients, with the changes that user code has made."""
        self.take_replaced_states()
        for state in self.optimizers:
            if state.folded:
                self._unfold(state)
            state.reopen()
        policy = self._model.policy
        if self.gradients.were_read or (policy.optimizer and not policy.gradients):
            self.gradients.take_all()

    def owe_tied(self) -> None:
        """Record that gradients of tied parameters have to be summed over pipeline stages. Local."""
        self._tied_due = {kind for state in self.optimizers for kind in state.kinds}

    # averages --------------------------------------------------------------------------------------------------------

    def finish(self, index: int) -> bool:
        """Complete the averaged, unscaled gradients of an optimizer and expose them as ``.grad`` of its pieces.

        Returns:
            Whether the optimizer may step, equal on every rank; False after an overflow.
        """
        state = self.optimizers[index]
        for flat in state.flats:
            if flat.offloaded:
                raise states_offloaded(", ".join(sorted(flat.offloaded)))
        if state.phase in COMPLETE:
            return not state.overflow
        if state.folded:
            self._unfold(state)
        for kind in state.kinds:
            if self.gradients.were_read:
                self.gradients.take(kind)
            self._average(kind)
        if len(state.kinds) > 1:
            self._note_used(state)
        state.hooked = has_step_hooks(state.sharded.optimizer, besides=self)
        state.folded = self._is_private(state)
        state.overflow = self.scaler is not None and self._overflows(state)
        if not state.folded:
            state.sharded.bind_grads(state.used)
        state.move(Phase.AVERAGED)
        return not state.overflow

    def _overflows(self, state: OptimizerStep) -> bool:
        """Return whether the averaged gradients of any rank have an infinity or a NaN. Collective."""
        for flat in state.flats:
            flat.averages.settle_scale(folded=state.folded)
        state.sums = [flat.averages.sums() for flat in state.flats]
        return global_norm.any_overflow(state.sums, self._world)

    def all_private(self) -> bool:
        """Return whether no user code will see any gradients directly, if it adds no hook and reads none."""
        for state in self.optimizers:
            state.hooked = has_step_hooks(state.sharded.optimizer, besides=self)
        return all(map(self._is_private, self.optimizers))

    def _is_private(self, state: OptimizerStep) -> bool:
        """Return whether no user code, such as a later hook, sees an optimizer's gradients directly.

        At stage 0, gradients that were read once are plain tensors, which user code may still hold.
        """
        plain = self.gradients.were_read and not self._model.policy.optimizer
        return self._model.reducer.private and not plain and not state.hooked

    def _unfold(self, state: OptimizerStep) -> None:
        """Apply the factors that were left to the update, so that the averages have the values they have under DDP."""
        state.folded = False
        for flat in state.flats:
            averages = flat.averages
            if not averages.folds_factors or not averages.hold_values or averages.gone:
                continue
            if averages.scale == 1.0 and state.clip is None:
                continue
            flat.wait_updated()  # an update in flight reads them
            averages.widen()
            averages.undo_scale()
            if state.clip is not None:
                global_norm.scale_(flat, state.clip)
        state.clip = None

    def _unfold_kind(self, kind: int) -> None:
        """Let user code that is about to look see the values that gradients have under DDP."""
        for state in self.optimizers:
            if kind not in state.kinds:
                continue
            if state.folded:
                self._unfold(state)
            elif state.phase is not Phase.ACCUMULATING or self.gradients.hides_scale:
                _undo_scale(state.flats)

    def _average(self, kind: int) -> list[bool]:
        """Average remaining gradients, and agree on which parameters have any. Collective.

        Args:
            kind: the number of an optimizer, or of a set of optimizers that share parameters.
        """
        flats = [f for f in self._flats if f.optimizer_index == kind]
        if kind in self._given_up:
            names = [type(s.sharded.optimizer).__name__ for s in self.optimizers if kind in s.kinds]
            raise StateError(
                f"parameter groups were changed while parameters of {' and '.join(names)} had gradients, and "
                "zero_grad() was not called since, so these gradients are lost. Change groups before the first "
                "micro-batch of a step, and call zero_grad() before its backward."
            )
        self._used[kind] = self._model.reducer.complete(flats)
        for state in self.optimizers:
            if state.kinds == [kind]:
                state.used = self._used[kind]
        for flat in flats:
            if flat.local.rows:
                flat.local.agree_on_rows(self._model.mesh.zero)
            if flat.plan.tied and flat.averages.hold_values and kind in self._tied_due:
                flat.averages.change(self._model.share.sum_tied)
        self._tied_due.discard(kind)
        return self._used[kind]

    def _note_used(self, state: OptimizerStep) -> None:
        """Collect which parameters of an optimizer that shares some have gradients, in the order of its flats."""
        rows = {kind: iter(self._used[kind]) for kind in state.kinds}
        state.used = [next(rows[flat.optimizer_index]) for flat in state.flats for _ in flat.params]

    def _outdate_others(self, state: OptimizerStep) -> None:
        """Reopen the other optimizers that share gradients with this one."""
        for other in self.optimizers:
            if other is not state and not set(other.kinds).isdisjoint(state.kinds):
                other.reopen()

    def as_they_are(self, index: int, *, clipped: bool = False) -> OptimizerStep:
        """Finish, and load the changes that user code has made to the gradients since. Changes outdate the norm.

        Args:
            index: number of the optimizer.
            clipped: the gradients are about to be clipped; a second clipping applies to the result of the first.
        """
        self.finish(index)
        state = self.optimizers[index]
        if clipped and state.phase is Phase.CLIPPED:
            if state.folded:
                self._unfold(state)
            state.norm = state.sums = None
        if not self._is_private(state):
            state.sharded.take_edits(state.used)
            state.norm = state.sums = None
        read = self.gradients.were_read
        if read and any([self.gradients.take(kind, self._used[kind]) for kind in state.kinds]):
            state.norm = state.sums = None
            self._outdate_others(state)
            if len(state.kinds) > 1:
                self._note_used(state)
            if not self._is_private(state):
                state.sharded.bind_grads(state.used)
        return state

    # clipping --------------------------------------------------------------------------------------------------------

    def clip_norm_(self, index: int, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the optimizer's gradients by their exact global norm; return the norm before clipping."""
        state = self.as_they_are(index, clipped=True)
        norm = state.norm if norm_type == 2.0 else None
        if norm is None:
            norm = global_norm.global_norm(state.flats, self._world, norm_type, sums=state.sums)
        state.norm = norm if norm_type == 2.0 else None
        factor = global_norm.clip_factor(norm, max_norm)
        if factor is None or state.overflow or state.left_out:  # a factor of NaN would stay in the padding
            return norm
        for flat in state.flats:
            if state.folded and flat.averages.folds_factors:
                state.clip = factor.float()  # fused updates are of fp32 masters
            else:
                global_norm.scale_(flat, factor)
        self._clipped(state)
        return norm

    def clip_value_(self, index: int, limit: float) -> None:
        """Clamp every element of the optimizer's averaged gradients."""
        state = self.as_they_are(index, clipped=True)
        global_norm.clip_value_(state.flats, limit)
        self._clipped(state)

    def _clipped(self, state: OptimizerStep) -> None:
        if len(self.optimizers) > 1:
            self._outdate_others(state)
        state.move(Phase.CLIPPED)
        if not self._is_private(state):
            state.sharded.show_again()

    def grad_norm(self, index: int | None = None, norm_type: float = 2.0) -> Tensor:
        """Return the global norm of the averaged gradients before clipping, of one optimizer or of all together.

        Raises:
            StateError: there are no gradients: call between backward and the next ``zero_grad``.
        """
        states = self.optimizers if index is None else [self.optimizers[index]]
        known = states[0].norm if len(states) == 1 and norm_type == 2.0 else None
        if known is not None and (states[0].norm_stands or states[0].phase is Phase.STEPPED):
            return known
        for i, state in enumerate(self.optimizers):
            if state in states:
                self.as_they_are(i)
        if not any(any(s.used) for s in states):
            raise no_gradients()
        if len(states) == 1 and norm_type == 2.0 and states[0].norm is not None:
            return states[0].norm  # unchanged since
        flats = {id(f): f for s in states for f in s.flats}  # count shared ones once
        sums = states[0].sums if len(states) == 1 else None
        norm = global_norm.global_norm(list(flats.values()), self._world, norm_type, sums=sums)
        if len(states) == 1 and norm_type == 2.0:
            states[0].norm = norm
        return norm

    # step ------------------------------------------------------------------------------------------------------------

    def leave_out(self, index: int) -> None:
        """Let the optimizer's next step change nothing, neither states nor loss scale, as if it had no gradients.

        Call it between backward and step, on all ranks. No update may begin in backward: see ``Engine.early_step``.
        """
        self.optimizers[index].left_out = True

    def step(self, index: int, run: Callable[[], Any]) -> Any:
        """Let the optimizer update its master shards by calling ``run``, then publish the new weights.

        After an overflow nothing is updated on any rank, and the step is counted in ``skipped_steps``; but not if it is
        left out.
        """
        state = self.optimizers[index]
        state.hooked = has_step_hooks(state.sharded.optimizer, besides=self)
        self.as_they_are(index)
        result, number = None, 0
        self._events.after_user_code()
        left_out, state.left_out = state.left_out, False
        if not (state.overflow or left_out):
            if self.schedule.applies:
                number = self.schedule.begin_step(index)
            result = self._run_own_step(index, run)
            if state.hooked:
                self._events.after_user_code()
            self._publish(index)
        elif not left_out:
            self.skipped_steps += 1
        if self.scaler is not None and not left_out:
            self.scaler.update(state.overflow)
        if state.phase in COMPLETE:  # a hook after the step may have dropped the gradients
            state.move(Phase.STEPPED)
        self.has_stepped = True
        if self.schedule.applies:
            self.schedule.end_step(number)
        self._events.on_stepped()
        return result

    def _publish(self, index: int) -> None:
        """Publish the new weights of an optimizer's parameters. A unit that needs an update in flight waits for it."""
        self._events.before_publish()
        flats = [flat for flat in self.optimizers[index].flats if not flat.is_frozen]
        if self.schedule.applies:
            self.schedule.publish(index, flats)
        else:
            self._model.gatherer.end_step(flats)

    def _run_own_step(self, index: int, run: Callable[[], Any]) -> Any:
        state = self.optimizers[index]
        put_step_hooks_inside(state.sharded.optimizer, *state.hooks)
        step = StepArguments(state.used, state.clip, shown=not self._is_private(state))
        if self.schedule.offloads:
            submit, stream = partial(self.schedule.submit, index), self.schedule.stream_of(index)
            step = replace(step, submit=submit, stream=stream)
        try:
            with OwnStep(state.sharded, step) as self._own_step:
                return run()
        finally:
            self._own_step = None

    def _before_own_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Run as the last hook before ``optimizer.step``."""
        step = self._own_step
        if step is None:
            raise StateError(
                f"{type(optimizer).__name__}.step() was called on the bare optimizer, which does not have the other "
                "ranks' gradients. Call step() on what self.optimizers() or fabric.setup() returns."
            )
        if step.sharded.optimizer is not optimizer or step.nests():
            return
        used = None
        if has_step_hooks(optimizer, besides=self):  # they may have changed gradients, and weights
            number = self.index_of(optimizer)
            assert number is not None
            used = self.as_they_are(number).used
            self._events.after_user_code()
        step.begin(used)
        self._model.gatherer.outdate([flat for flat in step.sharded.flats if not flat.is_frozen])

    def _after_own_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Run as the first hook after ``optimizer.step``."""
        if self._own_step is not None and self._own_step.sharded.optimizer is optimizer:
            self._own_step.end()

    # weights that a schedule-free optimizer swaps ---------------------------------------------------------------------

    def _on_mode(self, index: int, method: Method, *args: Any, **kwargs: Any) -> Any:
        """Handle a call of ``optimizer.train()`` or ``eval()``: let it change this rank's shards, and publish them."""
        sharded = self.optimizers[index].sharded
        if self._own_step is not None and self._own_step.sharded is sharded:
            return method.original(*args, **kwargs)
        self._events.before_read()
        self._events.after_user_code()
        self.schedule.bring_in_delayed(index)
        with sharded.showing_states():
            result = method.original(*args, **kwargs)
        if sharded.has_state():
            self._model.gatherer.outdate([flat for flat in sharded.flats if not flat.is_frozen])
            self._publish(index)
        return result

    # zero_grad -------------------------------------------------------------------------------------------------------

    def _on_zero_grad(self, index: int, method: Method, *args: Any, **kwargs: Any) -> None:
        """Handle a call of ``optimizer.zero_grad()``."""
        if method.replaces(Optimizer.zero_grad):
            self.zero_grad(index, set_to_none=kwargs.get("set_to_none", args[0] if args else True))
        elif not self.keeps_gradients:  # an override may do more, and drop some, or none
            method.original(*args, **kwargs)
            params = [p for group in method.owner.param_groups for p in group["params"]]
            dropped = [p for p in params if p.grad is None]
            if len(dropped) == len(params):
                self.zero_grad(index)
            else:
                self.zero_params(dropped, set_to_none=True)

    def zero_grad(self, index: int, *, set_to_none: bool = True) -> None:
        """Run ``optimizer.zero_grad``. Collective only if a reduction is in flight."""
        if self.keeps_gradients:
            return
        state = self.optimizers[index]
        state.start_over()
        if self.gradients.were_read:
            for kind in state.kinds:
                self.gradients.forget(kind, set_to_none=set_to_none)
        if set_to_none:
            self._given_up.difference_update(state.kinds)
        if len(self.optimizers) > 1:
            self._outdate_others(state)
        self._model.reducer.zero_grad(state.flats, set_to_none=set_to_none)
        for piece in state.sharded.pieces:
            if set_to_none:
                piece.grad = None

    def zero_params(self, params: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Drop averaged gradients of some parameters, as ``module.zero_grad()`` does. Not collective."""
        wanted = {id(p) for p in params}
        self.gradients.zero(wanted, set_to_none=set_to_none)
        self._model.reducer.zero_params(
            [f for f in self._model.flats if f.has_optimizer], wanted, set_to_none=set_to_none
        )
        for state in self.optimizers:
            state.reopen()
        if set_to_none:
            self._given_up.intersection_update(
                f.optimizer_index for f in self._model.flats if not wanted.issuperset(map(id, f.params))
            )


def _undo_scale(flats: Iterable[FlatBuffer]) -> None:
    """Divide gradients by their loss scale, if nobody did. Not collective.

    Before `Stepper.finish`, nobody did; after it, `Averages.settle_scale` has left that on NVMe to the update.
    """
    for flat in flats:
        averages = flat.averages
        if averages.scale == 1.0:
            continue
        if averages.in_place:
            flat.local.rescale(1.0)
        elif averages.hold_values and not averages.gone:
            flat.wait_updated()  # an update in flight reads them
            averages.undo_scale()


def require_one_step(flats: Iterable[FlatBuffer], *, torn: bool, failure: BaseException | None) -> None:
    """Refuse to return weights if only some of them have taken the last step. Not collective.

    Raises:
        StateError: an exception ended a backward pass after it had begun to update, or an update failed.
    """
    if failure is not None:
        raise StateError(
            f"the update of offloaded states failed ({type(failure).__name__}: {failure}) after some units had "
            "been updated, so these weights do not belong to one step. Resume from the last checkpoint."
        ) from failure
    if torn or any(flat.update in EARLY for flat in flats):
        raise StateError(
            "an exception ended a backward pass after some units had been updated, so these weights do not belong to "
            "one step. Resume from the last checkpoint. Set sharding.overlap_step=False on the strategy to begin "
            "updates only when backward is over."
        )
