"""Shards of logits after a reshape or an index, and the loss on a single rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.parallel.cross_entropy import TokenLoss, token_losses
from ls_strategy.parallel.dim_shard import DimShard, slice_shard
from ls_strategy.parallel.logits import gather, wrap_sequence, wrap_vocabulary


class Rank(Axis):
    """One of several ranks, without communication."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("test")
        self.rank, self.size = rank, size


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_loss_of_all_columns_is_torchs(dtype, smoothing) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(6, 13)).to(dtype).requires_grad_()
    target = torch.tensor([0, 12, -100, 3, 7, 7])
    weight = torch.rand(6, dtype=torch.float64)
    loss = token_losses(logits, target, TokenLoss(Axis("alone"), 0, 13, smoothing=smoothing))
    (grad,) = torch.autograd.grad((loss * weight).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    expected = functional.cross_entropy(exact, target, reduction="none", label_smoothing=smoothing)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), exact)
    limit = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-6}[dtype]
    assert ((loss - expected).abs().max() / expected.max()).item() < limit
    limit = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2**-8}[dtype]  # the gradient is in 16 bit
    assert ((grad - expected_grad).abs().max() / expected_grad.abs().max()).item() < limit


def test_a_target_out_of_range_is_not_a_number() -> None:
    loss = token_losses(torch.randn(2, 5), torch.tensor([5, 1]), TokenLoss(Axis("alone"), 0, 5))
    assert loss.isnan().tolist() == [True, False]


def test_one_rank_has_plain_logits() -> None:
    logits = torch.randn(2, 3, 5)
    assert wrap_vocabulary(logits, Axis("tensor"), 5, 0) is logits
    assert wrap_sequence(logits, Axis("sequence"), 3) is logits
    assert gather({"logits": logits})["logits"] is logits


def test_shards_of_unexpected_size_are_refused() -> None:
    with pytest.raises(ValueError, match="equal shards give it 7 from 0 on"):
        wrap_vocabulary(torch.randn(2, 6), Rank(0, 2), 13, 0)
    with pytest.raises(ValueError, match="every rank must hold the same number"):
        wrap_sequence(torch.randn(2, 3, 5), Rank(0, 2), 7)
