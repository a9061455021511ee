"""The key-value cache by itself: attention over it equals attention over all tokens at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ls_strategy.extras.inference.cache import KVCache

B, H, K, N = 2, 4, 2, 8


def tokens(count: int, heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(count)
    return tuple(torch.randn(B, h, count, N, generator=g) for h in (heads, K, K))  # type: ignore[return-value]


@pytest.mark.parametrize("pieces", [[6], [4, 2], [5, 1], [1] * 6])
def test_pieces_attend_as_all_tokens_at_once(pieces: list[int]) -> None:
    q, k, v = tokens(6)
    cache, found, first = KVCache(1, 8), [], 0
    for count in pieces:
        cache.open(torch.zeros(B, count))
        found.append(cache.layers[0].attend(*(t[:, :, first : first + count] for t in (q, k, v))))
        first += count
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(torch.cat(found, 2), expected, rtol=1e-5, atol=1e-6)


def test_padding_changes_no_result_of_a_row() -> None:
    q, k, v = tokens(5)
    cache = KVCache(1, 8)
    cache.begin([2, 0])
    positions = cache.open(torch.zeros(B, 5))
    found = cache.layers[0].attend(q, k, v)
    alone = scaled_dot_product_attention(q[:1, :, 2:], k[:1, :, 2:], v[:1, :, 2:], is_causal=True, enable_gqa=True)
    assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    torch.testing.assert_close(found[:1, :, 2:], alone, rtol=1e-5, atol=1e-6)
    assert found.isfinite().all()


def test_positions_continue_after_the_cached_tokens() -> None:
    cache = KVCache(1, 8)
    assert cache.open(torch.zeros(B, 3)).tolist() == [0, 1, 2]
    assert cache.open(torch.zeros(B, 2)).tolist() == [3, 4]
    cache.begin()
    assert cache.open(torch.zeros(B, 1)).tolist() == [0]


def test_memory_is_that_of_the_key_heads_and_stays_for_smaller_batches() -> None:
    cache = KVCache(1, 8)
    for rows in (B, 1):
        cache.begin()
        cache.open(torch.zeros(rows, 2))
        cache.layers[0].attend(*(t[:rows] for t in tokens(2)))
        assert cache.num_bytes == 2 * B * K * 8 * N * 4


def test_what_does_not_fit_into_a_cache_is_refused() -> None:
    cache = KVCache(1, 4)
    cache.open(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="max_length=4"):
        cache.open(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="max_length=4"):
        cache.begin([4])
    cache.begin([1, 0])
    with pytest.raises(ValueError, match="3 rows"):
        cache.open(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="at least 1"):
        KVCache(0, 4)
