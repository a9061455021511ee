"""One training step, end to end, without Lightning.

::

    begin_step      gather what a step uses anywhere; broadcast buffers as DDP does
    (forward)       hooks gather and release units
    begin_backward
    (backward)      hooks hand gradients to the reducer, which sends unit by unit
    end_backward    send the rest
    finish          wait, agree on which parameters have gradients, unscale, look for overflow
    clip_norm_      or clip_value_
    step            the user's optimizer on the master shards; then publish (stages 0 to 2) or release (stage 3)

Everything here is collective unless it says otherwise: every rank makes the same calls in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy import spans
from ls_strategy._compat import has_step_hooks, put_step_hooks_inside, storage_key
from ls_strategy.config import LossScaleConfig, ZeROConfig
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.layout import TensorPart
from ls_strategy.moe.router import RoutingAccounts
from ls_strategy.precision import LossScaler, PrecisionPolicy
from ls_strategy.tiers.link import trim_heap
from ls_strategy.transient import Method
from ls_strategy.zero import materialize as materials
from ls_strategy.zero import step as stepping
from ls_strategy.zero import weights
from ls_strategy.zero.assembly import Draft
from ls_strategy.zero.copies import PlainCopies
from ls_strategy.zero.gather import Gatherer
from ls_strategy.zero.gradients import Gradients
from ls_strategy.zero.hooks import UnitHooks
from ls_strategy.zero.lending import Lender
from ls_strategy.zero.offload import Offload
from ls_strategy.zero.optimizer import ShardedOptimizer
from ls_strategy.zero.parameters import grad_of, unnoticed, unsettle
from ls_strategy.zero.reduce import Reducer
from ls_strategy.zero.schedule import UpdateSchedule
from ls_strategy.zero.share import Share
from ls_strategy.zero.units import Flat
from ls_strategy.zero.unstepped import Unstepped
from ls_strategy.zero_stages import POLICIES

_HOLDERS: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()
"""Which engine holds a model's parameters. Engines hold no strong reference to their model, so entries end with it."""


@dataclass
class _OptimizerState:
    """What the engine remembers of one optimizer between backward and step."""

    sharded: ShardedOptimizer
    flats: list[Flat]
    kinds: list[int] = field(default_factory=list)
    """`Flat.optimizer_index` of its flats: one number for its own, and one for each set of optimizers it is in."""
    used: list[bool] = field(default_factory=list)
    finished: bool = False
    overflow: bool = False
    norm: Tensor | None = None
    """Before clipping."""
    clipped: bool = False
    """Whether the gradients were clipped since; ``norm`` is that of before."""
    clip: Tensor | None = None
    """Factor that the fused update multiplies the gradients by; None where it was done in place, or is 1."""
    folded: bool = False
    """Whether loss scale and ``clip`` are left to the fused update, so that the averages are without them."""
    hooks: tuple[Any, ...] = ()
    """Handles of what runs before and after the optimizer's own ``step``."""


class Engine:
    """Units, gatherer, reducer and sharded optimizers of one model."""

    skipped_steps = 0
    """Steps that an overflow has skipped."""

    early_step = False
    """Begin a unit's update as soon as its gradients are complete. Only where the step is certain to follow, with
    neither clipping nor a loss scale, and with the hyper-parameters of now."""

    keeps_gradients = False
    """Ignore `zero_grad`: the gradients are those of the step to come."""

    _stepped = False
    """Whether hooks have seen a step of this fit, in which no unit was updated early: see `begin_backward`."""

    _torn = False
    """Whether an exception ended a backward pass that had begun to update."""

    _exposed_before_s = 0.0
    """What `exposed_step_s` was when this engine went on from another one."""

    _stepping: ShardedOptimizer | None = None
    """Whose ``step`` is running."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        *,
        config: ZeROConfig,
        precision: PrecisionPolicy,
        mesh: Mesh,
        device: torch.device,
        loss_scale: LossScaleConfig | None = None,
        parts: Mapping[int, TensorPart] | None = None,
        share: Share | None = None,
    ) -> None:
        """Take over the model's parameters and the optimizers' groups, from an earlier engine too. Collective.

        Args:
            model: parameters may be on any device, also on meta (then modules fill them by ``reset_parameters``).
            optimizers: built on the model's parameters. Empty for evaluation.
            config: options.
            precision: dtypes.
            mesh: the ranks.
            device: where the buffers live.
            loss_scale: knobs of the loss scale, for the modes that have one.
            parts: ``id(parameter)`` -> what of it is here, for parameters that are divided over ranks.
            share: what of the parameters this rank of a pipeline holds.

        Raises:
            PlanError: model, optimizers and options do not fit together; on every rank, before anything is moved.
        """
        self._model = weakref.ref(model)
        self.config = config
        self.precision = precision
        self.mesh = mesh
        self.share = share or Share()
        self.comm = comm = mesh.zero
        """The ranks over which states are divided and gradients averaged."""
        self.device = device
        # One rank has nothing to shard: every stage is stage 0 there, without gathers of its own parameters. With
        # offload the stage says what is on the device at all.
        self.policy = POLICIES[config.stage if comm.world_size > 1 or config.offloads else 0]
        self.scaler = LossScaler(loss_scale or LossScaleConfig()) if precision.loss_scaling else None
        self._used: dict[int, list[bool]] = {}
        """By `Flat.optimizer_index`: which parameters have a gradient."""
        self._dropped: set[int] = set()
        """Those whose gradients were given up, and the step may still want: see `go_on_from`."""
        self._tied_due: set[int] = set()
        """Those whose gradients have still to be summed over the stages of a pipeline."""
        draft = Draft(
            model,
            optimizers,
            config=config,
            precision=precision,
            policy=self.policy,
            parts=parts or {},
            share=self.share,
        )
        draft.refuse(weights.refusal(config.shard_weights, mesh.shape))
        draft.agree(mesh.world)
        previous = Engine.holding(model)
        if previous is not None:
            previous.detach()
        held = {} if previous is None else {id(p): f for f in previous.flats for p in f.params}
        shares = weights.shard_weights(config.shard_weights, comm, device)
        self.plan = draft.resolve(mesh, held, shares, comm.rank)
        self.offload = Offload.prepare(self.plan, optimizers, config, mesh.world, device)
        with unnoticed():
            self.units = draft.build(self.plan, mesh, device, held, self.offload)
        self.lender = Lender(self.flats, sharded=self.policy.parameters)
        self._place_buffers(draft)
        self.gatherer = Gatherer(self.units, sharded=self.policy.parameters, prefetch_units=config.prefetch_units)
        together = mesh.zero if mesh.shape.expert == 1 else mesh.stage
        self.reducer = Reducer(
            self.units, policy=self.policy, comm=together, reduce_in_fp32=precision.reduce_in_fp32
        )  # fmt: skip
        self.reducer.selective = len(optimizers) > 1
        self.optimizers = [self._adopt(i, optimizer, previous) for i, optimizer in enumerate(optimizers)]
        if previous is not None:
            previous.offload.close()
        self.gradients = Gradients(self.flats, self._average, self._unfold_kind, self.lender, parallel=mesh.shape.kinds)
        self._unstepped = Unstepped([] if mesh.shape.kinds else self.flats, comm, lambda: self.gradients.local)
        self.schedule = UpdateSchedule([s.sharded for s in self.optimizers], self.gatherer, self.offload, owner=self)
        self.reducer.reset()
        self.hooks = UnitHooks(self.units, self.gatherer, self.reducer, sharded=self.policy.parameters)
        self._boundaries = [
            materials.Fp32Boundary(m, precision.compute)
            for m in draft.kept_fp32
            if precision.compute != torch.float32 and type(m).__name__ in config.fp32_modules
        ]
        self._broadcast_buffers_next = True
        self._copies = PlainCopies(model, self.flats)

        self.on_detach: list[Callable[[], None]] = []
        """Run when another engine takes the model over."""
        _HOLDERS[model] = self

    def _place_buffers(self, draft: Draft) -> None:
        routers = [m for m in self.model.modules() if isinstance(m, RoutingAccounts)]  # biases move in small steps
        kept = {id(m) for m in (*draft.kept_fp32, *routers)}
        materials.place_buffers(self.model, self.device, self.precision.compute, kept)

    @property
    def model(self) -> nn.Module:
        """The model whose parameters are here."""
        model = self._model()
        assert model is not None
        return model

    @staticmethod
    def holding(model: nn.Module) -> Engine | None:
        """The engine that holds a model's parameters now, also after a fit and under another strategy object."""
        return _HOLDERS.get(model)

    # set-up ----------------------------------------------------------------------------------------------------------

    def _adopt(self, index: int, optimizer: Optimizer, previous: Engine | None) -> _OptimizerState:
        """Take an optimizer over, from an earlier engine with its states."""
        flats = [f for f in self.flats if index in f.plan.owners]
        names = self.share.group_names[index] if self.share.group_names else None
        sharded = ShardedOptimizer(optimizer, flats, self.mesh, self.config.moments, names)
        state = _OptimizerState(sharded, flats, list(dict.fromkeys(f.optimizer_index for f in flats)))
        number = None if previous is None else previous.index_of(optimizer)
        if previous is not None and number is not None:
            for hook in previous.optimizers[number].hooks:
                hook.remove()
            sharded.take_over(previous.optimizers[number].sharded)
        after = optimizer.register_step_post_hook(self._after_step)
        state.hooks = (optimizer.register_step_pre_hook(self._on_step), after)
        Method(optimizer, "zero_grad", partial(self._on_zero_grad, index))
        Method(optimizer, "state_dict", lambda _: sharded.refuse_state("state_dict()"))
        Method(optimizer, "load_state_dict", lambda _, state_dict: sharded.load_full_state_dict(state_dict))
        return state

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._stepping is None:
            raise StateError(
                f"{type(optimizer).__name__}.step() was called on the bare optimizer, which knows nothing of the other "
                "ranks' gradients. Call step() on what self.optimizers() returns."
            )
        if self._stepping.optimizer is not optimizer:
            return
        used = None
        if has_step_hooks(optimizer, besides=self):  # they may have changed gradients, and weights
            number = self.index_of(optimizer)
            assert number is not None
            used = self._as_they_are(number).used
            self.settle()
        self._stepping.begin_own_step(used)
        self.gatherer.outdate(self._stepping.flats)
        self.schedule.note_stepped(self._stepping.flats)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._stepping is not None and self._stepping.optimizer is optimizer:
            self._stepping.end_own_step()

    @property
    def private_gradients(self) -> bool:
        """User code reaches averaged gradients only through ``p.grad``, between backward and `zero_grad`.

        Then they need not be shown as ``.grad`` of pieces, may be kept in 16 bit where that is exact, and the update
        multiplies loss scale and clip factor in; where ``p.grad`` is read first, they are multiplied in then.
        """
        return self.reducer.private

    @private_gradients.setter
    def private_gradients(self, private: bool) -> None:
        self.reducer.private = private

    def index_of(self, optimizer: Optimizer) -> int | None:
        """Number of an optimizer of this engine, None for a stranger. Not collective."""
        for i, state in enumerate(self.optimizers):
            if state.sharded.optimizer is optimizer:
                return i
        return None

    def mirror_requires_grad(self) -> None:
        """Copy ``requires_grad`` to the parameters from pieces that stand for them in groups. Not collective."""
        for state in self.optimizers:
            if not state.sharded.shows_pieces:
                continue
            params = [p for f in state.flats for p in f.params]
            for piece, p in zip(state.sharded.pieces, params, strict=True):
                p.requires_grad_(piece.requires_grad)

    # parameters that join in the middle of a fit ---------------------------------------------------------------------

    def follows(self, optimizers: list[Optimizer]) -> bool:
        """Whether these are the engine's optimizers, with the groups that it knows. Not collective; microseconds."""
        return len(optimizers) == len(self.optimizers) and all(
            state.sharded.optimizer is optimizer and state.sharded.is_current
            for state, optimizer in zip(self.optimizers, optimizers, strict=True)
        )

    def check_change(self, optimizers: list[Optimizer]) -> None:
        """Refuse changes of groups that another engine could not follow. Not collective: the same on all ranks.

        Raises:
            PlanError: with the cure.
        """
        changed = [
            type(o).__name__
            for o in optimizers
            if (i := self.index_of(o)) is None or not self.optimizers[i].sharded.is_current
        ]
        what = f"the parameter groups of {', '.join(changed) or 'the optimizers'} changed while training runs"
        if self.mesh.shape.kinds:
            raise PlanError(
                f"{what}, under {self.mesh.shape.kinds} parallelism, where the layout of the shards stays as it is. "
                "Give all parameters to the optimizer in configure_optimizers, and freeze those that are to wait by "
                "requires_grad_(False)."
            )
        now = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for state in self.optimizers:
            for flat in state.flats:
                for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                    if id(param) not in now:
                        raise PlanError(
                            f"{what}, and {slot.name!r} is in none of them any more. Leave it where it is, and set the "
                            "learning rate and weight decay of its group to 0, or freeze it by requires_grad_(False)."
                        )

    def go_on_from(self, previous: Engine) -> None:
        """Go on in the middle of a fit where an earlier engine of the model has stopped. Collective.

        Gradients of before go on where ``p.grad`` holds them (stages 0 and 1). Sharded averages are given up: an
        optimizer that steps without a ``zero_grad`` since is an error.
        """
        self.scaler, self.skipped_steps = previous.scaler, previous.skipped_steps
        self.keeps_gradients = previous.keeps_gradients
        self._broadcast_buffers_next = previous._broadcast_buffers_next
        self._exposed_before_s = previous.exposed_step_s
        self.gradients.local = previous.gradients.local
        self.gradients.were_read = previous.gradients.were_read
        scales = {id(p): flat.grad_scale for flat in previous.flats for p in flat.params}
        held = {id(p): any(flat.used_here) for flat in previous.flats for p in flat.params}
        for i, state in enumerate(self.optimizers):
            number = previous.index_of(state.sharded.optimizer)
            if number is not None:
                self.schedule.go_on_from(i, previous.schedule, number)
            if not self.policy.gradients:
                for flat in state.flats:
                    flat.take_held_grads(scales)
        if self.policy.gradients:
            trained = [f for f in self.flats if f.trainable]
            flags = torch.tensor([any(held[id(p)] for p in f.params) for f in trained], dtype=torch.uint8)
            agreed = self.mesh.world.agree(flags).tolist()
            self._dropped = {f.optimizer_index for f, dropped in zip(trained, agreed, strict=True) if dropped}

    @property
    def flats(self) -> list[Flat]:
        """Every flat buffer, in order of the units."""
        return [f for u in self.units for f in u.flats]

    def storages(self) -> set[int]:
        """Keys of the memory that parameters are in: what autograd saves of it is no activation. Not collective."""
        return {storage_key(flat.full) for flat in self.flats}

    def detach(self) -> None:
        """Remove every hook; the buffers stay."""
        self.reducer.finish_in_flight()
        self.wait()
        self.hooks.detach()
        self._copies.remove()
        for boundary in self._boundaries:
            boundary.remove()
        for callback in self.on_detach:
            callback()
        self.on_detach.clear()
        for flat in self.flats:
            flat.lender = flat.gradients = None
            for p in () if self.policy.parameters else flat.params:
                unsettle(p)

    # forward ---------------------------------------------------------------------------------------------------------

    def begin_step(self, *, sync_buffers_after: bool = False) -> None:
        """A training, validation, test or predict step begins.

        Args:
            sync_buffers_after: whether the step after this one starts by taking rank 0's buffers; DDP does so after
                every forward whose backward synchronises.
        """
        self.lender.thread = threading.get_ident()
        self.settle()
        self.gatherer.fetch_root()
        if self._broadcast_buffers_next:
            self._broadcast_buffers()
        self._broadcast_buffers_next = sync_buffers_after

    def end_forward(self) -> None:
        """The step's forward is over. Not collective."""
        self.settle()
        self.gatherer.end_forward()

    def settle(self) -> None:
        """Take what user code has written into parameters, and give back what was lent to it. Not collective."""
        self.lender.take_writes()
        self.lender.give_back()

    def _broadcast_buffers(self) -> None:
        if self.comm.world_size == 1:
            return
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in self.model.buffers():
            if buffer.numel() and not buffer.is_meta:
                by_dtype[buffer.dtype].append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([b.detach().reshape(-1) for b in buffers])
            self.comm.broadcast_(flat)
            if self.comm.rank != 0:
                for b, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    b.detach().copy_(part.view_as(b))

    def wait(self) -> None:
        """Wait until every parameter that is on its way has arrived: before anything but a unit's forward reads one.

        Collective where updates are delayed.
        """
        for index in range(len(self.optimizers)):
            self.schedule.bring_in_delayed(index)
        self.gatherer.finish_all()
        self.settle()

    # backward --------------------------------------------------------------------------------------------------------

    def begin_backward(self, *, eager: bool) -> None:
        """A backward pass begins. ``eager``: it is the last one before the step, so send what it completes.

        Hooks after the step may read gradients, which an early update takes. So the first step updates nothing early,
        and if user code has read any gradient since, no later step does.
        """
        spans.enter(spans.BACKWARD)
        for state in self.optimizers:
            self._unfold(state)  # where no `zero_grad` has dropped them, gradients are kept for this pass as they are
            state.finished = False
            state.norm = None
        self.gradients.take_all()
        self._unstepped.outdate()
        early = self.early_step and eager and self.scaler is None and self.schedule.allows_early
        early = early and not self.gradients.were_read
        early = early and all(map(self._is_private, self.optimizers))
        self.reducer.on_complete = None  # what an earlier micro-batch left under way is not complete
        self.reducer.begin_backward(eager=eager, loss_scale=self.scaler.scale if self.scaler is not None else 1.0)
        if early:
            self.reducer.on_complete = self.schedule.begin_early if self._stepped else self.schedule.postpone

    def end_backward(self, *, local: bool = False) -> None:
        """The backward pass is over. ``local``: more are to come before gradients are averaged (stages 0 and 1)."""
        self.reducer.end_backward()
        self.gradients.local = local and not self.policy.gradients
        self.gradients.averaged = self.reducer.eager
        if not self.reducer.holds:
            self._let_go()
        spans.leave(spans.BACKWARD)

    def _let_go(self) -> None:
        for unit in self.units:
            unit.open_backwards = unit.unclosable_backwards = 0
            unit.pinned = False
            if not unit.is_root:
                self.gatherer.release(unit)

    # a pipeline ------------------------------------------------------------------------------------------------------

    def begin_micro_batches(self) -> None:
        """Forwards and backwards of several micro-batches begin; each backward is one of `begin_backward`'s.

        Gradients add up on this rank until the pass that `begin_backward` calls ``eager``, or until
        `end_micro_batches`. Stage 3: units are gathered once, and stay until then.
        """
        self.reducer.holds = True
        for unit in self.units:
            unit.pinned = True

    def end_micro_batches(self, *, reduce: bool) -> None:
        """They are over. ``reduce``: send what no pass has sent; collective then."""
        if reduce:
            self.reducer.send_held()
            self._tied_due = {kind for state in self.optimizers for kind in state.kinds}
        self.reducer.holds = False
        self._let_go()

    def finish(self, index: int) -> bool:
        """Make the averaged, unscaled gradients of an optimizer complete and visible as ``.grad`` of its pieces.

        Returns:
            Whether the optimizer may step; False after an overflow, the same on every rank.
        """
        state = self.optimizers[index]
        if state.finished:
            return not state.overflow
        self._unfold(state)
        for kind in state.kinds:
            self.gradients.take(kind)
            self._average(kind)
        self._note_used(state)
        state.overflow = state.clipped = False
        state.folded = self._is_private(state)
        if self.scaler is not None:
            for flat in state.flats:
                # Otherwise the update multiplies by what undoes the scale.
                if not (flat.averages.on_drive or (state.folded and flat.averages.folds_factors)):
                    flat.averages.undo_scale()
            state.overflow = stepping.any_overflow(state.flats, self.mesh.world)
        if not self._is_private(state):
            state.sharded.bind_grads(state.used)
        state.finished = True
        return not state.overflow

    def _unfold(self, state: _OptimizerState) -> None:
        """Multiply into the averages what was left to the update, so that they are what they are under DDP."""
        if not state.folded:
            return
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
                stepping.scale_(flat, state.clip)
        state.clip = None

    def _unfold_kind(self, kind: int) -> None:
        for state in self.optimizers:
            if kind in state.kinds:
                self._unfold(state)

    def _average(self, kind: int) -> list[bool]:
        """Average what is left of gradients, and agree on which parameters have any. Collective.

        Args:
            kind: an optimizer's number, or that of several which share parameters.
        """
        flats = [f for f in self.flats if f.optimizer_index == kind]
        if kind in self._dropped:
            names = [type(s.sharded.optimizer).__name__ for s in self.optimizers if kind in s.kinds]
            raise StateError(
                f"parameter groups were changed while parameters of {' and '.join(names)} had gradients, and "
                "zero_grad() was not called since: they are gone. Change groups before the first micro-batch of a "
                "step, and call zero_grad() before its backward."
            )
        self._used[kind] = self.reducer.complete(flats)
        for state in self.optimizers:
            if state.kinds == [kind]:
                state.used = self._used[kind]
        for flat in flats:
            if flat.plan.tied and flat.averages.hold_values and kind in self._tied_due:
                flat.averages.change(self.share.sum_tied)
        self._tied_due.discard(kind)
        return self._used[kind]

    def _note_used(self, state: _OptimizerState) -> None:
        """Put together, in the order of an optimizer's flats, which parameters have gradients."""
        if len(state.kinds) == 1:
            return
        rows = {kind: iter(self._used[kind]) for kind in state.kinds}
        state.used = [next(rows[flat.optimizer_index]) for flat in state.flats for _ in flat.params]

    def _outdate_others(self, state: _OptimizerState) -> None:
        """What other optimizers know of gradients that they share with this one is of before."""
        for other in self.optimizers:
            if other is not state and not set(other.kinds).isdisjoint(state.kinds):
                other.finished = False
                other.norm = None

    def clip_norm_(self, index: int, max_norm: float) -> Tensor:
        """Clip by global norm over all gradients of the optimizer, exactly; returns the norm before clipping."""
        state = self._as_they_are(index, clipped=True)
        if state.norm is None:
            state.norm = stepping.global_norm(state.flats, self.mesh.world)
        factor = stepping.clip_factor(state.norm, max_norm)
        if factor is None:
            return state.norm
        for flat in state.flats:
            if state.folded and flat.averages.folds_factors:
                state.clip = factor
            else:
                stepping.scale_(flat, factor)
        self._clipped(state)
        return state.norm

    def _as_they_are(self, index: int, *, clipped: bool = False) -> _OptimizerState:
        """Finish, and take in what user code has made of the gradients since; norms of before are no longer theirs.

        Args:
            index: of the optimizer.
            clipped: to be clipped: what an earlier clipping has left, and its norm.
        """
        self.finish(index)
        state = self.optimizers[index]
        if clipped and state.clipped:
            self._unfold(state)
            state.norm = None
        if not self._is_private(state):
            state.sharded.take_edits(state.used)
            state.norm = None
        if any([self.gradients.take(kind, self._used[kind]) for kind in state.kinds]):
            state.norm = None
            self._outdate_others(state)
            self._note_used(state)
            if not self._is_private(state):
                state.sharded.bind_grads(state.used)
        return state

    def _is_private(self, state: _OptimizerState) -> bool:
        """Whether nobody looks at an optimizer's gradients as they are, or does in hooks that came after set-up.

        At stage 0 gradients that were read once are plain tensors, which somebody may still have.
        """
        plain = self.gradients.were_read and not self.policy.optimizer
        return self.private_gradients and not plain and not has_step_hooks(state.sharded.optimizer, besides=self)

    def _clipped(self, state: _OptimizerState) -> None:
        self._outdate_others(state)
        state.clipped = True
        if not self._is_private(state):
            state.sharded.show_again()

    def clip_value_(self, index: int, limit: float) -> None:
        """Clamp every averaged gradient element of the optimizer."""
        state = self._as_they_are(index, clipped=True)
        stepping.clip_value_(state.flats, limit)
        self._clipped(state)

    def grad_norm(self, index: int | None = None, norm_type: float = 2.0) -> Tensor:
        """Global norm of the averaged gradients, before clipping: of one optimizer, or of all together.

        Raises:
            StateError: there are no gradients: call between backward and the next ``zero_grad``.
        """
        states = self.optimizers if index is None else [self.optimizers[index]]
        known = states[0].norm if len(states) == 1 and norm_type == 2.0 else None
        if known is not None and (states[0].clipped or self._is_private(states[0])):
            return known
        for i, state in enumerate(self.optimizers):
            if state in states:
                self._as_they_are(i)
        if not any(any(s.used) for s in states):
            raise StateError("no gradient to take the norm of: call between backward and the next zero_grad().")
        flats = {id(f): f for s in states for f in s.flats}  # once, also what several optimizers share
        norm = stepping.global_norm(list(flats.values()), self.mesh.world, norm_type)
        if len(states) == 1 and norm_type == 2.0:
            states[0].norm = norm
        return norm

    # step ------------------------------------------------------------------------------------------------------------

    def step(self, index: int, run: Callable[[], Any]) -> Any:
        """Let the optimizer update its master shards by calling ``run``, then bring the weights where they are read.

        After an overflow nothing is updated on any rank, and the step is counted in ``skipped_steps``.
        """
        proceed = self.finish(index)
        state = self._as_they_are(index)
        result = None
        self.settle()
        if proceed:
            number = self.schedule.begin_step(index)
            self._stepping = state.sharded
            put_step_hooks_inside(state.sharded.optimizer, *state.hooks)
            try:
                result = state.sharded.step(
                    state.used,
                    run,
                    clip=state.clip,
                    shown=not self._is_private(state),
                    submit=lambda updates: self.schedule.submit(index, updates),
                )
            finally:
                self._stepping = None
            if has_step_hooks(state.sharded.optimizer, besides=self):
                self.settle()  # what hooks after the step have written
            self.schedule.publish(index)
            if self.config.offloads and number == 1:
                trim_heap()  # the first step's transient buffers, before what stays settles among them
        else:
            self.skipped_steps += 1
        if self.scaler is not None:
            self.scaler.update(state.overflow)
        state.finished = False
        self._stepped = True
        return result

    def _on_zero_grad(self, index: int, method: Method, *args: Any, **kwargs: Any) -> None:
        """``optimizer.zero_grad()`` was called."""
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
        """``optimizer.zero_grad``. Not collective, unless a reduction is under way (then on every rank)."""
        if self.keeps_gradients:
            return
        state = self.optimizers[index]
        state.finished = state.folded = False
        state.norm = state.clip = None
        for kind in state.kinds:
            self.gradients.forget(kind, set_to_none=set_to_none)
        if set_to_none:
            self._dropped.difference_update(state.kinds)
        self._outdate_others(state)
        self.reducer.zero_grad(state.flats, set_to_none=set_to_none)
        for piece in state.sharded.pieces:
            if set_to_none:
                piece.grad = None

    def zero_params(self, params: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Drop averaged gradients of some parameters, as ``module.zero_grad()`` means it. Not collective."""
        wanted = {id(p) for p in params}
        self.gradients.zero(wanted, set_to_none=set_to_none)
        self.reducer.zero_params([f for f in self.flats if f.trainable], wanted, set_to_none=set_to_none)
        for state in self.optimizers:
            state.finished = False
            state.norm = None
        if set_to_none:
            self._dropped.intersection_update(
                f.optimizer_index for f in self.flats if not wanted.issuperset(map(id, f.params))
            )

    def check_whole(self) -> None:
        """Refuse to hand out weights of which some have taken a step that the others have not. Not collective.

        Raises:
            StateError: an exception ended a backward pass that had begun to update, or an update failed.
        """
        failure = self.offload.stream.error
        if failure is not None:
            raise StateError(
                f"the update of offloaded states failed ({type(failure).__name__}: {failure}) after some units had "
                "been updated, so these weights belong to no step. Resume from the last checkpoint."
            ) from failure
        if self._torn or any(flat.updated_early for flat in self.flats):
            raise StateError(
                "an exception ended a backward pass after some units had been updated, so these weights belong to no "
                "step. Resume from the last checkpoint; with overlap_step=False on the strategy, updates begin only "
                "when backward is over."
            )

    def abort(self) -> None:
        """An exception ended a step: forget the gradients that were under way.

        Weights on their way are waited for, since all ranks sent them before; if that fails too, they are given up.
        """
        self.reducer.abort()
        self.schedule.forget_early()
        self._torn = self._torn or any(flat.updated_early for flat in self.flats)
        for flat in self.flats:
            flat.updated_early = False
        try:
            self.wait()
        except Exception:  # what ended the step matters more; and nothing may wait for this again
            for flat in self.flats:
                flat.give_up()

    @property
    def exposed_step_s(self) -> float:
        """Seconds so far that the training thread has spent on, or waited for, updates of offloaded states.

        The wait for gradients to reach the host, which a norm begins with, is among them.
        """
        inline = 0.0 if self.offload.stream.threaded else self.offload.stream.busy_s
        return self._exposed_before_s + inline + sum(flat.waited_s for flat in self.flats)

    def describe(self) -> str:
        """What this engine will do, for the log: the plan, who updates what, and where."""
        steps = [f"  {state.sharded.describe()}" for state in self.optimizers]
        return "\n".join([self.plan.describe(), *steps, *filter(None, [self.offload.describe(self.plan)])])

    def trainable_masters(self) -> list[Tensor]:
        """This rank's master shards of everything that trains, in the order of the units; copies of what is on NVMe.

        Not collective.
        """
        return [f.read_master() for u in self.units for f in u.trainable_flats]

    def exchange_masters(self, others: list[Tensor], *, publish: bool) -> None:
        """Swap the contents of `trainable_masters` with ``others``, in place; called twice, everything is as before.

        Args:
            others: one tensor of the same shape per master.
            publish: let the module's parameters follow. Collective then.
        """
        self.wait()
        for flat, other in zip([f for u in self.units for f in u.trainable_flats], others, strict=True):
            mine = flat.read_master().detach().clone()
            flat.write_master(0, other)
            other.copy_(mine)
            flat.refresh_due = flat.optimizer_tier != "device" or flat.has_own_shard
        if not publish:
            return
        if self.policy.parameters:
            self.gatherer.release_all()
        else:
            self.gatherer.publish([f for f in self.flats if f.trainable])
            self.wait()

    # reading ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[None]:
        """Inside, parameters are in full on every rank, all at once. Collective; takes their memory.

        Args:
            params: which; their neighbours in the flat buffers come along. Default: all.
            modify: what is written inside counts. Otherwise it is an error.

        Raises:
            StateError: on every rank, if any has written without ``modify``.
        """
        self.wait()
        wanted = None if params is None else {id(p) for p in params}
        flats = [f for f in self.flats if wanted is None or any(id(p) in wanted for p in f.params)]
        for flat in flats:
            self.lender.begin(flat)
        for flat in flats:
            self.lender.touch(flat)
        try:
            yield
            written = torch.tensor([any([flat.take_writes() for flat in flats])], dtype=torch.uint8)
            if not modify and self.mesh.world.agree(written).item():
                raise StateError(
                    "parameters were written to inside gathered_parameters(), which was opened for reading. Open it "
                    "with modify=True, on every rank, and write the same on all of them."
                )
        finally:
            for flat in flats:
                self.lender.touched(flat)
            self.settle()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state that this rank holds now, by kind. Not collective.

        ``parameters`` includes units that are gathered at the moment; ``gradients`` the fp32 averages and whatever
        ``p.grad`` holds; ``communication`` receive and staging buffers.
        """
        seen: set[int] = set()

        def size(*tensors: Tensor | None) -> int:
            total = 0
            for t in tensors:
                if t is not None and t.untyped_storage().nbytes() and t.untyped_storage().data_ptr() not in seen:
                    seen.add(t.untyped_storage().data_ptr())
                    total += t.untyped_storage().nbytes()
            return total

        return {
            "parameters": sum(size(f.full, f.shard) for f in self.flats),
            "masters": sum(size(f.master) for f in self.flats),
            "gradients": sum(size(f.grad, f.averages.values, *map(grad_of, f.params)) for f in self.flats),
            "optimizer": sum(s.sharded.state_bytes() for s in self.optimizers),
            "communication": sum(pool.bytes for pool in {f.comm.pool for f in self.flats} | {self.comm.pool}),
        }
