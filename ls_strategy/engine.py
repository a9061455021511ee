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

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.comm import Comm
from ls_strategy.config import LossScaleConfig, ZeROConfig
from ls_strategy.errors import StateError
from ls_strategy.precision import LossScaler, PrecisionPolicy
from ls_strategy.zero import materialize as materials
from ls_strategy.zero import step as stepping
from ls_strategy.zero.assembly import Draft
from ls_strategy.zero.gather import Gatherer
from ls_strategy.zero.hooks import UnitHooks
from ls_strategy.zero.optimizer import ShardedOptimizer
from ls_strategy.zero.reduce import Reducer
from ls_strategy.zero.units import Flat
from ls_strategy.zero_stages import POLICIES

_HOLDERS: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()
"""Which engine holds a model's parameters. Engines hold no strong reference to their model, so entries end with it."""


@dataclass
class _OptimizerState:
    """What the engine remembers of one optimizer between backward and step."""

    sharded: ShardedOptimizer
    flats: list[Flat]
    used: list[bool] = field(default_factory=list)
    finished: bool = False
    overflow: bool = False
    norm: Tensor | None = None


class Engine:
    """Units, gatherer, reducer and sharded optimizers of one model."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        *,
        config: ZeROConfig,
        precision: PrecisionPolicy,
        comm: Comm,
        device: torch.device,
        loss_scale: LossScaleConfig | None = None,
    ) -> None:
        """Take over the model's parameters and the optimizers' groups, from an earlier engine too. Collective.

        Args:
            model: parameters may be on any device, also on meta (then modules fill them by ``reset_parameters``).
            optimizers: built on the model's parameters. Empty for evaluation.
            config: options.
            precision: dtypes.
            comm: the data-parallel ranks.
            device: where the buffers live.
            loss_scale: knobs of the loss scale, for the modes that have one.

        Raises:
            PlanError: model, optimizers and options do not fit together; on every rank, before anything is moved.
        """
        self._model = weakref.ref(model)
        self.config = config
        self.precision = precision
        self.comm = comm
        self.device = device
        # One rank has nothing to shard: every stage is stage 0 there, without gathers of its own parameters.
        self.policy = POLICIES[config.stage if comm.world_size > 1 else 0]
        self.scaler = LossScaler(loss_scale or LossScaleConfig()) if precision.loss_scaling else None
        self.skipped_steps = 0
        self.overlap_publish = False
        """Let the next forward wait for new weights unit by unit. Only where nothing else reads them in between."""
        self._stepping = False
        draft = Draft(model, optimizers, config=config, precision=precision, policy=self.policy)
        draft.agree(comm)
        previous = Engine.holding(model)
        if previous is not None:
            previous.detach()
        held = {} if previous is None else {id(p): f for f in previous.flats for p in f.params}
        self.plan = draft.resolve(comm.world_size, held)
        self.units = draft.build(self.plan, comm, device, held)
        materials.place_buffers(model, device, precision.compute, {id(m) for m in draft.kept_fp32})
        self.gatherer = Gatherer(self.units, sharded=self.policy.parameters, prefetch_units=config.prefetch_units)
        self.reducer = Reducer(
            self.units, policy=self.policy, comm=comm, reduce_in_fp32=precision.reduce_in_fp32
        )  # fmt: skip
        self.reducer.selective = len(optimizers) > 1
        self.optimizers = [self._adopt(i, optimizer) for i, optimizer in enumerate(optimizers)]
        self.reducer.reset()
        self.hooks = UnitHooks(self.units, self.gatherer, self.reducer, sharded=self.policy.parameters)
        self._boundaries = [
            materials.Fp32Boundary(m, precision.compute)
            for m in draft.kept_fp32
            if precision.compute != torch.float32 and type(m).__name__ in config.fp32_modules
        ]
        self._broadcast_buffers_next = True

        self.on_detach: list[Callable[[], None]] = []
        """Run when another engine takes the model over."""
        _HOLDERS[model] = self

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

    def _adopt(self, index: int, optimizer: Optimizer) -> _OptimizerState:
        flats = [f for f in self.flats if f.optimizer_index == index]
        state = _OptimizerState(ShardedOptimizer(optimizer, flats, self.comm), flats)
        optimizer.register_step_pre_hook(self._refuse_direct_step)
        optimizer.zero_grad = lambda set_to_none=True: self.zero_grad(index, set_to_none=set_to_none)  # type: ignore[method-assign]
        return state

    def _refuse_direct_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepping:
            raise StateError(
                f"{type(optimizer).__name__}.step() was called on the bare optimizer, which knows nothing of the other "
                "ranks' gradients. Call step() on what self.optimizers() returns."
            )

    def index_of(self, optimizer: Optimizer) -> int | None:
        """Number of an optimizer of this engine, None for a stranger. Not collective."""
        for i, state in enumerate(self.optimizers):
            if state.sharded.optimizer is optimizer:
                return i
        return None

    def mirror_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the optimizers' pieces to the parameters. Not collective."""
        for state in self.optimizers:
            params = [p for f in state.flats for p in f.params]
            for piece, p in zip(state.sharded.pieces, params, strict=True):
                p.requires_grad_(piece.requires_grad)

    @property
    def flats(self) -> list[Flat]:
        """Every flat buffer, in order of the units."""
        return [f for u in self.units for f in u.flats]

    def detach(self) -> None:
        """Remove every hook; the buffers stay."""
        self.reducer.finish_in_flight()
        self.wait()
        self.hooks.detach()
        for boundary in self._boundaries:
            boundary.remove()
        for callback in self.on_detach:
            callback()
        self.on_detach.clear()

    # forward ---------------------------------------------------------------------------------------------------------

    def begin_step(self, *, sync_buffers_after: bool = False) -> None:
        """A training, validation, test or predict step begins.

        Args:
            sync_buffers_after: whether the step after this one starts by taking rank 0's buffers; DDP does so after
                every forward whose backward synchronises.
        """
        self.gatherer.fetch_root()
        if self._broadcast_buffers_next:
            self._broadcast_buffers()
        self._broadcast_buffers_next = sync_buffers_after

    def end_forward(self) -> None:
        """The step's forward is over. Not collective."""
        self.gatherer.end_forward()

    def _broadcast_buffers(self) -> None:
        if self.comm.world_size == 1:
            return
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in self.model.buffers():
            if buffer.numel():
                by_dtype[buffer.dtype].append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([b.detach().reshape(-1) for b in buffers])
            self.comm.broadcast_(flat)
            if self.comm.rank != 0:
                for b, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    b.detach().copy_(part.view_as(b))

    def wait(self) -> None:
        """Wait until every parameter that is on its way has arrived: before anything but a unit's forward reads one."""
        self.gatherer.finish_all()

    # backward --------------------------------------------------------------------------------------------------------

    def begin_backward(self, *, eager: bool) -> None:
        """A backward pass begins. ``eager``: it is the last one before the step, so send what it completes."""
        for state in self.optimizers:
            state.finished = False
            state.norm = None
        self.reducer.loss_scale = self.scaler.scale if self.scaler is not None else 1.0
        self.reducer.begin_backward(eager=eager)

    def end_backward(self) -> None:
        """The backward pass is over."""
        self.reducer.end_backward()
        for unit in self.units:
            unit.open_backwards = unit.unclosable_backwards = 0
            unit.pinned = False
            if not unit.is_root:
                self.gatherer.release(unit)

    def finish(self, index: int) -> bool:
        """Make the averaged, unscaled gradients of an optimizer complete and visible as ``.grad`` of its pieces.

        Returns:
            Whether the optimizer may step; False after an overflow, the same on every rank.
        """
        state = self.optimizers[index]
        if state.finished:
            return not state.overflow
        state.used = self.reducer.complete(state.flats)
        state.overflow = False
        if self.scaler is not None:
            state.overflow = stepping.any_overflow(state.flats, self.comm)
            for flat in state.flats:
                if not flat.unscaled:
                    stepping.unscale_([flat], self.scaler.scale)
                    flat.unscaled = True
        state.sharded.bind_grads(state.used)
        state.finished = True
        return not state.overflow

    def clip_norm_(self, index: int, max_norm: float) -> Tensor:
        """Clip by global norm over all gradients of the optimizer, exactly; returns the norm before clipping."""
        self.finish(index)
        state = self.optimizers[index]
        state.norm = stepping.clip_norm_(state.flats, self.comm, max_norm)
        return state.norm

    def clip_value_(self, index: int, limit: float) -> None:
        """Clamp every averaged gradient element of the optimizer."""
        self.finish(index)
        stepping.clip_value_(self.optimizers[index].flats, limit)

    def grad_norm(self, index: int | None = None, norm_type: float = 2.0) -> Tensor:
        """Global norm of the averaged gradients, before clipping: of one optimizer, or of all together.

        Raises:
            StateError: there are no gradients: call between backward and the next ``zero_grad``.
        """
        states = self.optimizers if index is None else [self.optimizers[index]]
        if len(states) == 1 and norm_type == 2.0 and states[0].norm is not None:
            return states[0].norm
        for i, state in enumerate(self.optimizers):
            if state in states:
                self.finish(i)
        if not any(any(s.used) for s in states):
            raise StateError("no gradient to take the norm of: call between backward and the next zero_grad().")
        norm = stepping.global_norm([f for s in states for f in s.flats], self.comm, norm_type)
        if len(states) == 1 and norm_type == 2.0:
            states[0].norm = norm
        return norm

    # step ------------------------------------------------------------------------------------------------------------

    def step(self, index: int, run: Callable[[], Any]) -> Any:
        """Let the optimizer update its master shards by calling ``run``, then bring the weights where they are read.

        After an overflow nothing is updated on any rank, and the step is counted in ``skipped_steps``.
        """
        proceed = self.finish(index)
        state = self.optimizers[index]
        result = None
        if proceed:
            self._stepping = True
            try:
                result = state.sharded.step(state.used, run)
            finally:
                self._stepping = False
            if self.policy.parameters:
                self.gatherer.release_all()
            else:
                self.gatherer.publish(
                    [u for u in self.units if any(f.optimizer_index == index for f in u.flats)], index
                )
                if not self.overlap_publish:
                    self.wait()
        else:
            self.skipped_steps += 1
        if self.scaler is not None:
            self.scaler.update(state.overflow)
        state.finished = False
        return result

    def zero_grad(self, index: int, *, set_to_none: bool = True) -> None:
        """``optimizer.zero_grad``. Not collective, unless a reduction is under way (then on every rank)."""
        state = self.optimizers[index]
        state.finished = False
        state.norm = None
        self.reducer.zero_grad(state.flats, set_to_none=set_to_none)
        for piece in state.sharded.pieces:
            if set_to_none:
                piece.grad = None

    def zero_params(self, params: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
        """Drop averaged gradients of some parameters, as ``module.zero_grad()`` means it. Not collective."""
        wanted = {id(p) for p in params}
        self.reducer.zero_params([f for f in self.flats if f.trainable], wanted, set_to_none=set_to_none)
        for state in self.optimizers:
            state.finished = False
            state.norm = None

    def abort(self) -> None:
        """An exception ended a step: forget the gradients that were under way.

        Weights on their way are waited for, since all ranks sent them before; if that fails too, they are given up.
        """
        self.reducer.abort()
        try:
            self.wait()
        except RuntimeError:
            for flat in self.flats:
                flat.gathering = None

    def trainable_masters(self) -> list[Tensor]:
        """This rank's master shards of everything that trains, in the order of the units. Not collective."""
        return [f.master for u in self.units for f in u.trainable_flats]

    def exchange_masters(self, others: list[Tensor], *, publish: bool) -> None:
        """Swap the contents of `trainable_masters` with ``others``, in place; called twice, everything is as before.

        Args:
            others: one tensor of the same shape per master.
            publish: let the module's parameters follow. Collective then.
        """
        self.wait()
        for master, other in zip(self.trainable_masters(), others, strict=True):
            mine = master.detach().clone()
            master.detach().copy_(other)
            other.copy_(mine)
        if not publish:
            return
        if self.policy.parameters:
            self.gatherer.release_all()
        else:
            for index in range(len(self.optimizers)):
                self.gatherer.publish(self.units, index)
            self.wait()

    # reading ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters in full on every rank, for reading. Collective; takes the whole model's memory."""
        self.wait()
        if self.policy.parameters:
            for unit in self.units:
                self.gatherer.start(unit)
            self.wait()
        try:
            yield
        finally:
            self.gatherer.release_all()

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
            "parameters": sum(size(f.full) for f in self.flats),
            "masters": sum(size(f.master) for f in self.flats),
            "gradients": sum(size(f.grad, f.reduced, *(p.grad for p in f.params)) for f in self.flats),
            "optimizer": sum(s.sharded.state_bytes() for s in self.optimizers),
            "communication": self.comm.pool.bytes,
        }
