"""Splits a batch into micro-batches and merges the results of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor

from ls_strategy._torch import tree_iter, tree_map
from ls_strategy.precision import at_least_fp32


def has_rows(batch: Any, samples: int) -> bool:
    """Return whether some tensor of the batch has one row per sample."""
    return any(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples for leaf in tree_iter(batch))


def split(batch: Any, samples: int, number: int) -> tuple[list[Any], list[int]]:
    """Return ``number`` micro-batches of sizes as equal as possible, and the sizes.

    Tensors and lists below the batch with one entry per sample are cut, other leaves are copied to each.
    """
    sizes = [len(part) for part in torch.empty(samples, device="meta").tensor_split(number)]

    def cut(leaf: Any) -> list[Any]:
        if isinstance(leaf, SampleList):
            entries = iter(leaf.entries)
            return [type(leaf.entries)(islice(entries, size)) for size in sizes]
        return list(leaf.tensor_split(number)) if has_rows(leaf, samples) else [leaf] * number

    columns: list[list[Any]] = []
    batch = with_sample_lists(batch, samples)
    tree_map(lambda leaf: columns.append(cut(leaf)), batch)
    parts = []
    for i in range(number):
        leaves = iter(columns)
        parts.append(tree_map(lambda _, i=i, leaves=leaves: next(leaves)[i], batch))
    return parts, sizes


@dataclass(frozen=True)
class SampleList:
    """A list or tuple with one entry per sample, as one leaf."""

    entries: Any


def with_sample_lists(value: Any, samples: int, *, top: bool = True) -> Any:
    """Return the value with every list or tuple that has one entry per sample as a `SampleList`.

    ``top``: the value is a batch or result itself, whose entries are its parts if they have tensors.
    """

    def is_list(each: Any) -> bool:
        return each is not value and _is_sample_list(each, samples)

    if not top and _is_sample_list(value, samples):
        return SampleList(value)
    return tree_map(lambda each: SampleList(each) if is_list(each) else each, value, is_leaf=is_list)


def _is_sample_list(value: Any, samples: int) -> bool:
    if type(value) not in (list, tuple) or len(value) != samples or len({type(entry) for entry in value}) > 1:
        return False
    tensors = [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]
    if not tensors:
        return isinstance(value, list) or not isinstance(value[0], int | float)  # a tuple of numbers may be a size
    return any(tensor.dim() == 0 or len(tensor) != samples for tensor in tensors)


def reduced(values: Sequence[Any], shares: Sequence[float] | None, samples: Sequence[float], how: Any) -> Tensor:
    """Reduce the values logged in the micro-batches to that of the batch, on the CPU.

    With ``shares``, their sum weighted by these, however Lightning reduces the values of batches. Otherwise by ``how``:
    ``sum``, ``max`` or ``min``, by name or as the torch function; anything else is the mean, weighted by ``samples``. A
    micro-batch without a share does not count, even if its value is NaN.
    """
    columns = [torch.as_tensor(v).detach().cpu() for v in values]
    stacked = torch.stack([v.to(at_least_fp32(v.dtype)) for v in columns])
    how = getattr(how, "__name__", how)
    if shares is None and how in ("sum", "max", "min"):
        return getattr(torch, str(how if how == "sum" else f"a{how}"))(stacked, dim=0)
    if len(values) != len(samples):  # logged in some micro-batches only
        return stacked.mean(dim=0)
    factors = samples if shares is None else shares
    weights = torch.tensor(factors, dtype=stacked.dtype).view(-1, *[1] * (stacked.dim() - 1))
    return torch.where(weights == 0, 0, stacked * weights).sum(dim=0)


def merge(results: Sequence[Any], sizes: Sequence[int], of_batch: Callable[[Sequence[Any], int], Tensor]) -> Any:
    """Return what one step for the full batch would have returned: rows and lists of samples joined. On the CPU.

    ``of_batch`` returns a number of the batch from those of the micro-batches, and its place among the leaves.
    """
    if not results or results[0] is None:
        return None
    results = [with_sample_lists(result, size, top=False) for result, size in zip(results, sizes, strict=True)]
    leaves: list[Iterator[Any]] = [iter(tree_iter(result)) for result in results]
    places = count()

    def combine(first: Any) -> Any:
        place = next(places)
        column = [next(leaf) for leaf in leaves]
        if isinstance(first, SampleList):
            entries = chain.from_iterable(each.entries for each in column)
            return tree_map(_on_cpu, type(first.entries)(entries))
        if isinstance(first, Tensor) and first.dim():
            return torch.cat([_on_cpu(t) for t in column])
        if isinstance(first, Tensor):
            counts = not first.is_floating_point() and not first.is_complex()
            number = of_batch([t.double() for t in column] if counts else column, place)
            return number.to(first.dtype) if not counts or number == number.round() else number
        if type(first) not in (int, float) or all(each == first for each in column):
            return first
        if column == list(sizes):
            return sum(sizes)
        number = of_batch([torch.tensor(each, dtype=torch.float64) for each in column], place).item()
        return int(number) if isinstance(first, int) and number == int(number) else number

    return tree_map(combine, results[0])


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
