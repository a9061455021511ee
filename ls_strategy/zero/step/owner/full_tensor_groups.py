"""Find the parameter groups that an optimizer has to step as full tensors, and optimizers that cannot be sharded.

==========================  ==========================================================  ==========================
the optimizer's group       found by                                                    stepped
==========================  ==========================================================  ==========================
element-wise                a tensor and its halves, stepped apart, give the same       in flat shards, on all ranks
whole tensors               the attribute ``whole_tensors``, or anything else           each by one rank
across tensors, or random   two tensors together differ from each one alone; two seeds  never above stage 0
==========================  ==========================================================  ==========================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.zero.step.elementwise import (
    STEPS,
    collective_of,
    group_kind,
    on_gradients_alone,
    probe,
    probed_shapes,
    probed_values,
    same_updates,
    splits_tensors,
    unlike_groups,
)

_ONE_BY_ONE: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in ("Muon", "Adafactor") if hasattr(torch.optim, name)
)
"""Classes of torch that step every tensor by itself, so that ``step`` may be called with some of them at a time."""


def steps_one_by_one(optimizer: Optimizer) -> bool:
    """Return whether ``step`` may be called several times per optimizer step, each time with other tensors.

    An optimizer declares it by its attribute ``whole_tensors``. Others are not assumed to allow it: they may count the
    calls.
    """
    return bool(getattr(optimizer, "whole_tensors", False)) or type(optimizer) in _ONE_BY_ONE


def full_tensor_groups(optimizer: Optimizer) -> tuple[bool, ...]:
    """Return for every group whether its parameters have to be stepped whole.

    An optimizer may have an attribute ``whole_tensors``: True, or a function of the group. Otherwise groups are tested.

    Raises:
        PlanError: the optimizer cannot step without a closure (LBFGS).
    """
    declared = getattr(optimizer, "whole_tensors", None)
    if callable(declared):
        return tuple(bool(declared(group)) for group in optimizer.param_groups)
    if declared:
        return tuple(True for _ in optimizer.param_groups)
    groups = optimizer.param_groups
    splits = {group_kind(group): splits_tensors(optimizer, group) for group in unlike_groups(groups)}
    return tuple(not splits[group_kind(group)] for group in groups)


def check_full_tensor_groups(optimizer: Optimizer, parts: Mapping[int, TensorPart], names: Mapping[int, str]) -> None:
    """Refuse what cannot be stepped in shards, and not in whole tensors either.

    Args:
        optimizer: stays unchanged.
        parts: ``id(parameter)`` -> this rank's part of a tensor- or expert-parallel parameter.
        names: ``id(parameter)`` -> its name.

    Raises:
        PlanError: the optimizer calls collectives, computes over several tensors, is random, or steps a stack of
            experts as one tensor.
    """
    name = type(optimizer).__name__
    collective = collective_of(optimizer)
    if collective is not None:
        raise PlanError(
            f"{name}.step() calls {collective}() for ranks that step the same tensors, but above stage 0 each rank "
            "steps others. Use a version for one device (SingleDeviceMuon, torch.optim.Muon, ls_strategy.Muon): the "
            "strategy itself shares the work among ranks. Or use stage 0."
        )
    full = [g for g, needed in zip(optimizer.param_groups, full_tensor_groups(optimizer), strict=True) if needed]
    for group in unlike_groups(full):
        _check_alone(optimizer, group)
    for group in full:
        for p in group["params"]:
            part = parts.get(id(p))
            # Each matrix of a 3-d parameter by itself, such as each expert of a stack.
            batch = p.dim() == 3 and bool(getattr(optimizer, "batches_matrices", False))
            if part is None or (part.dim == 0 and batch) or part.axis == "tensor":
                continue
            raise PlanError(
                f"{name} is not element-wise, so it needs whole tensors, but expert parallelism splits "
                f"{names.get(id(p), 'a parameter')!r} over ranks. Give this parameter to an element-wise optimizer "
                "(AdamW, SGD, Lion, ...) or to ls_strategy.Muon, or set parallel.expert to 1."
            )


def _check_alone(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Compare steps on two tensors together with steps on each of them alone, and with another seed.

    Raises:
        PlanError: they differ.
    """
    settings = {k: v for k, v in group.items() if k != "params"}
    shapes = probed_shapes(group["params"])
    shapes = shapes * 2 if len(shapes) == 1 else shapes
    probed = [probed_values(optimizer, settings, shape, STEPS, seed=1 + i) for i, shape in enumerate(shapes)]
    values = [value for value, _ in probed]
    grads = [[3.0**i * each[k] for i, (_, each) in enumerate(probed)] for k in range(STEPS)]
    name = type(optimizer).__name__
    cure = "Use an element-wise optimizer (AdamW, SGD, Lion, ...), or stage 0, where every rank steps all parameters."
    with on_gradients_alone(optimizer):
        together = probe(optimizer, settings, values, grads)
        again = probe(optimizer, settings, values, grads, seed=1)
        alone = [probe(optimizer, settings, [v], [[g[i]] for g in grads]) for i, v in enumerate(values)]
    if not _agree(values, together.values, again.values):
        raise PlanError(
            f"{name} is not element-wise, and it draws random numbers, which would differ on every world size. {cure}"
        )
    states_agree = all(together.has_states_of([each], i) for i, each in enumerate(alone))
    if not (states_agree and _agree(values, together.values, [each.values[0] for each in alone])):
        raise PlanError(
            f"{name} is not element-wise, and it steps a tensor differently if it has a second one, so it computes "
            f"over all tensors (a norm, a common step size), while every rank has only some of them. {cure}"
        )


def _agree(before: list[Tensor], a: list[Tensor], b: list[Tensor]) -> bool:
    return all(same_updates(*each) for each in zip(before, a, b, strict=True))
