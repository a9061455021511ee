"""Flat buffers: integers only, so properties by hypothesis."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_strategy.layout import ALIGN, FlatLayout, round_up, shard_numel

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=12)
WORLDS = st.integers(1, 9)


def pack(shapes: list[tuple[int, ...]], world_size: int) -> FlatLayout:
    return FlatLayout.pack([(f"p{i}", shape) for i, shape in enumerate(shapes)], world_size)


@given(numel=st.integers(0, 10**15), align=st.integers(1, 1024))
def test_round_up_is_the_smallest_multiple(numel, align) -> None:
    result = round_up(numel, align)
    assert result % align == 0
    assert numel <= result < numel + align


@given(numel=st.integers(0, 10**15), world_size=st.integers(1, 10_000))
def test_shards_hold_everything_and_waste_less_than_one_line_each(numel, world_size) -> None:
    shard = shard_numel(numel, world_size)
    assert shard % ALIGN == 0
    assert numel <= shard * world_size < numel + ALIGN * world_size + world_size


@given(shapes=SHAPES, world_size=WORLDS)
def test_slots_are_aligned_in_order_and_apart(shapes, world_size) -> None:
    layout = pack(shapes, world_size)
    assert [s.shape for s in layout.slots] == shapes
    assert [s.numel for s in layout.slots] == [math.prod(shape) for shape in shapes]
    assert all(s.offset % ALIGN == 0 for s in layout.slots)
    assert all(0 <= b.offset - a.end < ALIGN for a, b in zip(layout.slots, layout.slots[1:]))  # noqa: B905
    assert layout.param_numel == sum(math.prod(shape) for shape in shapes)


@given(shapes=SHAPES, world_size=WORLDS)
def test_shards_tile_the_buffer(shapes, world_size) -> None:
    layout = pack(shapes, world_size)
    ranges = [layout.shard_range(rank) for rank in range(world_size)]
    position = 0
    for lo, hi in ranges:
        assert lo == position
        assert hi - lo == layout.shard
        assert lo % ALIGN == 0
        position = hi
    assert position == layout.numel >= max((s.end for s in layout.slots), default=0)


@given(shapes=SHAPES, world_size=WORLDS)
def test_pieces_of_all_ranks_are_each_parameter_once(shapes, world_size) -> None:
    """Buffers are filled with their own positions, cut into shards, and put together again from pieces."""
    layout = pack(shapes, world_size)
    found: list[list[int]] = [[] for _ in shapes]
    for rank in range(world_size):
        lo, hi = layout.shard_range(rank)
        shard = range(lo, hi)
        pieces = layout.pieces(lo, hi)
        assert len(pieces) == len(shapes)
        for i, piece in enumerate(pieces):
            if piece.numel:
                assert piece.param_start == len(found[i])
            found[i].extend(shard[piece.start : piece.stop])
    assert found == [list(range(s.offset, s.end)) for s in layout.slots]


@given(shapes=SHAPES, world_size=WORLDS)
def test_slots_and_gaps_are_the_whole_buffer(shapes, world_size) -> None:
    layout = pack(shapes, world_size)
    gaps = layout.gaps()
    covered = [i for lo, hi in gaps for i in range(lo, hi)]
    covered += [i for s in layout.slots for i in range(s.offset, s.end)]
    assert sorted(covered) == list(range(layout.numel))
    assert all(lo < hi for lo, hi in gaps)


@given(shapes=SHAPES, world_size=WORLDS, cut=st.integers(0, 4000), length=st.integers(0, 4000))
def test_pieces_of_any_range_stay_inside_it(shapes, world_size, cut, length) -> None:
    layout = pack(shapes, world_size)
    for slot, piece in zip(layout.slots, layout.pieces(cut, cut + length), strict=True):
        assert 0 <= piece.start <= piece.stop <= length
        assert piece.numel == len(range(max(slot.offset, cut), min(slot.end, cut + length)))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_is_refused(rank) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 2\)"):
        pack([(3,)], 2).shard_range(rank)


def test_no_parameters_make_no_buffer() -> None:
    layout = pack([], 3)
    assert (layout.used, layout.shard, layout.numel, layout.gaps()) == (0, 0, 0, ())
