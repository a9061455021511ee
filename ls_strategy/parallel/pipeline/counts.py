"""Count the tokens that the losses of torch are means over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import Signature, signature
from typing import Any

from torch import Tensor

MEANS = ("cross_entropy", "nll_loss", "linear_cross_entropy")
"""Names of functions that return the mean over the targets that are not ignored."""


@dataclass(frozen=True)
class Mean:
    """One call of such a function."""

    tokens: Tensor
    """Sum of the weights of the targets, ``()``."""

    value: Tensor | None = None
    """The result, detached; None where only shapes are known."""

    differentiable: bool = False


@cache
def _signature(func: Callable[..., Any]) -> Signature:
    return signature(func)


def tokens_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the number of tokens that a call's result is a mean over, or the sum of their weights, ``()``.

    None if it is another function, or the result is not a mean over targets that are indices.
    """
    if getattr(func, "__name__", "") not in MEANS:
        return None
    call = _signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    target, weight = given["target"], given.get("weight")
    other = given["reduction"] != "mean" or given.get("size_average") is False or given.get("reduce") is False
    if other or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    counted = target != given["ignore_index"]
    if weight is None:
        return counted.sum()
    return (weight.detach()[target.masked_fill(~counted, 0)] * counted).sum()
