"""One module that a Fabric has set up: its engine, and what surrounds its forward, backward and steps.

::

    model(batch)              `Shell.forward`: `Engine.begin_step`, the user's forward, `Engine.end_forward`
    fabric.backward(loss)     `Model.begin_backward`, autograd, `Model.end_backward`
    fabric.clip_gradients()   `Engine.clip_norm_` or `Engine.clip_value_`
    optimizer.step()          `Model.step`: closure, `Engine.finish`, `Engine.step`

Every method is collective unless its docstring says otherwise: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy._torch import run_step_pre_hooks, without_step_pre_hooks
from ls_strategy.checkpoint.full import StateDictHooks
from ls_strategy.config import ZeROConfig
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError
from ls_strategy.host.fabric import rank_zero_info
from ls_strategy.lightning import guards
from ls_strategy.lightning.activation_memory import ActivationMemory
from ls_strategy.lightning.parallel import ModelParallel
from ls_strategy.lightning.precision import Result, ZeROPrecision
from ls_strategy.zero.flat.parameters import unnoticed


class Model:
    """A module, its optimizers and their engine."""

    def __init__(
        self,
        config: ZeROConfig,
        parallel: ModelParallel,
        precision: ZeROPrecision,
        module: nn.Module,
        optimizers: list[Optimizer],
    ) -> None:
        """Shard the module. Collective.

        Args:
            config: every option.
            parallel: connects the ranks.
            precision: the plugin.
            module: the user's, whose parameters become sharded.
            optimizers: of these parameters.

        Raises:
            PlanError: module, optimizers and options do not fit together, on every rank.
        """
        self.accumulating = False
        """Whether the next backward leaves its gradients to a later one (``no_backward_sync``)."""
        self.optimizers: list[Optimizer] = []
        self._config, self._parallel, self._precision = config, parallel, precision
        self._module = weakref.ref(module)
        self._activations = ActivationMemory(config.activations)
        self._state_dict_hooks: StateDictHooks | None = None
        self._build(optimizers)

    @property
    def module(self) -> nn.Module:
        """The user's module. Not collective."""
        module = self._module()
        assert module is not None
        return module

    def owns(self, optimizer: Optimizer) -> bool:
        """Return whether all parameters of an optimizer belong to the module. Not collective."""
        own = {id(p) for p in self.module.parameters()}
        return all(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def add(self, optimizer: Optimizer) -> None:
        """Adopt one more optimizer."""
        self._build([*self.optimizers, optimizer])

    def _build(self, optimizers: list[Optimizer]) -> None:
        module, config, parallel = self.module, self._config, self._parallel
        assert parallel.mesh is not None
        previous = vars(self).get("engine")
        engine = self.engine = Engine(
            module,
            optimizers,
            config=config,
            precision=self._precision.asked(config.precision),
            mesh=parallel.mesh,
            device=parallel.device,
            loss_scale=config.precision.loss_scale,
        )
        self.optimizers = optimizers
        if previous is not None:
            engine.go_on_from(previous)
        parallel.balance_experts(module, engine.events.on_stepped)
        if engine.policy.parameters:
            self._state_dict_hooks = StateDictHooks(module, engine.units, engine.mesh)
            engine.on_detach.append(self._state_dict_hooks.remove)
        engine.gatherer.overlap = bool(config.sharding.overlap_step)
        engine.private_gradients = False  # the user's loop may read and change gradients at any time
        guards.watch_zero_grad(module, engine)
        self._activations.apply(module, engine)
        self._precision.attach(engine)
        rank_zero_info(f"ZeROFabricStrategy(stage={config.stage}): {engine.describe()}")

    # weights ---------------------------------------------------------------------------------------------------------

    def raw_weights(self) -> dict[str, Any]:
        """Return the module's own ``state_dict()``, at stage 3 with released parameters."""
        self.engine.wait()
        with unnoticed() if self._state_dict_hooks is None else self._state_dict_hooks.disabled():
            return self.module.state_dict()

    # steps -----------------------------------------------------------------------------------------------------------

    def forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward."""
        engine, trains = self.engine, torch.is_grad_enabled()
        with engine.comm.naming_failures():
            # DDP broadcasts rank 0's buffers before a forward if the forward before it was to synchronize gradients. It
            # has no modules without an optimizer; two forwards of one must not change what the first one has saved.
            engine.begin_step(sync_buffers_after=trains and self.trains and not self.accumulating)
            if trains:
                with self._activations.around_forward():
                    output = call(*args, **kwargs)
            else:
                output = call(*args, **kwargs)
            engine.end_forward()
        return output

    @property
    def trains(self) -> bool:
        """Return whether the module has an optimizer. Not collective."""
        return bool(self.optimizers)

    def begin_backward(self, *, alone: bool) -> None:
        """Begin a backward pass. ``alone``: no other module of this Fabric takes part.

        With several modules nothing is sent before the end: ranks whose gradients become ready in different orders
        would send those of different modules first.
        """
        alone = alone or not self.trains
        if not alone:
            self.engine.reducer.selective = True
            self.engine.begin_micro_batches()
        self.engine.begin_backward(eager=alone and not self.accumulating and len(self.optimizers) == 1)

    def end_backward(self, *, alone: bool) -> None:
        """End the backward pass; units that it has gathered are released."""
        alone = alone or not self.trains
        self.engine.end_backward(local=self.accumulating)
        if not alone:
            self.engine.end_micro_batches(reduce=self.engine.policy.gradients)

    def index_of(self, optimizer: Optimizer) -> int | None:
        """Return the number of an optimizer, None if it is not one of the module's. Not collective."""
        return self.engine.index_of(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Run the closure, if there is one, then the sharded step. Return what the optimizer returns."""
        engine = self.engine
        index = engine.index_of(optimizer)
        assert index is not None
        hooks_first = closure is not None and engine.scaler is None  # as if `step` called the closure
        result = None
        if closure is not None:
            if hooks_first:
                kwargs = run_step_pre_hooks(optimizer, kwargs, besides=engine.stepper)
            with torch.enable_grad():
                result = closure()
            if engine.optimizers[index].sharded.takes_closure:
                kwargs = {**kwargs, "closure": Result(result, type(optimizer).__name__)}

        def run() -> Any:
            if not hooks_first:
                return optimizer.step(**kwargs)
            with without_step_pre_hooks(optimizer, besides=engine.stepper):
                return optimizer.step(**kwargs)

        with engine.comm.naming_failures():
            engine.finish(index)
            returned = engine.step(index, run)
        return returned if closure is None else result


class Shell(nn.Module):
    """Wrapper that a Fabric calls instead of the user's module."""

    def __init__(self, module: nn.Module, model: Model) -> None:
        super().__init__()
        self.module = module
        self.model = model

    @override
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the user's forward between the engine's hooks, which must not be compiled.

        Fabric compiles this shell too if the model was compiled before its set-up.
        """
        return self.model.forward(self.module, args, kwargs)


class NoSync:
    """``fabric.no_backward_sync``."""

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Generator[None, None, None]:
        """Keep gradients of stages 0 and 1 on their rank; stages 2 and 3 average every micro-batch anyway."""
        if not isinstance(module, Shell):
            raise TypeError(f"Got a {type(module).__name__} that fabric.setup() has not returned.")
        before, module.model.accumulating = module.model.accumulating, enabled
        try:
            yield
        finally:
            module.model.accumulating = before


def unshelled(module: nn.Module) -> nn.Module:
    """Return the user's module inside a `Shell`; any other module is returned as it is."""
    return module.module if isinstance(module, Shell) else module


def not_set_up(optimizer: Optimizer) -> PlanError:
    """Return the error for an optimizer whose parameters are not those of one module that was set up."""
    return PlanError(
        f"Got {type(optimizer).__name__} for fabric.setup_optimizers, but its parameters are not those of one module "
        "that was set up. Call model = fabric.setup_module(model) first, or model, optimizer = fabric.setup(model, "
        "optimizer). One optimizer for several modules requires one module around them, such as an nn.ModuleDict."
    )
