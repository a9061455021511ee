"""Sums over virtual ranks: the same additions whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.pending import SUM_CHUNK, PendingReduce
from ls_strategy.distributed.tree_sum import Round, TreeSum, tree_sum


def summed(leaves: list[Tensor], ranks: int, *, before: Tensor | None = None) -> Tensor:
    """What the owner of a shard computes if ``ranks`` ranks send it these leaves."""
    tree, comm = TreeSum(), Comm(None, None)
    out = torch.zeros(leaves[0].numel()) if before is None else before.clone()
    for now in Round.all(len(leaves), ranks):
        sent = leaves[now.first : now.first + now.count]
        sent = [*sent, *[torch.full_like(sent[0], torch.nan)] * (ranks - now.count)]  # of ranks without a leaf
        pending = PendingReduce((), sent, (), comm)
        if now.is_last:
            tree.close(pending, now).finish(out, accumulate=before is not None)
        else:
            tree.add(pending, now, torch.float32)
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
