"""Guards for what Lightning allows but ZeRO cannot: callbacks that cannot work, and calls that bypass the engine."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ls_strategy._torch import has_step_hooks, sync_batch_norm_error
from ls_strategy.access.rollout import generates, run_gathered
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.host.pytorch import (
    BaseFinetuning,
    GradClipAlgorithmType,
    LightningOptimizer,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
    is_overridden,
    pl,
)
from ls_strategy.lightning._private import logs_graph, rewinds_pruned_weights, unwrap_optimizer
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.transient import Method
from ls_strategy.zero.flat.cast import AWAY, FIRST_VERSION
from ls_strategy.zero.flat.flat_buffer import RELEASED_VERSIONS
from ls_strategy.zero.flat.parameters import unnoticed
from ls_strategy.zero.step.stepper import MODES
from ls_strategy.zero_stages import POLICIES

_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")
"""Hooks that run between backward and step."""

_AFTER_STEP = ("on_before_zero_grad", "on_train_batch_end")
"""Hooks that run between step and `zero_grad`."""

_OWN = (f"{pl.__name__}.", "ls_strategy.")

_IN_CHARGE = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")
"""Hooks of the module that change gradients, or decide whether a step follows."""


def check_trainer(trainer: pl.Trainer, precision: ZeROPrecision, parallel: str) -> None:
    """Refuse what cannot work, before anything is sharded.

    Args:
        trainer: about to fit or to evaluate.
        precision: the precision plugin.
        parallel: kinds of parallelism that give a rank only a part of the model.
    """
    if POLICIES[trainer.strategy.config.stage].parameters and any(map(logs_graph, trainer.loggers)):  # type: ignore[attr-defined]
        raise PlanError(
            "Got log_graph=True, but only rank 0 would trace the model, and its parameters are sharded at stage 3. Set "
            "log_graph=False, or stage=2."
        )
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning) and parallel:
            raise PlanError(
                f"{name} adds parameters to the optimizer while training runs, but under {parallel} parallelism the "
                "layout of the shards is fixed. Give all parameters to the optimizer in configure_optimizers, and "
                "freeze and unfreeze them by requires_grad_()."
            )
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and parallel:
            raise PlanError(
                f"{name} copies the model before {parallel} parallelism partitions it. Use ls_strategy.ShardedEMA, "
                "which averages the parts."
            )
        if isinstance(callback, ModelPruning) and rewinds_pruned_weights(callback):
            raise PlanError(
                f"{name} rewinds weights by p.data = original.data (use_lottery_ticket_hypothesis, its default): in "
                "plain torch training changes the original from then on, here it does not, so the second rewinding "
                "would give other weights. Set use_lottery_ticket_hypothesis=False."
            )
        if isinstance(callback, WeightAveraging) and precision.policy.rounds:
            raise PlanError(
                f"{name} swaps the module's weights with averages, but with precision={precision.precision} they are "
                "rounded to 16 bit, so the fp32 master weights would be lost. Use ls_strategy.ShardedEMA, which "
                "averages the fp32 shards."
            )
    if trainer.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        reason = sync_batch_norm_error()
        if reason is not None:
            raise PlanError(f"sync_batchnorm=True: {reason}. Set sync_batchnorm=False on this machine.")


def steps_by_itself(trainer: pl.Trainer, module: pl.LightningModule, engine: Engine | None) -> bool:
    """Return whether user code decides when to step and with which gradients.

    Manual optimization does, and so do hooks of the module that clip, step or drop gradients, and optimizer hooks.
    """
    own = None if engine is None else engine.stepper
    return (
        not module.automatic_optimization
        or trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        or any(is_overridden(hook, module, parent=pl.LightningModule) for hook in _IN_CHARGE)
        or any(has_step_hooks(optimizer, besides=own) for optimizer in trainer.strategy.optimizers)
    )


def has_hooks_before_step(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return whether user code runs between backward and step, where it may read or change gradients."""
    return _has_hooks(trainer, module, _BEFORE_STEP)


def has_hooks_after_backward(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return whether user code runs between backward and `zero_grad`, where it may read or change gradients."""
    return _has_hooks(trainer, module, (*_BEFORE_STEP, *_AFTER_STEP))


def _has_hooks(trainer: pl.Trainer, module: pl.LightningModule, hooks: tuple[str, ...]) -> bool:
    """Return whether the module or a user's callback has one of these hooks.

    Callbacks of Lightning and of this package do not count.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(
        is_overridden(hook, module, parent=pl.LightningModule)
        or any(
            is_overridden(hook, callback, parent=pl.Callback)
            and not str(getattr(getattr(callback, hook), "__module__", "")).startswith(_OWN)
            for callback in callbacks
        )
        for hook in hooks
    )


def forward_methods(wrappers: list[LightningOptimizer]) -> None:
    """Make methods of Lightning's wrapper, ``opt.zero_grad()``, ... run the optimizer's, and not with the wrapper."""
    for wrapper in wrappers:
        Method(wrapper, "zero_grad", _zero_inner)
        for name in MODES:
            if callable(getattr(type(wrapper), name, None)):
                Method(wrapper, name, partial(_run_inner, name))


def _run_inner(name: str, method: Method, *args: Any, **kwargs: Any) -> Any:
    return getattr(unwrap_optimizer(method.owner), name)(*args, **kwargs)


def _zero_inner(method: Method, set_to_none: bool = True) -> None:
    inner: Optimizer = unwrap_optimizer(method.owner)
    inner.zero_grad(set_to_none=set_to_none)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def watch_methods(module: pl.LightningModule, engine: Engine) -> None:
    """Notify the engine when the module's own methods change gradients.

    ``toggle_optimizer`` sets ``requires_grad`` on the pieces in the parameter groups: it is copied to the parameters.
    ``zero_grad`` of a module clears ``p.grad``, but averaged gradients are stored elsewhere.
    """
    for name in _TOGGLES:
        Method(module, name, partial(_toggle, engine))
    watch_zero_grad(module, engine)


def watch_zero_grad(module: nn.Module, engine: Engine) -> None:
    """Notify the engine of ``zero_grad()`` of a module and of every module inside."""
    for part in module.modules():
        Method(part, "zero_grad", partial(_zero_grad, engine))


def _toggle(engine: Engine, method: Method, *args: Any, **kwargs: Any) -> Any:
    result = method.original(*args, **kwargs)
    engine.mirror_requires_grad()
    return result


def _zero_grad(engine: Engine, method: Method, *args: Any, **kwargs: Any) -> None:
    if method.replaces(nn.Module.zero_grad):
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        with unnoticed():  # it reads every gradient only to drop it
            method.original(set_to_none)
        engine.zero_params(method.owner.parameters(), set_to_none=set_to_none)
    else:  # an override may read gradients, and drop some or none
        method.original(*args, **kwargs)
        engine.zero_params([p for p in method.owner.parameters() if p.grad is None], set_to_none=True)


def watch_generate(module: pl.LightningModule, engine: Engine) -> None:
    """Gather the weights of a module once per call of its ``generate`` (stage 3); see `run_gathered`."""
    for part in module.modules() if engine.policy.parameters else ():
        if generates(part):
            Method(part, "generate", partial(_generate, engine))


def _generate(engine: Engine, method: Method, *args: Any, **kwargs: Any) -> Any:
    return run_gathered(engine, method.owner, method.original, args, kwargs)


def unwatch_methods(module: pl.LightningModule) -> None:
    """Undo `watch_methods` and `watch_generate`."""
    for part in module.modules():
        for name in ("zero_grad", "generate", *_TOGGLES):
            method = vars(part).get(name)
            if isinstance(method, Method):
                method.remove()


@contextmanager
def explain_released_parameters() -> Generator[None, None, None]:
    """Explain the error of a backward that uses memory that was released, or weights in fewer bits that have changed.

    Raises:
        StateError: instead of torch's message about a storage of size 0, about versions, or about dtypes in fp8 layers.
    """
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"is at version (\d+); expected version (\d+)", str(error))
        now, saved = (int(found[1]), int(found[2])) if found else (0, 0)
        if saved >= FIRST_VERSION and now < FIRST_VERSION + AWAY:
            raise StateError(
                "weights were changed, by a step or a write, between a forward and its backward pass (stage 3). The "
                "forward has read them in 16 bits or fp8, as they were gathered, and autograd keeps no copies. Run it "
                "again after the change, or set precision.gather='fp32' on the strategy: then casts are copies."
            ) from error
        if "same dtype" in str(error) and _raised_by(error).startswith("torchao.float8"):
            raise StateError(
                "a layer that multiplies in fp8 got an input in fp32 under autocast on a CPU, and its recipe "
                "'rowwise_with_gw_hp' multiplies that with a gradient in 16 bits: torchao casts inputs on CUDA only. "
                "Set recipe='rowwise' or 'tensorwise' in precision.matmul, or Trainer(precision='bf16-true'); or cast "
                "what the layer gets, as in layer(x.bfloat16())."
            ) from error
        if "storage of size 0" not in str(error) and now - saved < RELEASED_VERSIONS:
            raise
        raise StateError(
            "backward used a parameter of a unit that was already released (stage 3): a result left the unit's module "
            "by another way than its return value, for example as an attribute. Return it from forward, or make the "
            "module that uses it the unit (sharding.block_classes=[...]). With precision 'bf16-mixed' or '16-mixed', "
            "precision.gather='fp32' lets autocast keep copies of the weights of linear layers for that."
        ) from error


def _raised_by(error: BaseException) -> str:
    """Return the name of the module whose code has called what raised ``error``."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__"))


def refuse_hidden_meta(module: nn.Module) -> None:
    """Refuse modules without memory in plain lists and dictionaries, where the strategy does not find them.

    Raises:
        PlanError: with the name of the attribute.
    """
    parts = set(map(id, module.modules()))
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name in _OF_EVERY_MODULE:
                continue
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            hidden = [each for each in held if isinstance(each, nn.Module) and id(each) not in parts]
            if any(p.is_meta for each in hidden for p in each.parameters()):
                raise PlanError(
                    f"{'.'.join(filter(None, ['self', path, name]))} holds a {type(hidden[0]).__name__} without "
                    "memory: at stage 3 and with model parallelism configure_model runs on the meta device, and the "
                    "strategy fills only the modules that are attributes. Make it an attribute (self.teacher = ...), "
                    "and name it in sharding.replicated_modules to have it in full on every rank; or build it in "
                    "__init__ or setup."
                )


@contextmanager
def refuse_loading_into_meta() -> Generator[None, None, None]:
    """Refuse to load weights into a meta module, which loses them; torch only warns.

    Raises:
        PlanError: where torch would have warned.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*copying from a non-meta parameter.*")
        try:
            yield
        except UserWarning as warning:
            raise PlanError(
                "configure_model loads weights into a module without memory: at stage 3 and with model parallelism it "
                "runs on the meta device, so that no rank ever holds the full model, and the weights would be lost. "
                "Load them by from_pretrained of transformers or by ls_strategy.load_safetensors(module, folder), of "
                "which every rank reads its shards, or by trainer.fit(ckpt_path=...); or build the module under "
                "`with torch.device('cpu'):`."
            ) from warning
