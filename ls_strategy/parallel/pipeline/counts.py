"""How many tokens the loss of a micro-batch is a mean over, so that micro-batches count by their tokens.

::

    targets of a batch    [3 1 -100 -100]   micro-batch 0: mean over 2 tokens, weight 2/6
                          [5 2   4    1 ]   micro-batch 1: mean over 4 tokens, weight 4/6

The loss of a batch is the mean over all its tokens that are not ignored. Weighted by samples, the means of
micro-batches would give another number. The weights have to be known before the first backward, so the last stage runs
the step on shapes first: `StageRunner.count`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Signature, signature
from typing import Any

import torch
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


class TokenShares:
    """What share of a batch's loss each micro-batch has."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: samples of every micro-batch."""
        self.samples = [size / sum(sizes) for size in sizes]
        self.means: list[list[Mean]] = [[] for _ in sizes]
        """Calls in the steps of the micro-batches that have run."""

    def expected(self, means: Sequence[Sequence[Mean]]) -> list[float]:
        """Return the shares for calls on shapes; those of the samples unless all calls give the same ones."""
        if not means or len({len(each) for each in means}) > 1 or not means[0]:
            return self.samples
        found = [self._of([float(n) for n in column]) for column in _numbers(means)]
        return found[0] if all(_close(found[0], other) for other in found) else self.samples

    def check(self, shares: Sequence[float]) -> str | None:
        """Return what is wrong with the shares that the micro-batches were trained with."""
        means = [[mean for mean in each if mean.differentiable] for each in self.means]
        if len({len(each) for each in means}) > 1:
            return None
        for tokens in _numbers(means):
            if not _close(self._of(tokens), shares):
                return (
                    f"the losses of the micro-batches of a batch are means over {', '.join(f'{n:g}' for n in tokens)} "
                    "tokens, which the pipeline could not know before the first backward, so their average would not "
                    "be the mean over the batch. Mark tokens without a loss by ignore_index instead of selecting "
                    "others, compute all losses of a step over the same tokens, and read no value before the loss; or "
                    "set parallel.pipeline.micro_batches=1."
                )
        return None

    def of(self, values: Sequence[Any]) -> Sequence[float]:
        """Return the shares of one value per micro-batch: by tokens if it is such a mean, else by samples."""
        if len(values) != len(self.means):
            return self.samples
        numbers = [_number(value) for value in values]
        tokens: list[float] = []
        for number, means in zip(numbers, self.means, strict=True):
            same = next((m for m in means if m.value is not None and _same(number, m.value.item())), None)
            if same is None:
                return self.samples
            tokens.append(float(same.tokens))
        return self._of(tokens)

    def _of(self, tokens: Sequence[float]) -> list[float]:
        total = sum(tokens)
        return [n / total for n in tokens] if total else self.samples


def _numbers(means: Sequence[Sequence[Mean]]) -> list[list[float]]:
    """Return the tokens of every call, one number per micro-batch. Reads the device once."""
    flat = [mean.tokens for each in means for mean in each]
    if not flat:
        return []
    numbers = iter(torch.stack([tokens.double() for tokens in flat]).tolist())
    rows = [[next(numbers) for _ in each] for each in means]
    return [list(column) for column in zip(*rows, strict=True)]


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, int | float) else None


def _same(number: float | None, other: float) -> bool:
    return number is not None and (number == other or (math.isnan(number) and math.isnan(other)))


def _close(left: Sequence[float], right: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-9 for a, b in zip(left, right, strict=True))
