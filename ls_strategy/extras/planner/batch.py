"""The batch of a plan: its samples, its tokens, and the same batch with others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ls_strategy._torch import tree_iter, tree_map


def rows_of(batch: Any) -> int:
    """Return the number of samples of a batch: the rows of its first tensor."""
    return next((len(leaf) for leaf in tree_iter(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def length_of(batch: Any) -> int | None:
    """Return the tokens of a sample: the second dimension of the first tensor that has one; None without."""
    return next((leaf.shape[1] for leaf in tree_iter(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1), None)


def resized(batch: Any, samples: int) -> Any:
    """Return an empty batch of another number of samples: tensors with a row per sample get as many rows."""
    rows = rows_of(batch)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != rows:
            return leaf
        return leaf.new_zeros((samples, *leaf.shape[1:]))

    return tree_map(other, batch)


def of_length(batch: Any, tokens: int) -> Any:
    """Return an empty batch with samples of another length: in tensors whose second dimension is that of the first.

    A mask for pairs of tokens changes in both dimensions.
    """
    length = length_of(batch)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return leaf
        shape = list(leaf.shape)
        is_mask = leaf.dim() == 4 or (leaf.dim() > 2 and leaf.dtype == torch.bool)
        for dim in (1, *((leaf.dim() - 2, leaf.dim() - 1) if is_mask and shape[-1] == shape[-2] else ())):
            shape[dim] = tokens if shape[dim] == length else shape[dim]
        return leaf.new_zeros(shape)

    return tree_map(other, batch)


def batch_bytes(batch: Any) -> int:
    """Return the bytes of a batch."""
    return sum(leaf.nbytes for leaf in tree_iter(batch) if isinstance(leaf, Tensor))
