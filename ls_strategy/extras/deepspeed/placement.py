"""Locate the elements of a parameter in DeepSpeed's flat buffers, and read them from there.

Stages 1 and 2 concatenate all parameters of an optimizer group and partition the result over the ranks. Stage 3
partitions every parameter over the ranks and concatenates the partitions, in sub-groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._torch import make_wrapper
from ls_strategy.errors import CheckpointError
from ls_strategy.extras.deepspeed.folder import Files
from ls_strategy.meta_init.lazy import LazyTensor


class InParts(LazyTensor):
    """A tensor that is the concatenation of parts of other tensors, up to its size. Read when it is used."""

    portions: list[Tensor]

    @staticmethod
    def __new__(  # noqa: D102
        cls: Any, portions: list[Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> InParts:
        self = make_wrapper(cls, shape, dtype)
        self.portions = portions
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"InParts(shape={tuple(self.shape)}, dtype={self.dtype}, portions={len(self.portions)})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        found, at = [], 0
        for portion in self.portions:
            first, last = max(start - at, 0), min(stop - at, portion.numel())
            if first < last:
                found.append(portion[first:last].to(self.dtype))
            at += portion.numel()
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype)


@dataclass(frozen=True)
class ParamPlace:
    """Location of the elements of one parameter."""

    shape: tuple[int, ...]
    group: int
    """Optimizer group."""

    ranges: tuple[tuple[int, int, int, int], ...]
    """``(rank, buffer, start, stop)``, in the order of the elements."""

    def portions(self, buffers: Callable[[int, int], Tensor]) -> list[Tensor]:
        """Return views of the elements, in order. ``buffers(rank, number)`` returns a flat buffer."""
        return [buffers(rank, number).reshape(-1)[start:stop] for rank, number, start, stop in self.ranges]


def places(files: Files) -> dict[str, ParamPlace]:
    """Return the location of every trainable parameter, by name, in the optimizer's order."""
    groups: list[Mapping[str, Any]] = files.models[0]["param_shapes"]
    groups = [groups] if isinstance(groups, Mapping) else groups
    return _places_in_slices(files, groups) if files.stage == 3 else _places_end_to_end(files, groups)


def _places_end_to_end(files: Files, groups: Sequence[Mapping[str, Any]]) -> dict[str, ParamPlace]:
    found = {}
    paddings = files.parts[0].get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        sizes = [part["single_partition_of_fp32_groups"][number].numel() for part in files.parts]
        at = 0
        for i, (name, shape) in enumerate(shapes.items()):
            stop = at + prod(shape)
            ranges = tuple((rank, number, a, b) for rank, a, b in _within(sizes, at, stop))
            found[name] = ParamPlace(tuple(shape), number, ranges)
            at = stop + (paddings[number][i] if paddings is not None else 0)
        if at > sum(sizes):
            raise CheckpointError(
                f"{files.folder}: the parameters of group {number} have {at} elements, but the ranks' files have "
                f"{sum(sizes)}. A file belongs to another save. Copy all files of one save."
            )
    return found


def _within(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(buffer, start, stop)`` of a range of the concatenation of buffers of these sizes."""
    first = 0
    for number, size in enumerate(sizes):
        if start < first + size and first < stop:
            yield number, max(start - first, 0), min(stop - first, size)
        first += size


def _places_in_slices(files: Files, groups: Sequence[Mapping[str, Any]]) -> dict[str, ParamPlace]:
    sizes = [buffer.numel() for buffer in files.parts[0]["fp32_flat_groups"]]
    ranks, found, at = len(files.parts), {}, 0
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            numel = prod(shape)
            each = -(-numel // ranks)
            ranges = []
            for rank in range(ranks):
                stop = at + min(each, max(numel - rank * each, 0))
                ranges += [(rank, i, a, b) for i, a, b in _within(sizes, at, stop) if at < stop]
            found[name] = ParamPlace(tuple(shape), number, tuple(ranges))
            at += each
    if at != sum(sizes):
        raise CheckpointError(
            f"{files.folder}: the parameters have {at} elements per rank, but the files have {sum(sizes)}. DeepSpeed's "
            "checkpoints do not contain states on NVMe. Save again with offload_optimizer.device = cpu."
        )
    return found
