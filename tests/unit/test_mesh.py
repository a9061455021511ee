"""Which ranks work together."""

import pytest

from ls_strategy.distributed.mesh import MeshShape
from ls_strategy.errors import PlanError

SIZES = [(1, 1, 1, 1), (4, 2, 1, 1), (4, 1, 2, 1), (8, 2, 2, 1), (12, 3, 2, 1), (4, 1, 1, 2), (24, 2, 2, 3)]


@pytest.mark.parametrize(("world", "tensor", "sequence", "pipeline"), SIZES)
def test_every_rank_is_in_one_group_of_each_axis(world, tensor, sequence, pipeline):
    shape = MeshShape.of(world, tensor=tensor, sequence=sequence, pipeline=pipeline)
    assert shape.world_size == world
    sizes = {
        "data": shape.data,
        "sequence": sequence,
        "tensor": tensor,
        "zero": shape.data * sequence,
        "pipeline": pipeline,
        "model": pipeline * sequence * tensor,
    }
    for axis, size in sizes.items():
        groups = list(shape.groups(axis))
        assert sorted(rank for group in groups for rank in group) == list(range(world)), axis
        assert {len(group) for group in groups} == {size}, axis


def test_coordinates_differ_along_the_axis_alone():
    shape = MeshShape.of(16, tensor=2, sequence=2, pipeline=2)
    along = {"pipeline": (0,), "data": (1,), "sequence": (2,), "tensor": (3,), "zero": (1, 2), "model": (0, 2, 3)}
    for axis, free in along.items():
        for group in shape.groups(axis):
            fixed = {tuple(c for i, c in enumerate(shape.coordinates(r)) if i not in free) for r in group}
            assert len(fixed) == 1, axis
            assert len({shape.coordinates(r) for r in group}) == len(group), axis


@pytest.mark.parametrize(("world", "tensor", "sequence", "pipeline", "expert"), [
    (4, 1, 1, 1, 2), (4, 1, 1, 1, 4), (8, 2, 1, 1, 4), (8, 2, 2, 2, 2), (8, 4, 1, 1, 2), (16, 2, 1, 2, 4),
])  # fmt: skip
def test_experts_are_folded_over_the_ranks_of_a_stage(world, tensor, sequence, pipeline, expert):
    shape = MeshShape.of(world, tensor=tensor, sequence=sequence, pipeline=pipeline, expert=expert)
    assert shape.data == world // (tensor * sequence * pipeline)  # no ranks of its own
    stages = list(shape.groups("stage"))
    for axis, size in (("expert", expert), ("expert_zero", world // pipeline // expert)):
        groups = list(shape.groups(axis))
        assert sorted(rank for group in groups for rank in group) == list(range(world)), axis
        assert {len(group) for group in groups} == {size}, axis
        assert all(any(set(group) <= set(stage) for stage in stages) for group in groups), axis
    for different in shape.groups("expert"):
        for same in shape.groups("expert_zero"):
            assert len(set(different) & set(same)) <= 1


def test_experts_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(PlanError, match=r"expert_parallel_size=3 does not divide the 4 ranks, over which"):
        MeshShape.of(4, expert=3)
    with pytest.raises(PlanError, match=r"the 2 ranks of each of the 2 pipeline stages"):
        MeshShape.of(4, pipeline=2, expert=4)


def test_ranks_that_share_layers_are_neighbours():
    assert list(MeshShape.of(8, tensor=4).groups("tensor")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert list(MeshShape.of(8, tensor=2, sequence=2).groups("model")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert list(MeshShape.of(8, tensor=2, pipeline=2).groups("model")) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_sizes_that_do_not_divide_the_world_are_refused():
    with pytest.raises(PlanError, match=r"tensor_parallel_size=2 times sequence_parallel_size=2 is 4 ranks.*6 ranks"):
        MeshShape.of(6, tensor=2, sequence=2)
