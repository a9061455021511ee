"""Splits a batch into micro-batches and merges the results of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ls_strategy._torch import tree_iter, tree_map
from ls_strategy.precision import at_least_fp32


def has_rows(batch: Any, samples: int) -> bool:
    """Return whether some tensor of the batch has one row per sample."""
    return any(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples for leaf in tree_iter(batch))


def split(batch: Any, samples: int, number: int) -> tuple[list[Any], list[int]]:
    """Return ``number`` micro-batches of sizes as equal as possible, and the sizes. Other leaves are copied to each."""

    def cut(leaf: Any) -> list[Any]:
        return list(leaf.tensor_split(number)) if has_rows(leaf, samples) else [leaf] * number

    columns: list[list[Any]] = []
    tree_map(lambda leaf: columns.append(cut(leaf)), batch)
    parts = []
    for i in range(number):
        leaves = iter(columns)
        parts.append(tree_map(lambda _, i=i, leaves=leaves: next(leaves)[i], batch))
    sizes = [len(part) for part in torch.empty(samples, device="meta").tensor_split(number)]
    return parts, sizes


def mean_of(values: Sequence[Any], shares: Sequence[float], how: Any) -> Tensor:
    """Reduce the values logged in the micro-batches to one, on the CPU.

    ``how`` is ``sum``, ``max`` or ``min``, by name or as the torch function. Anything else is the mean, weighted by the
    micro-batches' shares. A micro-batch without a share does not count, even if its value is NaN.
    """
    columns = [torch.as_tensor(v).detach().cpu() for v in values]
    stacked = torch.stack([v.to(at_least_fp32(v.dtype)) for v in columns])
    how = getattr(how, "__name__", how)
    if how in ("sum", "max", "min"):
        return getattr(torch, str(how if how == "sum" else f"a{how}"))(stacked, dim=0)
    if len(values) != len(shares):  # logged in some micro-batches only
        return stacked.mean(dim=0)
    weights = torch.tensor(shares, dtype=stacked.dtype).view(-1, *[1] * (stacked.dim() - 1))
    return torch.where(weights == 0, 0, stacked * weights).sum(dim=0)


def merge(results: Sequence[Any], shares_of: Callable[[Sequence[Any], int], Sequence[float]]) -> Any:
    """Return what one step for the full batch would have returned: rows concatenated, numbers averaged. On the CPU.

    ``shares_of`` returns the micro-batches' shares of a number, from its values in each and its place among the leaves
    of a result.
    """
    if not results or results[0] is None:
        return None
    leaves: list[Iterator[Any]] = [iter(tree_iter(result)) for result in results]
    places = count()

    def combine(first: Any) -> Any:
        place = next(places)
        column = [next(leaf) for leaf in leaves]
        if not isinstance(first, Tensor):
            return first
        column = [t.detach().cpu() for t in column]
        if first.dim():
            return torch.cat(column)
        return sum(t * share for t, share in zip(column, shares_of(column, place), strict=True) if share)

    return tree_map(combine, results[0])
