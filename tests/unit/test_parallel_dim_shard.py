"""Which part of a sharded tensor a rank holds after a reshape or an index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ls_strategy.parallel.dim_shard import DimShard, expand_index, local_gradient, slice_shard, unshard
from tests.unit.thread_ranks import Rank, ThreadAxis, on_ranks


def shards(dim: int, sizes: tuple[int, ...]) -> list[DimShard]:
    return [DimShard(Rank(r, len(sizes)), dim, sizes, averaged=False) for r in range(len(sizes))]


@given(
    old=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_shard_after_a_reshape_is_the_reshaped_shard(old, data) -> None:
    """Where a shard exists after the reshape, it has the same elements in the same order."""
    dim = data.draw(st.integers(0, len(old) - 1))
    first = data.draw(st.integers(0, old[dim]))
    full = torch.arange(torch.tensor(old).prod().item()).view(old)
    new, rest = [], full.numel()
    while rest > 1 and len(new) < 4:
        new.append(data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
        rest //= new[-1]
    new.append(rest)
    for shard in shards(dim, (first, old[dim] - first)):
        after = shard.reshaped(old, new)
        if after is None:
            continue
        shape = list(new)
        shape[after.dim] = after.local_length()
        assert torch.equal(shard.shard(full).reshape(shape), after.shard(full.view(new)))


@pytest.mark.parametrize(
    ("old", "dim", "new", "stays"),
    [
        ((2, 4, 6), 2, (8, 6), True),
        ((2, 4, 6), 1, (8, 6), True),
        ((2, 4, 6), 0, (8, 6), True),
        ((2, 4, 6), 2, (48,), True),
        ((8, 6), 0, (2, 4, 6), False),
        ((2, 6), 1, (2, 2, 3), False),
        ((4, 6), 1, (6, 4), False),
    ],
)
def test_which_reshapes_keep_a_shard(old, dim, new, stays) -> None:
    shard = shards(dim, (old[dim] // 2, old[dim] - old[dim] // 2))[0]
    assert (shard.reshaped(old, new) is not None) is stays


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4), low=st.integers(-9, 9), high=st.integers(-9, 9))
def test_slices_of_a_sharded_dimension(sizes, low, high) -> None:
    full = torch.arange(sum(sizes))
    pieces = []
    for shard in shards(0, tuple(sizes)):
        item, after = slice_shard(slice(low, high), shard)
        pieces.append(shard.shard(full)[item])
        assert after is not None
        assert after.local_size == len(pieces[-1])
    assert torch.equal(torch.cat(pieces), full[low:high])


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ((0,), [0, slice(None), slice(None)]),
        ((..., 1), [slice(None), slice(None), 1]),
        ((None, slice(1, 2)), [None, slice(1, 2), slice(None), slice(None)]),
        ((slice(None), ..., None), [slice(None), slice(None), slice(None), None]),
        ((torch.tensor([0]),), None),
        ((True,), None),
        ((0, 0, 0, 0), None),
        ((..., ...), None),
        ((slice(torch.tensor(0), None),), None),
    ],
)
def test_an_index_of_three_dimensions_has_one_item_for_each(index, expected) -> None:
    assert expand_index(index, 3) == expected


@pytest.mark.parametrize("item", [1, slice(0, 4, 2)])
def test_other_items_than_plain_slices_leave_no_shard(item) -> None:
    assert slice_shard(item, shards(0, (2, 2))[0])[1] is None


def test_a_dimension_of_several_factors_is_not_sliced() -> None:
    shard = DimShard(Rank(0, 2), 0, (2, 2), averaged=False, inner=3)
    assert slice_shard(slice(0, 4), shard)[1] is None


@pytest.mark.parametrize(("averaged", "scale"), [(False, 1), (True, 2)])
def test_the_local_gradient_is_scaled_where_gradients_are_averaged(averaged, scale) -> None:
    shard = DimShard(Rank(1, 2), 0, (3, 1), averaged=averaged)
    assert local_gradient(torch.arange(4.0), [shard]).tolist() == [3.0 * scale]


def test_unshard_gathers_shards_of_unequal_length() -> None:
    full = torch.arange(10.0).view(2, 5)

    def body(axis: ThreadAxis) -> torch.Tensor:
        shard = DimShard(axis, 1, (3, 2), averaged=False)
        return unshard(shard.shard(full), [shard])

    for result in on_ranks(2, body):
        assert torch.equal(result, full)


def test_the_gradient_of_unshard_is_the_local_gradient() -> None:
    weight = torch.arange(10.0).view(2, 5)

    def body(axis: ThreadAxis) -> torch.Tensor:
        shard = DimShard(axis, 1, (3, 2), averaged=True)
        local = torch.zeros(2, shard.local_size, requires_grad=True)
        return torch.autograd.grad(unshard(local, [shard]), local, weight)[0]

    first, second = on_ranks(2, body)
    assert torch.equal(torch.cat([first, second], 1), 2 * weight)
