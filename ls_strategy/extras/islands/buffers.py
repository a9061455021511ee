"""Floating-point buffers, such as the running statistics of batch norms: islands take their mean.

Every island's buffers follow its own data, so with the mean all islands have the same model after a round. Equal values
stay as they are, bit for bit. Integers (``num_batches_tracked``) and buffers that checkpoints do not have stay the
island's own. As under DDP, those of rank 0 count inside an island.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ls_strategy._torch import persistent_buffer_names

DTYPE = torch.float64  # in which they are exchanged


def _of(module: nn.Module) -> list[Tensor]:
    names = persistent_buffer_names(module)
    return [b for n, b in module.named_buffers() if n in names and b.is_floating_point() and not b.is_meta]


def read(module: nn.Module) -> Tensor:
    """Return all of them in a row, fp64, in host memory."""
    found = [b.detach().to("cpu", DTYPE).flatten() for b in _of(module)]
    return torch.cat(found) if found else torch.empty(0, dtype=DTYPE)


def write(module: nn.Module, values: Tensor) -> None:
    """Set all of them."""
    buffers = _of(module)
    with torch.no_grad():
        for buffer, value in zip(buffers, values.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(value.view(buffer.shape))


def mean(of_islands: Sequence[Tensor]) -> Tensor:
    """Return the mean, in the order of islands."""
    first, *others = of_islands
    return first + sum((change(first, each) for each in others), torch.zeros_like(first)) / len(of_islands)


def change(before: Tensor, after: Tensor) -> Tensor:
    """Return the difference; 0 where the values are equal, infinities (of a mask) too."""
    return torch.where(before == after, 0.0, after - before)


def problems(of_islands: Mapping[int, Tensor], known: Tensor | None) -> dict[int, str]:
    """Return the islands whose values cannot be right, and why. The same on all islands.

    Values that are not finite may be meant, as in a mask of infinities: then all islands have the same ones. They are
    wrong where another island has a finite one, or where there was a finite one.

    Args:
        of_islands: by island.
        known: the mean after an earlier round, if there was one.
    """
    if all(bool(each.isfinite().all()) for each in of_islands.values()):
        return {}
    values = [of_islands[i] for i in sorted(of_islands)]
    if known is not None and known.shape == values[0].shape:
        values.insert(0, known)
    right = values[0]
    for each in values[1:]:  # the first finite value counts, and if there is none, the first infinite one
        better = (~right.isfinite() & each.isfinite()) | (right.isnan() & ~each.isnan())
        right = torch.where(better, each, right)
    wrong = {i: ~(each.isfinite() | (each == right) | (each.isnan() & right.isnan())) for i, each in of_islands.items()}
    return {i: "buffers with values that are not finite" for i, each in wrong.items() if bool(each.any())}
