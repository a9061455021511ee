"""What a tensor-parallel rank holds of a parameter, and where its elements are in the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ls_strategy.layout import Box, TensorPart, flat_range_to_boxes
from ls_strategy.meta_init.lazy import LazyTensor
from ls_strategy.zero.parts import LazyPart, part_of


class Elsewhere(LazyTensor):
    """A tensor that counts what is asked of it."""

    @staticmethod
    def __new__(cls, value: Tensor) -> Elsewhere:
        self = Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)
        self.value = value
        return self

    def load(self, start: int, stop: int) -> Tensor:
        return self.value.reshape(-1)[start:stop]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[int, ...], int, int, int]:
    granule = draw(st.integers(1, 3))
    sections = tuple(granule * n for n in draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, sum(sections))
    copies = draw(st.integers(1, 2))
    return tuple(shape), dim, sections, granule, copies * draw(st.integers(1, 4)), copies


def parts(cut: tuple[tuple[int, ...], int, tuple[int, ...], int, int, int]) -> list[TensorPart]:
    shape, dim, sections, granule, size, copies = cut
    return [
        TensorPart.cut(shape, dim, rank, size, sections=sections, granule=granule, copies=copies)
        for rank in range(size)
    ]


@given(cuts())
def test_parts_make_up_the_whole_and_copies_are_alike(cut):
    shape, dim, _, granule, size, copies = cut
    found = parts(cut)
    assert all(found[r] == found[r - r % copies] for r in range(size))
    indices = sorted(i for part in found[::copies] for first, n in part.runs for i in range(first, first + n))
    assert indices == list(range(shape[dim]))
    assert all(first % granule == 0 and n % granule == 0 for part in found for first, n in part.runs)
    assert all(part.shape[dim] == sum(n for _, n in part.runs) for part in found)


@given(cuts(), st.data())
def test_boxes_of_a_part_are_boxes_of_the_whole(cut, data):
    shape = cut[0]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    part = data.draw(st.sampled_from(parts(cut)))
    mine = part_of(whole, part)
    assert tuple(mine.shape) == part.shape
    start = data.draw(st.integers(0, mine.numel()))
    stop = data.draw(st.integers(start, mine.numel()))
    for box in flat_range_to_boxes(part.shape, start, stop):
        covered = 0
        for piece, offsets in part.in_full(box):
            here = mine[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))]
            there = whole[tuple(slice(o, o + n) for o, n in zip(offsets, piece.sizes, strict=True))]
            assert torch.equal(here, there)
            assert mine.reshape(-1)[piece.start] == here.reshape(-1)[0]
            covered += piece.numel
        assert covered == box.numel


@settings(max_examples=50)
@given(cuts(), st.data())
def test_a_part_of_a_tensor_that_is_elsewhere_reads_the_same(cut, data):
    shape = cut[0]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    part = data.draw(st.sampled_from(parts(cut)))
    lazy = part_of(Elsewhere(whole), part)
    assert isinstance(lazy, LazyPart)
    expected = part_of(whole, part)
    assert torch.equal(lazy.materialize(), expected)
    start = data.draw(st.integers(0, expected.numel()))
    stop = data.draw(st.integers(start, expected.numel()))
    assert torch.equal(lazy.range(start, stop), expected.reshape(-1)[start:stop])


def test_a_whole_parameter_is_its_own_part():
    value = torch.ones(3)
    assert part_of(value, None) is value


@pytest.mark.parametrize(
    "wrong",
    [{"sections": (3, 4)}, {"sections": (2, 4), "granule": 4}, {"copies": 2, "size": 3}],
    ids=["sum", "granule", "copies"],
)
def test_sections_must_make_up_the_dimension(wrong):
    arguments = {"size": 2, **wrong}
    with pytest.raises(ValueError, match="do not make up dimension 0"):
        TensorPart.cut((6, 2), 0, 0, **arguments)


def test_a_box_outside_of_a_run_is_left_out():
    part = TensorPart((4,), 0, ((0, 1), (3, 1)))
    assert part.in_full(Box((1,), (1,), 1)) == [(Box((1,), (1,), 1), (3,))]
