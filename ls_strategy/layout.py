"""Where each element of a flat buffer lives: integers only.

A flat buffer holds the parameters of one unit one after the other, each in a slot, and is cut into one shard per rank,
all of the same length, or by weights where ranks have unequal memory::

    |  weight a      | b |..|  weight c                |......|     slots, aligned; dots are padding
    |   rank 0       |   rank 1       |   rank 2       |            shards
    |   rank 0            |   rank 1            |  r 2 |            shards with weights 2, 2, 1

Slots and shards both start at multiples of `ALIGN` elements, so that the vector loop of an element-wise kernel meets
the same elements in its tail whatever the stage is: stages stay equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Literal

ALIGN = 16
"""Elements. 64 bytes in fp32: one cache line, one AVX-512 register, four 128-bit GPU loads."""


def round_up(numel: int, align: int) -> int:
    """Smallest multiple of ``align`` that is at least ``numel``.

    >>> round_up(17, 16), round_up(16, 16), round_up(0, 16)
    (32, 16, 0)
    """
    return -(-numel // align) * align


def shard_numel(numel: int, world_size: int, *, align: int = ALIGN) -> int:
    """Length of every rank's shard: a multiple of ``align``; the last shards may reach into padding.

    >>> shard_numel(100, 3)
    48
    """
    return round_up(-(-numel // world_size), align)


def weighted_bounds(used: int, weights: Sequence[Fraction], *, align: int = ALIGN) -> tuple[int, ...]:
    """Where shards begin and end that share ``used`` elements by ``weights``: one offset more than ranks.

    Each is the nearest multiple of ``align``, and no shard is empty unless all are.

    >>> weighted_bounds(96, (2, 1)), weighted_bounds(16, (1, 100)), weighted_bounds(0, (2, 1))
    ((0, 64, 96), (0, 16, 32), (0, 0, 0))
    """
    ranks, total = len(weights), sum(weights)
    if used == 0:
        return (0,) * (ranks + 1)
    blocks = max(round_up(used, align) // align, ranks)
    cuts = [0]
    for r in range(1, ranks):
        nearest = math.floor(blocks * sum(weights[:r]) / total + Fraction(1, 2))
        cuts.append(min(max(nearest, cuts[-1] + 1), blocks - (ranks - r)))
    return tuple(cut * align for cut in (*cuts, blocks))


@dataclass(frozen=True)
class TensorPart:
    """What of a parameter a rank of the tensor- or expert-parallel axis holds: along one dimension, runs of indices."""

    full_shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[int, int], ...]
    """``(first index, length)`` along ``dim`` of the full parameter, in the order in which the part holds them."""

    copies: int = 1
    """Ranks of the axis, side by side, that hold this same part."""

    axis: Literal["tensor", "expert"] = "tensor"
    """The ranks that hold the other parts."""

    @classmethod
    def cut(
        cls,
        full_shape: Iterable[int],
        dim: int,
        rank: int,
        size: int,
        *,
        sections: Sequence[int] | None = None,
        granule: int = 1,
        copies: int | Sequence[int] = 1,
    ) -> TensorPart:
        """The part of ``rank`` of ``size``: of every section along ``dim`` one stretch, as equal as granules allow.

        Args:
            full_shape: of the parameter.
            dim: that is divided.
            rank: along the axis.
            size: of the axis.
            sections: lengths that are divided each by itself (query, key and value rows of one matrix, say).
            granule: indices that stay together (rows of one head).
            copies: ranks side by side that hold the same part; one number, or one per section.

        >>> TensorPart.cut((12, 5), 0, 1, 2, sections=(8, 4)).runs
        ((4, 4), (10, 2))
        """
        shape = tuple(full_shape)
        sections = (shape[dim],) if sections is None else tuple(sections)
        each = (copies,) * len(sections) if isinstance(copies, int) else tuple(copies)
        whole = sum(sections) == shape[dim] and not any(s % granule for s in sections)
        if not whole or len(each) != len(sections) or any(size % c for c in each):
            raise ValueError(f"sections {sections} in granules of {granule} do not make up dimension {dim} of {shape}")
        runs: list[tuple[int, int]] = []
        start = 0
        for section, alike in zip(sections, each, strict=True):
            parts, index = size // alike, rank // alike
            low, more = divmod(section // granule, parts)
            first = index * low + min(index, more)
            length = low + (index < more)
            runs.append((start + first * granule, length * granule))
            start += section
        return cls(shape, dim, tuple(runs), min(each))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        length = sum(length for _, length in self.runs)
        return (*self.full_shape[: self.dim], length, *self.full_shape[self.dim + 1 :])

    def in_full(self, box: Box) -> list[tuple[Box, tuple[int, ...]]]:
        """A box of the part as boxes of the full parameter: ``(box of the part, its offsets in full)``.

        >>> part = TensorPart((4, 6), 1, ((0, 1), (3, 2)))
        >>> [(b.offsets, b.sizes, at) for b, at in part.in_full(Box((1, 0), (2, 3), 3))]
        [((1, 0), (2, 1), (1, 0)), ((1, 1), (2, 2), (1, 3))]
        """
        result: list[tuple[Box, tuple[int, ...]]] = []
        at = 0
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        low, high = box.offsets[self.dim], box.offsets[self.dim] + box.sizes[self.dim]
        for first, length in self.runs:
            lo, hi = max(low, at), min(high, at + length)
            if lo < hi:
                offsets, sizes, full = list(box.offsets), list(box.sizes), list(box.offsets)
                offsets[self.dim], sizes[self.dim], full[self.dim] = lo, hi - lo, first + lo - at
                start = sum(o * s for o, s in zip(offsets, strides, strict=True))
                result.append((Box(tuple(offsets), tuple(sizes), start), tuple(full)))
            at += length
        return result


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    part: TensorPart | None = None
    """What of the parameter is here, with tensor parallelism; ``shape`` is then the part's."""

    @property
    def numel(self) -> int:
        """Elements of the parameter; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Offset one past the last element."""
        return self.offset + self.numel

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Of the whole parameter, over all ranks of the tensor-parallel axis."""
        return self.shape if self.part is None else self.part.full_shape


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in one shard: ``shard[start:stop]`` is ``param.flatten()[param_start:...]``."""

    start: int
    stop: int
    param_start: int

    @property
    def numel(self) -> int:
        """Elements of the parameter on this rank; 0 when it lies wholly in other shards."""
        return self.stop - self.start


@dataclass(frozen=True)
class Box:
    """A rectangular part of an n-d tensor whose elements are adjacent in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Position of the first element in the flattened tensor."""

    @property
    def numel(self) -> int:
        """Elements; 1 for a scalar."""
        return math.prod(self.sizes)

    @property
    def stop(self) -> int:
        """Position one past the last element."""
        return self.start + self.numel

    def split(self, limit: int) -> list[Box]:
        """Boxes of at most ``limit`` elements, cut between rows, then inside rows where a row is longer.

        >>> [b.sizes for b in Box((0, 0), (5, 4), 0).split(8)]
        [(2, 4), (2, 4), (1, 4)]
        """
        if self.numel <= limit:
            return [self]
        dim = next(d for d, size in enumerate(self.sizes) if size > 1)
        row = math.prod(self.sizes[dim + 1 :])
        step = max(limit // row, 1)
        result: list[Box] = []
        for at in range(0, self.sizes[dim], step):
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[dim] += at
            sizes[dim] = min(step, self.sizes[dim] - at)
            result += Box(tuple(offsets), tuple(sizes), self.start + at * row).split(limit)
        return result


def flat_range_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut ``[start, stop)`` of a flattened tensor into boxes of the tensor, in order; at most ``2 * ndim - 1``.

    >>> [(b.offsets, b.sizes) for b in flat_range_to_boxes((4, 5), 3, 16)]
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), 0)]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if len(shape) == 1:
        return [Box((start,), (stop - start,), start)]
    if first == last and stop - start < row:
        inner = flat_range_to_boxes(shape[1:], start - first * row, stop - first * row)
        return [Box((first, *b.offsets), (1, *b.sizes), first * row + b.start) for b in inner]
    boxes: list[Box] = []
    whole_from, whole_to = -(-start // row), stop // row
    if start < whole_from * row:
        boxes += flat_range_to_boxes(shape, start, whole_from * row)
    if whole_from < whole_to:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(Box((whole_from, *zeros), (whole_to - whole_from, *shape[1:]), whole_from * row))
    if whole_to * row < stop:
        boxes += flat_range_to_boxes(shape, whole_to * row, stop)
    return boxes


@dataclass(frozen=True)
class FlatLayout:
    """Slots of one flat buffer and its cut into ``world_size`` shards, as seen by one rank."""

    slots: tuple[Slot, ...]
    world_size: int
    align: int = ALIGN
    """Slots and shards start at multiples of this many elements."""

    weights: tuple[Fraction, ...] = ()
    """Of the shards, by rank; none: all have the same length."""

    rank: int = 0
    """Whose shard is `shard`, with weights."""

    @classmethod
    def pack(
        cls,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        world_size: int,
        *,
        align: int = ALIGN,
        parts: Mapping[str, TensorPart] | None = None,
        weights: Sequence[Fraction] = (),
        rank: int = 0,
    ) -> FlatLayout:
        """Place parameters one after the other, each at a multiple of ``align``.

        Args:
            shapes: name and shape of what is here of every parameter.
            world_size: number of shards.
            align: elements.
            parts: by name, for parameters of which only a part is here.
            weights: of the shards; none: all have the same length.
            rank: whose shard is `shard`, with weights.

        >>> [s.offset for s in FlatLayout.pack([("a", (3, 5)), ("b", ()), ("c", (16,))], 2).slots]
        [0, 16, 32]
        """
        slots: list[Slot] = []
        offset = 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), offset, (parts or {}).get(name))
            slots.append(slot)
            offset = round_up(slot.end, align)
        return cls(tuple(slots), world_size, align, tuple(weights), rank)

    @property
    def used(self) -> int:
        """Elements up to the end of the last slot."""
        return round_up(self.slots[-1].end, self.align) if self.slots else 0

    @property
    def shard(self) -> int:
        """Elements of every shard; with weights, of this rank's."""
        if self.weights:
            return self.cuts[self.rank + 1] - self.cuts[self.rank]
        return shard_numel(self.used, self.world_size, align=self.align)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Where shards begin and end: ``world_size + 1`` offsets."""
        if self.weights:
            return weighted_bounds(self.used, self.weights, align=self.align)
        return tuple(rank * self.shard for rank in range(self.world_size + 1))

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Length of every rank's shard; None where all are the same."""
        return tuple(hi - lo for lo, hi in pairwise(self.cuts)) if self.weights else None

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.cuts[-1]

    @property
    def param_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Half-open range of the buffer that ``rank`` owns."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size})")
        return self.cuts[rank], self.cuts[rank + 1]

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """One piece per slot: what of it lies in the buffer's range ``[start, stop)``, relative to ``start``."""
        result: list[Piece] = []
        for slot in self.slots:
            lo, hi = max(slot.offset, start), min(slot.end, stop)
            if lo >= hi:
                result.append(Piece(0, 0, 0))
            else:
                result.append(Piece(lo - start, hi - start, lo - slot.offset))
        return tuple(result)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the buffer that belong to no parameter."""
        result: list[tuple[int, int]] = []
        position = 0
        for slot in self.slots:
            if slot.offset > position:
                result.append((position, slot.offset))
            position = slot.end
        if self.numel > position:
            result.append((position, self.numel))
        return tuple(result)
