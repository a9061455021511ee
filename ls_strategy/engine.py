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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy import spans
from ls_strategy._compat import storage_key
from ls_strategy.config import LossScaleConfig, ZeROConfig
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.layout import TensorPart
from ls_strategy.loss_scale import LossScaler
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.zero import memory, regroup, setup, weights
from ls_strategy.zero.assembly import Draft
from ls_strategy.zero.copies import PlainCopies
from ls_strategy.zero.hooks import UnitHooks
from ls_strategy.zero.one_step import require_one_step
from ls_strategy.zero.parameters import unbind_home
from ls_strategy.zero.phase import OptimizerStep
from ls_strategy.zero.share import Share
from ls_strategy.zero.step import Stepper
from ls_strategy.zero.units import Flat
from ls_strategy.zero.unstepped import Unstepped
from ls_strategy.zero_stages import POLICIES

_HOLDERS: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()
"""Which engine holds a model's parameters. Engines hold no strong reference to their model, so entries end with it."""


class Engine:
    """One model's units, and what gathers, reduces and steps them.

    The facade of the core: one method per event of training, which the edge calls, and one attribute per part. That is
    why it has more public members than other classes.
    """

    early_step = False
    """Begin a unit's update as soon as its gradients are complete. Only where the step is certain to follow, with
    neither clipping nor a loss scale, and with the hyper-parameters of now."""

    _torn = False
    """Whether an exception ended a backward pass that had begun to update."""

    _exposed_before_s = 0.0
    """What `exposed_step_s` was when this engine went on from another one."""

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
        self.config, self.precision, self.mesh = config, precision, mesh
        self.share = share or Share()
        self.comm = comm = mesh.zero
        """The ranks over which states are divided and gradients averaged."""
        self.device = device
        # One rank has nothing to shard: every stage is stage 0 there, without gathers of its own parameters. With
        # offload the stage says what is on the device at all.
        self.policy = POLICIES[config.stage if comm.world_size > 1 or config.offload.any_state else 0]
        draft = self._agree_on_draft(model, optimizers, parts or {})
        previous = Engine.holding(model)
        if previous is not None:
            previous.detach()
        held = {} if previous is None else {id(p): f for f in previous.flats for p in f.params}
        sharded = setup.shard(draft, optimizers, mesh, device, held)
        self.plan, self.units, self.offload = sharded.plan, sharded.units, sharded.offload
        self.on_demand, self.gatherer, self.reducer = sharded.on_demand, sharded.gatherer, sharded.reducer
        scaler = LossScaler(loss_scale or LossScaleConfig()) if precision.loss_scaling else None
        self.stepper = Stepper(sharded, optimizers, scaler, None if previous is None else previous.stepper)
        if previous is not None:
            previous.offload.close()
        self.gradients, self.schedule = self.stepper.gradients, self.stepper.schedule
        self._unstepped = Unstepped([] if mesh.shape.kinds else self.flats, comm, lambda: self.gradients.local)
        self.reducer.reset()
        self.hooks = UnitHooks(self.units, self.gatherer, self.reducer, sharded=self.policy.parameters)
        self._boundaries = setup.fp32_boundaries(draft)
        self._broadcast_buffers_next = True
        self._copies = PlainCopies(model, self.flats)

        self.on_detach: list[Callable[[], None]] = []
        """Run when another engine takes the model over."""
        _HOLDERS[model] = self

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
        draft.agree(self.mesh.world)
        return draft

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

    @property
    def optimizers(self) -> list[OptimizerStep]:
        """Every optimizer, with what is known of its gradients."""
        return self.stepper.optimizers

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale, in the modes that have one."""
        return self.stepper.scaler

    @property
    def skipped_steps(self) -> int:
        """Steps that an overflow has skipped."""
        return self.stepper.skipped_steps

    @property
    def keeps_gradients(self) -> bool:
        """Ignore `zero_grad`: the gradients are those of the step to come."""
        return self.stepper.keeps_gradients

    @keeps_gradients.setter
    def keeps_gradients(self, keeps: bool) -> None:
        self.stepper.keeps_gradients = keeps

    def index_of(self, optimizer: Optimizer) -> int | None:
        """Number of an optimizer of this engine, None for a stranger. Not collective."""
        return self.stepper.index_of(optimizer)

    def mirror_requires_grad(self) -> None:
        """Copy ``requires_grad`` to the parameters from pieces that stand for them in groups. Not collective."""
        regroup.mirror_requires_grad(self.stepper)

    # parameters that join in the middle of a fit ---------------------------------------------------------------------

    def follows(self, optimizers: list[Optimizer]) -> bool:
        """Whether these are the engine's optimizers, with the groups that it knows. Not collective; microseconds."""
        return regroup.follows(self.stepper, optimizers)

    def check_change(self, optimizers: list[Optimizer]) -> None:
        """Refuse changes of groups that another engine could not follow. Not collective: the same on all ranks."""
        regroup.check_change(self.stepper, optimizers, self.mesh.shape.kinds)

    def go_on_from(self, previous: Engine) -> None:
        """Go on in the middle of a fit where an earlier engine of the model has stopped. Collective."""
        self._broadcast_buffers_next = previous._broadcast_buffers_next
        self._exposed_before_s = previous.exposed_step_s
        self.stepper.go_on_from(previous.stepper)

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
            flat.on_demand = flat.gradients = None
            for p in () if self.policy.parameters else flat.params:
                unbind_home(p)

    # forward ---------------------------------------------------------------------------------------------------------

    def begin_step(self, *, sync_buffers_after: bool = False) -> None:
        """A training, validation, test or predict step begins.

        Args:
            sync_buffers_after: whether the step after this one starts by taking rank 0's buffers; DDP does so after
                every forward whose backward synchronises.
        """
        self.on_demand.thread = threading.get_ident()
        self.on_demand.write_back()
        self.gatherer.fetch_root()
        if self._broadcast_buffers_next:
            setup.broadcast_buffers(self.model, self.comm)
        self._broadcast_buffers_next = sync_buffers_after

    def end_forward(self) -> None:
        """The step's forward is over. Not collective."""
        self.on_demand.write_back()
        self.gatherer.end_forward()

    def wait(self) -> None:
        """Wait until every parameter that is on its way has arrived: before anything but a unit's forward reads one.

        Collective where updates are delayed.
        """
        for index in range(len(self.optimizers)):
            self.schedule.bring_in_delayed(index)
        self.gatherer.finish_all()
        self.on_demand.write_back()

    # backward --------------------------------------------------------------------------------------------------------

    def begin_backward(self, *, eager: bool) -> None:
        """A backward pass begins. ``eager``: it is the last one before the step, so send what it completes.

        Hooks after the step may read gradients, which an early update takes. So the first step updates nothing early,
        and if user code has read any gradient since, no later step does.
        """
        spans.enter(spans.BACKWARD)
        self.stepper.begin_backward()
        self._unstepped.outdate()
        early = self.early_step and eager and self.scaler is None and self.schedule.allows_early
        early = early and not self.gradients.were_read
        early = early and all(map(self.stepper.is_private, self.optimizers))
        self.reducer.on_complete = None  # what an earlier micro-batch left under way is not complete
        self.reducer.begin_backward(eager=eager, loss_scale=self.scaler.scale if self.scaler is not None else 1.0)
        if early:
            self.reducer.on_complete = self.schedule.begin_early if self.stepper.has_stepped else self.schedule.postpone

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
            unit.unpin()
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
            unit.pin()

    def end_micro_batches(self, *, reduce: bool) -> None:
        """They are over. ``reduce``: send what no pass has sent; collective then."""
        if reduce:
            self.reducer.send_held()
            self.stepper.owe_tied()
        self.reducer.holds = False
        self._let_go()

    # step ------------------------------------------------------------------------------------------------------------

    def finish(self, index: int) -> bool:
        """Complete an optimizer's averaged gradients; return whether it may step, the same on every rank."""
        return self.stepper.finish(index)

    def clip_norm_(self, index: int, max_norm: float) -> Tensor:
        """Clip by global norm over all gradients of the optimizer, exactly; returns the norm before clipping."""
        return self.stepper.clip_norm_(index, max_norm)

    def clip_value_(self, index: int, limit: float) -> None:
        """Clamp every averaged gradient element of the optimizer."""
        self.stepper.clip_value_(index, limit)

    def grad_norm(self, index: int | None = None, norm_type: float = 2.0) -> Tensor:
        """Global norm of the averaged gradients, before clipping: of one optimizer, or of all together."""
        return self.stepper.grad_norm(index, norm_type)

    def step(self, index: int, run: Callable[[], Any]) -> Any:
        """Let an optimizer update its master shards by calling ``run``, then bring the weights where they are read."""
        return self.stepper.step(index, run)

    def zero_grad(self, index: int, *, set_to_none: bool = True) -> None:
        """``optimizer.zero_grad``. Not collective, unless a reduction is in flight (then on every rank)."""
        self.stepper.zero_grad(index, set_to_none=set_to_none)

    def zero_params(self, params: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Drop averaged gradients of some parameters, as ``module.zero_grad()`` means it. Not collective."""
        self.stepper.zero_params(params, set_to_none=set_to_none)

    def check_whole(self) -> None:
        """Refuse to hand out weights of which some have taken a step that the others have not. Not collective.

        Raises:
            StateError: an exception ended a backward pass that had begun to update, or an update failed.
        """
        require_one_step(self.flats, torn=self._torn, failure=self.offload.stream.error)

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
            flat.exchange_master(other)
        if publish and self.policy.parameters:
            self.gatherer.release_all()
        elif publish:
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
        with self.on_demand.all_gathered(flats, self.mesh.world, modify=modify):
            yield

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state that this rank holds now, by kind. Not collective.

        ``parameters`` includes units that are gathered at the moment; ``gradients`` the fp32 averages and whatever
        ``p.grad`` holds; ``communication`` receive and staging buffers.
        """
        pools = {f.comm.pool for f in self.flats} | {self.comm.pool}
        return memory.memory_bytes(self.flats, self.optimizers, pools)
