"""Compute the factors by which the losses of micro-batches add up to that of their batch.

::

    targets of a batch    [3 1 -100 -100]   micro-batch 0: mean over 2 tokens, factor 2/6
                          [5 2   4    1 ]   micro-batch 1: mean over 4 tokens, factor 4/6

The loss of a batch is the mean over all its tokens that are not ignored. Weighted by samples, the means of
micro-batches would give another number. The factors have to be known before the first backward, so the last stage runs
the step on shapes first: `StageRunner.record`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ls_strategy.parallel.pipeline.batches import reduced
from ls_strategy.parallel.pipeline.counts import Mean
from ls_strategy.parallel.pipeline.derive import Derivation
from ls_strategy.parallel.pipeline.values import Constant, Part, Unclear, Value, close

_BY_NAME = ("sum", "max", "min", torch.sum, torch.max, torch.min, sum, max, min)
"""Reductions of logged values that need no shares."""


class Shares:
    """Shares of the micro-batches in the loss of a batch, and in other values."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: samples of every micro-batch."""
        self._sizes = list(sizes)
        self.samples = [size / sum(sizes) for size in sizes]
        self.means: list[list[Mean]] = [[] for _ in sizes]
        """Calls in the steps of the micro-batches that have run."""

        self.derivation: Derivation | None = None
        """Of the step, if it ran on shapes."""

        self.derive: Callable[[], Derivation] | None = None
        """Runs the step on shapes, where that was not needed before."""

        self.losses: list[float] | None = None
        """Of the micro-batches that were trained with."""

        self.averaged: dict[str, str] = {}
        """Why logged values of the batch do not follow from those of its micro-batches, by name."""

        self._trained: list[float] = self.samples
        self._found = False
        self._problem: str | None = None

    def of_loss(self, means: Sequence[Sequence[Mean]]) -> list[float]:
        """Return the factors of the micro-batches' losses.

        Args:
            means: Calls in the runs on shapes, which count if the loss could not be followed there.
        """
        assert self.derivation is not None
        declared = self.derivation.declared()
        value = self.derivation.of_results(loss_of)
        factor = self._of(declared) if declared is not None else self._factor(value)
        self._found = factor is not None
        if factor is None and not (isinstance(value, Unclear) and not value.certain and any(means)):
            self._problem = _refusal(value)
        self._trained = factor or self._of_means(means)
        return self._trained

    def check(self) -> str | None:
        """Return what is wrong with the factors that the micro-batches were trained with."""
        if self._found or self._problem is not None:
            return self._problem
        means = [[mean for mean in each if mean.differentiable] for each in self.means]
        if len({len(each) for each in means}) > 1:
            return None
        for tokens in _numbers(means):
            if not _close(self._of(tokens), self._trained):
                return (
                    f"the losses of the micro-batches of a batch are means over {', '.join(f'{n:g}' for n in tokens)} "
                    "tokens, which the pipeline could not know before the first backward, so their average would not "
                    "be the mean over the batch. Read no value before the loss, or set "
                    "parallel.pipeline.micro_batches=1."
                )
        return None

    def of_batch(self, values: Sequence[Any], where: str | int, how: Any = "mean") -> Tensor:
        """Return the value of the batch, on the CPU.

        Args:
            values: Those of the micro-batches.
            where: The name of a logged value, or the place among the leaves of the step's result.
            how: How to reduce them if nothing is known, see `reduced`.
        """
        if len(values) != len(self.means) or len(values) == 1:
            return reduced(values, None, self.samples, how)
        numbers = [_number(value) for value in values]
        if self.losses is not None and all(map(_same, numbers, self.losses)):
            return reduced(values, self._trained, self.samples, how)
        shares = self._of_values(numbers)
        derivation = self._derived() if shares is None else None
        if derivation is not None:
            logged = isinstance(where, str)
            known = derivation.logged_of_batch(where) if logged else derivation.leaf_of_batch(where)
            if known is not None:
                return torch.as_tensor(known).detach().cpu()
            value = derivation.of_logged(where) if logged else derivation.of_leaf(where)
            shares = self._factor(value)
            if logged and shares is None and isinstance(value, Unclear) and value.certain and how not in _BY_NAME:
                self.averaged[where] = value.reason
        return reduced(values, shares, self.samples, how)

    def batch_size(self, name: str, given: Sequence[Any]) -> float:
        """Return the ``batch_size`` of the batch with which a value is logged, from those of its micro-batches."""
        numbers = [_number(value) or 0 for value in given]
        derivation = self._derived() if numbers != self._sizes else None
        known = None if derivation is None else _number(derivation.batch_size_of(name))
        return sum(numbers) if known is None else known

    def _of_values(self, numbers: Sequence[float | None]) -> list[float] | None:
        """Return the factors of numbers that are results of losses over tokens."""
        tokens: list[float] = []
        for number, means in zip(numbers, self.means, strict=True):
            same = next((m for m in means if m.value is not None and _same(number, m.value.item())), None)
            if same is None:
                return None
            tokens.append(float(same.tokens))
        return self._of(tokens)

    def _derived(self) -> Derivation | None:
        if self.derivation is None and self.derive is not None:
            self.derivation = self.derive()
        return self.derivation

    def _factor(self, value: Value) -> list[float] | None:
        if isinstance(value, Constant):
            return self.samples
        if not isinstance(value, Part):
            return None
        first = value.factors[0]
        equal = all(close(first, other) for other in value.factors)
        return list(first) if equal and (not value.constant or close((sum(first),), (1.0,))) else None

    def _of_means(self, means: Sequence[Sequence[Mean]]) -> list[float]:
        if not means or len({len(each) for each in means}) > 1 or not means[0]:
            return self.samples
        found = [self._of([float(n) for n in column]) for column in _numbers(means)]
        return found[0] if all(_close(found[0], other) for other in found) else self.samples

    def _of(self, tokens: Sequence[float]) -> list[float]:
        total = sum(tokens)
        return [n / total for n in tokens] if total else self.samples


def loss_of(result: Any) -> Any:
    """Return the loss in what ``training_step`` returned."""
    return result.get("loss") if isinstance(result, Mapping) else result


def _refusal(value: Value) -> str:
    cure = (
        "Let the loss be one sum over samples or tokens, divided by one number, such as (losses * mask).sum() / "
        "mask.sum(); or set parallel.pipeline.micro_batches=1."
    )
    if not isinstance(value, Unclear):
        return (
            "the loss of training_step is a sum of terms that have different shares in the micro-batches of a "
            "pipeline, such as a mean over tokens and one over samples, so it is not that of the batch, as under DDP. "
            f"{cure}"
        )
    if value.certain:
        return (
            f"training_step computes {value.reason}. In a pipeline it gets one micro-batch at a time, so the loss "
            f"would not be that of the batch, as under DDP. {cure}"
        )
    return (
        f"training_step computes {value.reason}, so the pipeline cannot know what its loss is a mean over. Call "
        "ls_strategy.loss_is_mean_over(number) in training_step, before the model, with the number of tokens or "
        "samples in the batch that it gets; or set parallel.pipeline.micro_batches=1."
    )


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
