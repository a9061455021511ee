"""Sums over virtual ranks: the same additions whatever the number of ranks."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ls_strategy.distributed.comm import SUM_CHUNK, Comm, PendingReduce
from ls_strategy.distributed.rounds import Split
from ls_strategy.distributed.tree_sum import RoundInFlight, TreeSum, tree_sum


def summed(leaves: list[Tensor], split: Split | int, *, before: Tensor | None = None) -> Tensor:
    """What the owner of a shard computes if the ranks of ``split`` send it these leaves, or as many on each."""
    split = Split.even(len(leaves), split) if isinstance(split, int) else split
    tree, comm = TreeSum(), Comm(None, None)
    out = torch.zeros(leaves[0].numel()) if before is None else before.clone()
    for now in split.rounds:
        parts = [None if leaf is None else leaves[leaf] for leaf in now.leaves]
        pending = PendingReduce((), parts, (), comm)  # type: ignore[arg-type]
        if now.leaves[0] is None:  # seen from rank 0
            tree.expect(pending, now)
        elif now.is_last:
            RoundInFlight(tree, pending, now).finish(out, accumulate=before is not None)
        else:
            RoundInFlight(tree, pending, now).collect(torch.float32)
    assert not tree.sums
    return out


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_the_bits_do_not_depend_on_the_number_of_ranks(count: int, ranks: int, seed: int) -> None:
    torch.manual_seed(seed)
    leaves = [torch.randn(37) * 10 ** torch.randn(37) for _ in range(count)]
    expected = summed(leaves, count)
    assert torch.equal(summed(leaves, min(ranks, count)), expected)
    torch.testing.assert_close(expected, torch.stack(leaves).double().mean(0).float(), rtol=1e-5, atol=1e-5)
    before = torch.randn(37)
    assert torch.equal(summed(leaves, min(ranks, count), before=before), summed(leaves, count, before=before))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_the_bits_do_not_depend_on_the_shares(shares: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    leaves = [torch.randn(37) * 10 ** torch.randn(37) for _ in range(sum(shares))]
    assert torch.equal(summed(leaves, Split(tuple(shares))), summed(leaves, 1))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_virtual_rank_is_computed_once(shares: list[int]) -> None:
    split = Split(tuple(shares))
    found = [split.ranks_of(rank) for rank in range(len(shares))]
    assert [len(ranks) for ranks in found] == shares
    assert sorted(chain.from_iterable(found)) == list(range(sum(shares)))
    assert found[0][0] == 0, "what is logged without sync_dist, and buffers, are those of virtual rank 0"
    *others, last = split.rounds
    assert last.is_last
    assert None not in last.leaves
    assert not any(now.is_last for now in others)


def test_the_order_is_a_tree_and_not_a_chain() -> None:
    """With 1 and 2**-24 a chain rounds every addition down, and a tree adds the small ones first."""
    small = 2.0**-24
    leaves = [torch.tensor([x]) for x in (1.0, small, small, small)]
    assert summed(leaves, 1).item() * 4 == 1.0 + 2 * small == tree_sum([torch.tensor(x) for x in (1.0, *[small] * 3)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_leaves_are_summed_in_fp32(dtype: torch.dtype) -> None:
    leaves = [torch.randn(64).to(dtype) for _ in range(6)]
    assert torch.equal(summed(leaves, 2), summed([leaf.float() for leaf in leaves], 6))


def test_long_shards_are_summed_in_chunks() -> None:
    leaves = [torch.randn(2 * SUM_CHUNK + 5) for _ in range(5)]
    assert torch.equal(summed(leaves, 2), tree_sum(leaves) * 0.2)
    assert torch.equal(summed(leaves, 5), tree_sum(leaves) * 0.2)
