"""The engine runs one training step from end to end, without Lightning.

::

    begin_step      gather the root units; broadcast buffers as DDP does
    (forward)       hooks gather and release units
    begin_backward
    (backward)      hooks hand gradients to the reducer, which sends them unit by unit
    end_backward    send the remaining units
    finish          wait, agree on which parameters have gradients, unscale, check for overflow
    clip_norm_      or clip_value_
    step            the user's optimizer on the master shards; then publish (stages 0 to 2) or release (stage 3)

Every method is collective unless its docstring says otherwise: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy import spans
from ls_strategy._torch import inside_compiled, storage_key
from ls_strategy.config import LossScaleConfig, ZeROConfig
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.layout import TensorPart
from ls_strategy.loss_scale import LossScaler
from ls_strategy.plan import Plan
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.zero import memory
from ls_strategy.zero.events import StepEvents
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import unbind_home, unnoticed
from ls_strategy.zero.flat.states import EARLY
from ls_strategy.zero.passes.hooks import UnitHooks
from ls_strategy.zero.setup import weights
from ls_strategy.zero.setup.assembly import Draft
from ls_strategy.zero.setup.materialize import Fp32Boundary, refused_buffer
from ls_strategy.zero.setup.shard import shard
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero.state_offload import StateOffload
from ls_strategy.zero.step.elementwise import refused_gathers
from ls_strategy.zero.step.stepper import Stepper, require_one_step
from ls_strategy.zero.user_code.copies import PlainCopies
from ls_strategy.zero.user_code.optimizer_state import showing_no_states
from ls_strategy.zero.user_code.unstepped import Unstepped
from ls_strategy.zero_stages import policy_of

_HOLDERS: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()
"""The engine of each model. Engines hold no strong reference to their model, so an entry is removed with its model."""


class Engine:
    """The units of one model, and the objects that gather, reduce and step them.

    This class is the facade of the core. It has one method per event of training, so more than 20 public members.
    """

    early_step = False
    """Begin a unit's update as soon as its gradients are complete. Set this only if the step is certain to follow,
    without clipping or a loss scale, and with the current hyper-parameters."""

    _torn = False
    """Whether an exception ended a backward pass after it had begun to update."""

    _exposed_before_s = 0.0
    """`exposed_step_s` of the engine that this one continues."""

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
        """Shard the model's parameters and adopt the optimizers, also from an earlier engine. Collective.

        Args:
            model: its parameters may be on any device. Modules fill meta parameters by ``reset_parameters``.
            optimizers: hold the model's parameters. Empty for evaluation.
            config: the options.
            precision: the dtypes.
            mesh: the process groups.
            device: of the buffers.
            loss_scale: settings of the loss scale, for precisions that use one.
            parts: ``id(parameter)`` -> this rank's part of a tensor- or expert-parallel parameter.
            share: this pipeline stage's share of the parameters.

        Raises:
            PlanError: model, optimizers and options do not fit together. Raised on every rank, before anything moves.
        """
        self._model = weakref.ref(model)
        self.config, self.precision, self.mesh = config, precision, mesh
        self.share = share or Share()
        self.comm = comm = mesh.zero
        """The ranks over which states are sharded and gradients averaged."""
        self.device = device
        self.policy = policy_of(config, comm.world_size)
        scaler = None
        if precision.loss_scaling:  # under DDP, 16-mixed has a loss scale and 16-true has none
            scaler = LossScaler(loss_scale or LossScaleConfig(), is_shown=precision.autocast is not None)
        draft = self._take_over(model, optimizers, parts or {}, scaler)
        self._subscribe_features()
        self.reducer.reset()
        nested = inside_compiled(model)
        self.hooks = UnitHooks(self.units, self.gatherer, self.reducer, sharded=self.gatherer.releases, nested=nested)
        self.hooks.watch_rows(self.flats)
        self._boundaries = [Fp32Boundary(module, precision.compute) for module in draft.kept.bounded]
        self._broadcast_buffers_next = True
        self.repeats_backward = True
        """Whether user code may run several backward passes between two steps."""
        self._copies = PlainCopies(model, self.flats)

        self.raw_states: Callable[[], AbstractContextManager[Any]] = unnoticed
        """Context in which ``state_dict()`` of a module gathers nothing."""

        self.on_detach: list[Callable[[], None]] = []
        """Callbacks that run when another engine adopts the model."""
        _HOLDERS[model] = self

    def _take_over(
        self, model: nn.Module, optimizers: list[Optimizer], parts: Mapping[int, TensorPart], scaler: LossScaler | None
    ) -> Draft:
        """Shard the parameters and adopt the optimizers, from the engine that holds them if there is one."""
        previous = Engine.holding(model)
        if previous is not None:
            previous.stepper.take_replaced_states()
        with showing_no_states(optimizers):
            draft = self._agree_on_draft(model, optimizers, parts)
        if previous is not None:
            previous.detach()
        held = {} if previous is None else {id(p): f for f in previous.flats for p in f.params}
        sharded = shard(draft, optimizers, self.mesh, self.device, held)
        self._planned, self.units, self.offload = sharded.plan, sharded.units, sharded.offload
        self.on_demand, self.gatherer, self.reducer = sharded.on_demand, sharded.gatherer, sharded.reducer
        self.events = StepEvents()
        self.events.after_user_code.subscribe(self.on_demand.write_back)
        before = None if previous is None else previous.stepper
        with showing_no_states(optimizers):
            self.stepper = Stepper(sharded, optimizers, scaler, self.events, before)
        if previous is not None:
            previous.offload.close()
        stepper = self.stepper  # let this facade have what is its alone, see there
        self.gradients, self.schedule = stepper.gradients, stepper.schedule
        self.optimizers = stepper.optimizers
        """The optimizers with the phase of their gradients."""
        self.index_of, self.follows, self.mirror_requires_grad = (
            stepper.index_of, stepper.follows, stepper.mirror_requires_grad,
        )  # fmt: skip
        self.finish, self.step = stepper.finish, stepper.step
        self.clip_norm_, self.clip_value_, self.grad_norm = stepper.clip_norm_, stepper.clip_value_, stepper.grad_norm
        self.zero_grad, self.zero_params = stepper.zero_grad, stepper.zero_params
        return draft

    def _subscribe_features(self) -> None:
        """Let the features of a step that are on take part in its events; the optimizers' own have subscribed."""
        self.state_offload = StateOffload(self.flats, self.stepper, self.gatherer, self.offload.link, self.events)
        flats = [] if self.mesh.shape.kinds else self.flats
        unstepped = Unstepped(flats, self.comm, lambda: self.gradients.local)
        if unstepped.provides:
            self.events.on_backward_begin.subscribe(unstepped.outdate)

    def _agree_on_draft(self, model: nn.Module, optimizers: list[Optimizer], parts: Mapping[int, TensorPart]) -> Draft:
        draft = Draft(
            model,
            optimizers,
            config=self.config,
            precision=self.precision,
            policy=self.policy,
            parts=parts,
            share=self.share,
        )
        draft.refuse(weights.refusal(self.config.sharding.rank_weights, self.mesh.shape))
        if self.mesh.world.world_size > 1:
            draft.refuse(refused_buffer(model))
            draft.refuse(None if self.comm.native or self.policy.optimizer else refused_gathers(optimizers))
        draft.agree(self.mesh.world)
        return draft

    @property
    def model(self) -> nn.Module:
        """Return the model."""
        model = self._model()
        assert model is not None
        return model

    @staticmethod
    def holding(model: nn.Module) -> Engine | None:
        """Return the engine that holds a model's parameters now, also after a fit and under another strategy object."""
        return _HOLDERS.get(model)

    # set-up ----------------------------------------------------------------------------------------------------------

    @property
    def private_gradients(self) -> bool:
        """Return whether user code reads averaged gradients only through ``p.grad``, between backward and `zero_grad`.

        If so, they are not exposed as ``.grad`` of pieces, and may be stored in 16 bits where that is exact. The update
        applies loss scale and clip factor, unless ``p.grad`` is read first: then they are applied at that time.
        """
        return self.reducer.private

    @private_gradients.setter
    def private_gradients(self, private: bool) -> None:
        self.reducer.private = private

    @property
    def scaler(self) -> LossScaler | None:
        """Return the loss scaler, or None for precisions without a loss scale."""
        return self.stepper.scaler

    @property
    def skipped_steps(self) -> int:
        """Return the number of steps that an overflow has skipped."""
        return self.stepper.skipped_steps

    @property
    def keeps_gradients(self) -> bool:
        """Return whether `zero_grad` is ignored because the next step still needs the gradients."""
        return self.stepper.keeps_gradients

    @keeps_gradients.setter
    def keeps_gradients(self, keeps: bool) -> None:
        self.stepper.keeps_gradients = keeps

    # parameters that are added during a fit ---------------------------------------------------------------------------

    def check_change(self, optimizers: list[Optimizer]) -> None:
        """Refuse changes of groups that another engine could not adopt. Not collective; equal on all ranks."""
        self.stepper.check_change(optimizers, self.mesh.shape.kinds)

    def go_on_from(self, previous: Engine) -> None:
        """Continue in the middle of a fit from an earlier engine of the model. Collective."""
        self._broadcast_buffers_next = previous._broadcast_buffers_next
        self._exposed_before_s = previous.exposed_step_s
        self.stepper.go_on_from(previous.stepper)

    @property
    def plan(self) -> Plan:
        """Return the plan, with the states that unfrozen buffers have now."""
        return self._planned.with_flats(f.plan for f in self.flats)

    @property
    def flats(self) -> list[FlatBuffer]:
        """Return every flat buffer, in order of the units."""
        return [f for u in self.units for f in u.flats]

    def storages(self) -> set[int]:
        """Return the storage keys of parameters: tensors that autograd saves there are not activations. Local."""
        read = [flat.wire.values for flat in self.flats if flat.wire is not None and flat.wire.keeps]
        return {storage_key(values) for values in (*(flat.full for flat in self.flats), *read)}

    @property
    def pools(self) -> set[BufferPool]:
        """Return the pools of buffers of all process groups."""
        return {flat.comm.pool for flat in self.flats} | {self.comm.pool}

    def detach(self) -> None:
        """Remove every hook; keep the buffers."""
        self.state_offload.reload()
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
            flat.end_showing()
            for p in flat.params if flat.resident else ():
                unbind_home(p)
        for pool in self.pools:
            pool.gathers.clear()

    # forward ---------------------------------------------------------------------------------------------------------

    def begin_step(self, *, sync_buffers_after: bool = False) -> None:
        """Begin a training, validation, test or predict step.

        Args:
            sync_buffers_after: whether the next step starts by broadcasting rank 0's buffers. DDP does so after every
                forward with a synchronizing backward.
        """
        self.on_demand.thread = threading.get_ident()
        self.events.after_user_code()
        self.events.on_step_begin()
        self.gatherer.fetch_root()
        if self._broadcast_buffers_next:
            self.broadcast_buffers()
        self._broadcast_buffers_next = sync_buffers_after

    def broadcast_buffers(self, source: int = 0) -> None:
        """Broadcast the module buffers of a rank: rank 0's, as DDP does before a forward. Collective."""
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in self.model.buffers() if self.comm.world_size > 1 else ():
            if buffer.numel() and not buffer.is_meta:
                by_dtype[buffer.dtype].append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([b.detach().reshape(-1) for b in buffers])
            self.comm.broadcast_(flat, source)
            if self.comm.rank != source:
                for b, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    b.detach().copy_(part.view_as(b))

    def end_forward(self) -> None:
        """End the step's forward. Not collective."""
        self.events.after_user_code()
        self.gatherer.end_forward()

    def wait(self) -> None:
        """Wait until every parameter in flight has arrived. Call this before anything but a unit's forward reads one.

        Collective if updates are delayed.
        """
        for index in range(len(self.optimizers)):
            self.schedule.bring_in_delayed(index)
        self.gatherer.finish_all()
        self.events.after_user_code()

    # backward --------------------------------------------------------------------------------------------------------

    def begin_backward(self, *, eager: bool, counts: bool = True) -> None:
        """Begin a backward pass. ``eager``: it is the last one before the step, so send what it completes.

        ``counts``: whether this rank's gradients of it count; else it only takes part in the collectives.

        An early update consumes gradients that hooks after the step may read. So the first step updates nothing early,
        nor does any step after user code has read a gradient.
        """
        self.events.before_read("parameters", "gradients")
        if self.on_demand.state_dict_copies.fresh:
            self.on_demand.take_copies_early()
        if self.gatherer.stepped:
            self.gatherer.fetch_root_again()
        if spans.SpanRecorder.active is not None:
            spans.enter(spans.BACKWARD)
        self.events.on_backward_begin()
        self.stepper.begin_backward()
        scaler = self.stepper.scaler
        early = self.early_step and eager and scaler is None and self.schedule.allows_early
        early = early and not self.gradients.were_read
        early = early and self.stepper.all_private()
        self.reducer.on_complete = None  # buffers of an earlier micro-batch in flight are not complete
        scale = scaler.scale if scaler is not None else 1.0
        self.reducer.begin_backward(eager=eager, loss_scale=scale, counts=counts)
        if early:
            begin, spill = self.schedule.begin_early, lambda flat: flat.averages.spill()
            self.reducer.on_complete = begin if self.stepper.has_stepped else spill

    def end_backward(self, *, local: bool = False) -> None:
        """End the backward pass. ``local``: more passes follow before gradients are averaged (stages 0 and 1)."""
        self.reducer.end_backward()
        self.gradients.local = local and not self.policy.gradients
        self.gradients.averaged = self.reducer.eager
        if self.gatherer.releases and not self.reducer.holds:
            self._let_go()
        if spans.SpanRecorder.active is not None:
            spans.leave(spans.BACKWARD)

    def _let_go(self) -> None:
        for unit in self.units if self.gatherer.releases else ():
            unit.unpin(repeats=self.repeats_backward)
            if not unit.is_root:
                self.gatherer.release(unit)

    # pipeline --------------------------------------------------------------------------------------------------------

    def begin_micro_batches(self) -> None:
        """Begin the forwards and backwards of several micro-batches. `begin_backward` begins each backward.

        Gradients accumulate on this rank until the ``eager`` pass, or until `end_micro_batches`. At stage 3, units are
        gathered once and stay until then.
        """
        self.reducer.holds = True
        for unit in self.units:
            unit.pin()

    def end_micro_batches(self, *, reduce: bool) -> None:
        """End the micro-batches. ``reduce``: send the gradients that no pass has sent; collective then."""
        if reduce:
            self.reducer.send_held()
            self.stepper.owe_tied()
        self.reducer.holds = False
        self._let_go()

    # step ------------------------------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Refuse to return weights if only some of them have taken the last step. Not collective.

        Raises:
            StateError: an exception ended a backward pass after it had begun to update, or an update failed. Or the
                states are offloaded between two steps.
        """
        self.events.before_read()
        require_one_step(self.flats, torn=self._torn, failure=self.offload.stream.error)

    def abort(self) -> None:
        """Forget the gradients in flight, after an exception has ended a step.

        Wait for weights in flight, since all ranks have sent them. If that fails too, give them up.
        """
        self.reducer.abort()
        self.schedule.forget_early()
        self._torn = self._torn or any(flat.update in EARLY for flat in self.flats)
        for flat in self.flats:
            flat.end_early()
        try:
            self.wait()
        except Exception:  # the first exception matters more, and nothing may wait for this again
            for flat in self.flats:
                flat.give_up()

    @property
    def exposed_step_s(self) -> float:
        """Return the seconds that the training thread has spent on, or waited for, updates of offloaded states.

        This includes the wait for gradients to reach the host before a norm is computed.
        """
        inline = 0.0 if self.offload.stream.threaded else self.offload.stream.busy_s
        return self._exposed_before_s + inline + sum(flat.waited_s for flat in self.flats)

    def describe(self) -> str:
        """Return the plan and the kind of every optimizer's update, for the log."""
        steps = [f"  {state.sharded.describe()}" for state in self.optimizers]
        stored = [state.sharded.bytes_per_element for state in self.optimizers]
        return "\n".join([self.plan.describe(stored), *steps, *filter(None, [self.offload.describe(self.plan)])])

    def trainable_masters(self) -> list[Tensor]:
        """Return this rank's trainable master shards in the units' order; copies of those on NVMe. Not collective."""
        return [flat.read_master() for flat in self.stepper.flats_that_train]

    # reading ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, params: Iterable[nn.Parameter] | None = None, *, modify: bool = False) -> Iterator[None]:
        """Hold full parameters on every rank inside the context, all at once. Collective.

        Inside, forwards of units that are held completely send nothing, so ranks may run different numbers of them.

        Args:
            params: the parameters, of this pipeline stage; all in their flat buffers are gathered too. Default: all.
            modify: keep what is written inside. Otherwise writing is an error.

        Raises:
            StateError: a rank has written without ``modify``. Raised on every rank.
        """
        self.wait()
        wanted = None if params is None else {id(p) for p in params}
        flats = [f for f in self.flats if wanted is None or any(id(p) in wanted for p in f.params)]
        with self.gatherer.keeping(flats), self.on_demand.all_gathered(flats, self.mesh.world, modify=modify):
            yield

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of model state that this rank holds now, by kind. Not collective.

        ``gathered`` are the full parameters of units that are gathered now (stage 3), ``gradients`` include the fp32
        averages and ``p.grad``, and ``communication`` are the receive and staging buffers.
        """
        return memory.memory_bytes(self.flats, self.optimizers, self.pools)
