"""Turn a Trainer's fit into a question to the planner, by the names of Trainer's attributes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from ls_strategy._compat import (
    copy_of_optimizer,
    is_mock_optimizer,
    training_data,
    trains_on_given_data,
    tree_iter,
)
from ls_strategy.config import RecomputeConfig, ZeROConfig
from ls_strategy.errors import PlanError
from ls_strategy.planner.choice import Question
from ls_strategy.planner.forecast import Run
from ls_strategy.planner.step import first_batch
from ls_strategy.precision import PrecisionPolicy


def before_sharding(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Copy optimizers on the module's own parameters, which an engine removes from their groups. Skip mocks."""
    copies: list[Optimizer] = []
    for optimizer in optimizers:
        if is_mock_optimizer(optimizer):
            continue
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        copies.append(copy_of_optimizer(optimizer, groups))
    return copies


def question_of_fit(
    trainer: Any,
    module: Any,
    optimizers: Sequence[Optimizer],
    *,
    config: ZeROConfig,
    precision: PrecisionPolicy,
    recompute: RecomputeConfig | None,
    updates_early: bool,
) -> Question:
    """Return what a Trainer is about to train. Not collective.

    Creates the training data loader again, and takes one batch.

    Args:
        trainer: the fit's Trainer.
        module: its module, set up.
        optimizers: from `before_sharding`.
        config: options that no candidate changes.
        precision: dtypes.
        recompute: the user's choice, if any.
        updates_early: no user code may read gradients between backward and step.

    Raises:
        PlanError: there is no training data, or none to spare for a plan.
    """
    path = config.offload.nvme_path or os.environ.get("LS_STRATEGY_NVME_PATH", "")
    run = Run(
        config=replace(config, offload=replace(config.offload, nvme_path=path)),
        micro_batches=max(int(trainer.accumulate_grad_batches), 1),
        clips=bool(trainer.gradient_clip_val) or not updates_early,
        recompute=recompute,
    )
    data = training_data(trainer)
    if trains_on_given_data(trainer):
        _check_spare(data)
    return Question(module, optimizers, precision, first_batch(data), run)


def _check_spare(data: Any) -> None:
    """Raise if a batch that is taken now would be missing in training.

    Raises:
        PlanError: with the cure.
    """
    for loader in tree_iter(getattr(data, "iterables", data)):
        for each in (loader, getattr(loader, "dataset", None)):
            if isinstance(each, Iterator):
                raise PlanError(
                    f"Got stage='auto' with a {type(each).__name__} that gives every batch once, but a plan takes the "
                    "first one, which would be missing in training. Set the stage yourself, or give the data a new "
                    "iterator for every iter()."
                )
