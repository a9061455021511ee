"""What Lightning lets pass and ZeRO must not: callbacks that cannot work, and calls that would miss the engine."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LambdaCallback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from ls_strategy._compat import (
    has_step_hooks,
    logs_graph,
    rewinds_pruned_weights,
    sync_batch_norm_error,
    unwrap_optimizer,
)
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.precision_plugin import ZeROPrecision
from ls_strategy.transient import Method
from ls_strategy.zero.parameters import unnoticed
from ls_strategy.zero_stages import POLICIES

_AFTER_BACKWARD = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end")
"""Hooks that run after backward and before the gradients are dropped."""

_IN_CHARGE = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")
"""Hooks of the module that change gradients, or decide whether a step follows at all."""


def check_trainer(trainer: pl.Trainer, precision: ZeROPrecision, parallel: str) -> None:
    """Refuse what cannot work, before anything is sharded.

    Args:
        trainer: about to fit, or to evaluate.
        precision: of the run.
        parallel: kinds of parallelism that leave a rank with a part of the model.

    Raises:
        PlanError: with the cure.
    """
    if POLICIES[trainer.strategy.config.stage].parameters and any(map(logs_graph, trainer.loggers)):  # type: ignore[attr-defined]
        raise PlanError(
            "log_graph=True has rank 0 trace the model alone, whose parameters are sharded at stage 3. Set "
            "log_graph=False, or stage=2."
        )
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning) and parallel:
            raise PlanError(
                f"{name} adds parameters to the optimizer while training runs, and under {parallel} parallelism the "
                "layout of the shards stays as it is. Give all parameters to the optimizer in configure_optimizers, "
                "and freeze and unfreeze them by requires_grad_()."
            )
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)) and parallel:
            raise PlanError(
                f"{name} copies the model before {parallel} parallelism leaves each rank a part of it. Use "
                "ls_strategy.ShardedEMA, which averages the parts."
            )
        if isinstance(callback, ModelPruning) and rewinds_pruned_weights(callback):
            raise PlanError(
                f"{name} rewinds weights by p.data = original.data (use_lottery_ticket_hypothesis, its default): in "
                "plain torch the original is trained along from then on, here it is not, so that the second rewinding "
                "would come to other weights. Set use_lottery_ticket_hypothesis=False."
            )
        if isinstance(callback, WeightAveraging) and precision.policy.rounds:
            raise PlanError(
                f"{name} swaps the module's weights with averages, and weights are rounded to 16 bit here "
                f"(precision={precision.precision}), so that the fp32 master weights would be lost. Use "
                "ls_strategy.ShardedEMA, which averages the fp32 shards."
            )
    if trainer.strategy._layer_sync is not None:  # type: ignore[attr-defined]
        reason = sync_batch_norm_error()
        if reason is not None:
            raise PlanError(f"sync_batchnorm=True: {reason}. Set sync_batchnorm=False on this machine.")


def reads_gradients(trainer: pl.Trainer, module: pl.LightningModule, engine: Engine | None) -> bool:
    """Whether user code might read or change gradients between backward and the step, or leave the step out.

    Manual optimization always might; otherwise any callback or module hook that runs in between, but Lightning's own
    callbacks (a `LambdaCallback` is the user's), and modules and callbacks that say so by ``reads_gradients = False``.
    """
    if not module.automatic_optimization or trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        return True
    looks = _AFTER_BACKWARD if getattr(module, "reads_gradients", True) else ()
    if any(is_overridden(hook, module, parent=pl.LightningModule) for hook in (*looks, *_IN_CHARGE)):
        return True
    if any(has_step_hooks(optimizer, besides=engine) for optimizer in trainer.strategy.optimizers):
        return True
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        own = type(callback).__module__.startswith("lightning.pytorch.") and type(callback) is not LambdaCallback
        if own or getattr(callback, "reads_gradients", True) is False:
            continue
        if any(is_overridden(hook, callback, parent=pl.Callback) for hook in _AFTER_BACKWARD):
            return True
    return False


def forward_zero_grad(wrappers: list[LightningOptimizer]) -> None:
    """``opt.zero_grad()`` on Lightning's wrapper runs torch's method on the wrapper; make it run the optimizer's."""
    for wrapper in wrappers:
        Method(wrapper, "zero_grad", _zero_inner)


def _zero_inner(wrapper: LightningOptimizer, set_to_none: bool = True) -> None:
    inner: Optimizer = unwrap_optimizer(wrapper)
    inner.zero_grad(set_to_none=set_to_none)


_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def watch_methods(module: pl.LightningModule, engine: Engine) -> None:
    """Let the engine know of what the module's own methods do to gradients.

    ``toggle_optimizer`` flips ``requires_grad`` on what the groups hold, pieces: it is copied to the parameters. And
    ``zero_grad`` of any module clears ``p.grad``, which is not where gradients are once they are averaged.
    """

    def toggle(name: str, owner: pl.LightningModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(type(owner), name)(owner, *args, **kwargs)
        engine.mirror_requires_grad()
        return result

    def zero_grad(part: nn.Module, set_to_none: bool = True) -> None:
        with unnoticed():  # it looks at every gradient, only to drop it
            type(part).zero_grad(part, set_to_none)
        engine.zero_params(part.parameters(), set_to_none=set_to_none)

    for name in _TOGGLES:
        Method(module, name, partial(toggle, name))
    for part in module.modules():
        Method(part, "zero_grad", zero_grad)


def unwatch_methods(module: pl.LightningModule) -> None:
    """Undo `watch_methods`."""
    for part in module.modules():
        for name in ("zero_grad", *_TOGGLES):
            method = vars(part).get(name)
            if isinstance(method, Method):
                method.remove()


@contextmanager
def explain_released_parameters() -> Generator[None, None, None]:
    """Say what it means when backward meets memory that was given back.

    Raises:
        StateError: instead of torch's message about a storage of size 0.
    """
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise StateError(
            "backward used a parameter of a unit that was already released (stage 3): a result left the unit's module "
            "by another way than its return value, say as an attribute. Return it from forward, or let the module that "
            "takes it up be the unit (unit_classes=[...])."
        ) from error


@contextmanager
def refuse_loading_into_meta() -> Generator[None, None, None]:
    """Weights loaded into a meta module vanish; torch only warns.

    Raises:
        PlanError: where torch would have warned.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*copying from a non-meta parameter.*")
        try:
            yield
        except UserWarning as warning:
            raise PlanError(
                "configure_model loads weights into a module that has no memory yet: at stage 3 and in pipelines it "
                "runs on the meta device, so that no rank ever holds the whole model, and the weights would be lost. "
                "Load them by trainer.fit(ckpt_path=...), or build the module under `with torch.device('cpu'):`."
            ) from warning
