"""Kinds of relation between a value of a batch and the values of its micro-batches.

::

    value            of the batch, from those v_m of the micro-batches       example
    Constant         v                                                       a weight of the model
    Scale            known numbers, one for each micro-batch and the batch   mask.sum()
    SampleRows       the rows of all factor_m * v_m                          a loss per token: factor 1
    Part             sum of factor_m * v_m                                   a mean: factor tokens_m / tokens
    Unclear          neither                                                 the root of a mean
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ls_strategy._torch import without_torch_functions

Factor = tuple[float, ...]
"""One number per micro-batch."""

_ROUNDING = 1e-5


@dataclass(frozen=True)
class Constant:
    """The same in every micro-batch and in the batch."""

    zero: bool = False


@dataclass(frozen=True)
class Scale:
    """A number that is known before the model runs."""

    of_parts: Factor
    of_batch: float
    random: bool = False
    """Whether it may be drawn: then it counts something only if values are divided by it."""

    def ratio(self) -> Factor:
        """Return the micro-batches' numbers, as shares of that of the batch."""
        return tuple(part / self.of_batch for part in self.of_parts)


@dataclass(frozen=True)
class SampleRows:
    """A tensor with rows for the samples, each of which depends on its sample only."""

    factor: Factor


@dataclass(frozen=True)
class Part:
    """A tensor that sums over the samples."""

    factors: tuple[Factor, ...]
    """Those of its terms."""

    constant: bool = False
    """Whether a term is a `Constant`: right if the factors add up to 1."""


@dataclass(frozen=True)
class Unclear:
    """Anything else."""

    reason: str
    certain: bool = True
    """Whether it surely does not follow from the micro-batches' values."""


Value = Constant | Scale | SampleRows | Part | Unclear


def close(left: Factor, right: Factor) -> bool:
    """Return whether two factors are equal up to rounding."""
    return all(math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=1e-9) for a, b in zip(left, right, strict=True))


@dataclass
class KnownValues:
    """Compares tensors that are known before the model runs. Reads the device once for all of them."""

    random: bool
    """Whether they may be random: then tensors cannot be compared, and numbers of the batch are sums."""

    _pending: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)
    _values: dict[tuple[int, ...], Value] = field(default_factory=dict)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Note the tensors at the same place in the runs of all micro-batches, and last in that of the batch."""
        key = tuple(map(id, tensors))
        if key not in self._values:
            self._pending[key] = list(tensors)

    def of(self, tensors: Sequence[Tensor]) -> Value:
        """Return what tensors are. The first call compares all that were added."""
        self.add(tensors)
        if self._pending:
            self._compare()
        return self._values[tuple(map(id, tensors))]

    def _compare(self) -> None:
        asked: list[tuple[tuple[int, ...], int]] = []
        found: list[Tensor] = []
        for key, tensors in self._pending.items():
            value = self._without_reading(tensors)
            if value is not None:
                self._values[key] = value
                continue
            numbers = _numbers(tensors) if all(tensor.numel() == 1 for tensor in tensors) else _equal(tensors)
            asked.append((key, len(numbers)))
            found.append(numbers)
        read = iter(torch.cat(found).tolist() if found else ())
        for key, count in asked:
            answers: list[float] = [next(read) for _ in range(count)]
            self._values[key] = self._number(answers) if count > 1 else self._tensor(self._pending[key], answers[0] > 0)
        self._pending.clear()

    def _without_reading(self, tensors: list[Tensor]) -> Value | None:
        *parts, whole = tensors
        ones = (1.0,) * len(parts)
        if all(part is whole for part in parts):
            return Constant()
        if all(tensor.numel() == 1 for tensor in tensors):
            return None
        if any(tensor.layout != torch.strided for tensor in tensors):
            return SampleRows(ones)
        if _are_views(parts, whole) or self.random:
            return SampleRows(ones) if any(part.shape != whole.shape for part in parts) else Constant()
        if any(part.shape != whole.shape for part in parts) and _row_dim(parts, whole) is None:
            return SampleRows(ones)  # cut to the longest of the micro-batch, for example
        return None

    def _number(self, numbers: list[float]) -> Value:
        *parts, whole = numbers
        if len(set(numbers)) == 1:
            return Constant(zero=whole == 0)
        return Scale(tuple(parts), sum(parts) if self.random else whole, self.random)

    def _tensor(self, tensors: list[Tensor], equal: bool) -> Value:
        *parts, whole = tensors
        if all(part.shape == whole.shape for part in parts):
            return Constant() if equal else Unclear("a tensor that depends on all samples of a micro-batch")
        if equal:
            return SampleRows((1.0,) * len(parts))
        factor = _proportion(parts, whole)
        return Unclear("rows that depend on other rows of the micro-batch") if factor is None else SampleRows(factor)


def _numbers(tensors: Sequence[Tensor]) -> Tensor:
    with without_torch_functions():
        return torch.stack([tensor.detach().reshape(()).double() for tensor in tensors])


def _equal(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1 if the last tensor has the rows of all others, or equals each."""
    *parts, whole = (tensor.detach() for tensor in tensors)
    dim = _row_dim(parts, whole)
    joined = torch.stack(parts) if dim is None else torch.cat(parts, dim)
    same = joined == whole
    if whole.is_floating_point():
        same |= joined.isnan() & whole.isnan()
    return same.all().double()[None]


def _row_dim(parts: Sequence[Tensor], whole: Tensor) -> int | None:
    """Return along which dimension the parts joined have the shape of ``whole``."""
    for dim in range(whole.dim()):
        rest = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts if part.dim() == whole.dim()]
        others = (*whole.shape[:dim], *whole.shape[dim + 1 :])
        fit = len(rest) == len(parts) and all(each == others for each in rest)
        if fit and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            return dim
    return None


def _are_views(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Return whether the parts are rows of ``whole`` in the same memory."""
    start = whole.data_ptr()
    for part in parts:
        if part.stride() != whole.stride() or part.shape[1:] != whole.shape[1:] or part.data_ptr() != start:
            return False
        start += part.shape[0] * part.stride(0) * part.element_size() if part.dim() else 0
    return True


def _proportion(parts: Sequence[Tensor], whole: Tensor) -> Factor | None:
    """Return the factors that make the rows of ``whole`` of those of the parts: both were scaled for their batch."""
    dim = _row_dim(parts, whole)
    assert dim is not None
    if not whole.is_floating_point():
        return None
    factor = []
    for part, rows in zip(parts, whole.detach().split([part.shape[dim] for part in parts], dim), strict=True):
        mine, theirs = (tensor.detach().double().nan_to_num() for tensor in (part, rows))  # NaN: 0 / 0
        size = mine.abs().sum().item()
        ratio = theirs.abs().sum().item() / size if size else 0.0
        if part.numel() and not (theirs - ratio * mine).abs().max() <= _ROUNDING * theirs.abs().max():
            return None
        factor.append(ratio)
    return tuple(factor)
