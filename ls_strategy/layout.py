"""Layout of a flat buffer: the place of every parameter, shard and element in it, as integers.

A flat buffer holds the parameters of one unit, each in a slot. It is split into one shard per rank: all of the same
length, or by weights if ranks have unequal memory::

    |  weight a      | b |..|  weight c                |......|     slots, aligned; dots are padding
    |   rank 0       |   rank 1       |   rank 2       |            shards
    |   rank 0            |   rank 1            |  r 2 |            shards with weights 2, 2, 1

Slots and shards start at multiples of `ALIGN` elements. So the vector loop of an element-wise kernel has the same
elements in its tail at every stage, and stages are bitwise equal.
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
"""Elements: 64 bytes in fp32, which is one cache line, one AVX-512 register, or four 128-bit GPU loads."""


def round_up(numel: int, align: int) -> int:
    """Return the smallest multiple of ``align`` that is at least ``numel``.

    >>> round_up(17, 16), round_up(16, 16), round_up(0, 16)
    (32, 16, 0)
    """
    return -(-numel // align) * align


def shard_numel(numel: int, world_size: int, *, align: int = ALIGN) -> int:
    """Return the length of every rank's shard, a multiple of ``align``. The last shards may contain padding.

    >>> shard_numel(100, 3)
    48
    """
    return round_up(-(-numel // world_size), align)


def weighted_bounds(used: int, weights: Sequence[Fraction], *, align: int = ALIGN) -> tuple[int, ...]:
    """Return the ``world_size + 1`` bounds of shards that split ``used`` elements by ``weights``.

    Each bound is the nearest multiple of ``align``. No shard is empty unless all are.

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
    """A rank's part of a tensor- or expert-parallel parameter: runs of indices along one dimension."""

    full_shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[int, int], ...]
    """``(first index, length)`` along ``dim`` of the full parameter, in the order of the part."""

    copies: int = 1
    """Number of adjacent ranks of the axis with this part."""

    axis: Literal["tensor", "expert"] = "tensor"
    """The axis whose ranks hold the other parts."""

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
        """Return the part of ``rank`` of ``size``: one run of every section along ``dim``, as equal as granules allow.

        Args:
            full_shape: of the parameter.
            dim: the dimension to split.
            rank: along the axis.
            size: of the axis.
            sections: lengths that are split separately (for example query, key and value rows of one matrix).
            granule: indices that stay together (for example rows of one head).
            copies: number of adjacent ranks with the same part; one number, or one per section.

        Raises:
            ValueError: the sections or granules do not fit the shape.

        >>> TensorPart.cut((12, 5), 0, 1, 2, sections=(8, 4)).runs
        ((4, 4), (10, 2))
        """
        shape = tuple(full_shape)
        sections = (shape[dim],) if sections is None else tuple(sections)
        each = (copies,) * len(sections) if isinstance(copies, int) else tuple(copies)
        fits = sum(sections) == shape[dim] and not any(s % granule for s in sections)
        if not fits or len(each) != len(sections) or any(size % c for c in each):
            raise ValueError(f"sections {sections} in granules of {granule} do not make up dimension {dim} of {shape}")
        runs: list[tuple[int, int]] = []
        start = 0
        for section, same in zip(sections, each, strict=True):
            parts, index = size // same, rank // same
            low, more = divmod(section // granule, parts)
            first = index * low + min(index, more)
            length = low + (index < more)
            runs.append((start + first * granule, length * granule))
            start += section
        return cls(shape, dim, tuple(runs), min(each))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the part."""
        length = sum(length for _, length in self.runs)
        return (*self.full_shape[: self.dim], length, *self.full_shape[self.dim + 1 :])

    def in_full(self, box: Box) -> list[tuple[Box, tuple[int, ...]]]:
        """Split a box of the part into boxes of the full parameter: ``(box of the part, offsets in the full one)``.

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
    """This rank's part of the parameter, with tensor parallelism; ``shape`` is then the shape of the part."""

    @property
    def numel(self) -> int:
        """Return the elements of the parameter; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Return the offset one past the last element."""
        return self.offset + self.numel

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the full parameter, over all ranks of the tensor-parallel axis."""
        return self.shape if self.part is None else self.part.full_shape


@dataclass(frozen=True)
class Piece:
    """The part of a parameter in one shard: ``shard[start:stop]`` is ``param.flatten()[param_start:...]``."""

    start: int
    stop: int
    param_start: int

    @property
    def numel(self) -> int:
        """Return the elements of the parameter in this shard; 0 if it is completely in other shards."""
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
        """Return the elements; 1 for a scalar."""
        return math.prod(self.sizes)

    @property
    def stop(self) -> int:
        """Return the position one past the last element."""
        return self.start + self.numel

    def split(self, limit: int) -> list[Box]:
        """Return boxes of at most ``limit`` elements, split between rows, and inside rows if a row is longer.

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


def flat_offset(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the position in a flattened tensor of the element at ``offsets``.

    >>> flat_offset((4, 5), (1, 2)), flat_offset((), ())
    (7, 0)
    """
    position = 0
    for size, at in zip(shape, offsets, strict=True):
        position = position * size + at
    return position


def flat_range_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Split ``[start, stop)`` of a flattened tensor into at most ``2 * ndim - 1`` boxes of the tensor, in order.

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
    first_full, end_full = -(-start // row), stop // row
    if start < first_full * row:
        boxes += flat_range_to_boxes(shape, start, first_full * row)
    if first_full < end_full:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(Box((first_full, *zeros), (end_full - first_full, *shape[1:]), first_full * row))
    if end_full * row < stop:
        boxes += flat_range_to_boxes(shape, end_full * row, stop)
    return boxes


@dataclass(frozen=True)
class FlatLayout:
    """Slots of one flat buffer, and its split into ``world_size`` shards, as seen by one rank."""

    slots: tuple[Slot, ...]
    world_size: int
    align: int = ALIGN
    """Slots and shards start at multiples of this many elements."""

    weights: tuple[Fraction, ...] = ()
    """Relative shard sizes by rank; empty for equal shards."""

    rank: int = 0
    """The rank of `shard`, with weights."""

    replicas: int = 1
    """Groups of ``world_size`` ranks that each hold all shards. A shard is as long as those of ``replicas`` ranks in a
    run that shards over all of them, so that the buffers have the same length."""

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
        replicas: int = 1,
    ) -> FlatLayout:
        """Place parameters, or this rank's ``parts`` of them, one after the other at multiples of ``align``.

        >>> [s.offset for s in FlatLayout.pack([("a", (3, 5)), ("b", ()), ("c", (16,))], 2).slots]
        [0, 16, 32]
        """
        slots: list[Slot] = []
        offset = 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), offset, (parts or {}).get(name))
            slots.append(slot)
            offset = round_up(slot.end, align)
        return cls(tuple(slots), world_size, align, tuple(weights), rank, replicas)

    @cached_property
    def used(self) -> int:
        """Return the elements up to the end of the last slot."""
        return round_up(self.slots[-1].end, self.align) if self.slots else 0

    @cached_property
    def shard(self) -> int:
        """Return the elements of every shard; with weights, of this rank's."""
        if self.weights:
            return self.cuts[self.rank + 1] - self.cuts[self.rank]
        return self.replicas * shard_numel(self.used, self.world_size * self.replicas, align=self.align)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Return the ``world_size + 1`` bounds of the shards."""
        if self.weights:
            return weighted_bounds(self.used, self.weights, align=self.align)
        shard = self.shard
        return tuple(rank * shard for rank in range(self.world_size + 1))

    @cached_property
    def sizes(self) -> tuple[int, ...] | None:
        """Return the length of every rank's shard; None if all are equal."""
        return tuple(hi - lo for lo, hi in pairwise(self.cuts)) if self.weights else None

    @cached_property
    def numel(self) -> int:
        """Return the elements of the full buffer, padding included."""
        return self.cuts[-1] if self.weights else self.world_size * self.shard

    @cached_property
    def param_numel(self) -> int:
        """Return the elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of the buffer that ``rank`` owns."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size})")
        return self.cuts[rank], self.cuts[rank + 1]

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """Return one piece per slot: its part in the buffer's range ``[start, stop)``, relative to ``start``."""
        result: list[Piece] = []
        for slot in self.slots:
            lo, hi = max(slot.offset, start), min(slot.end, stop)
            if lo >= hi:
                result.append(Piece(0, 0, 0))
            else:
                result.append(Piece(lo - start, hi - start, lo - slot.offset))
        return tuple(result)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the half-open ranges of padding."""
        result: list[tuple[int, int]] = []
        position = 0
        for slot in self.slots:
            if slot.offset > position:
                result.append((position, slot.offset))
            position = slot.end
        if self.numel > position:
            result.append((position, self.numel))
        return tuple(result)
