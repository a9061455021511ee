"""Attention over tokens of all ranks: values, masks, refusals, and the function that is replaced meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.parallel.context import attention
from tests.unit.thread_ranks import ThreadAxis, on_ranks

ORIGINAL = functional.scaled_dot_product_attention
BATCH, HEADS, TOKENS, WIDTH = 2, 4, 8, 3


@pytest.fixture(autouse=True)
def interception() -> Iterator[attention.Interception]:
    active = attention.Interception()
    yield active
    active.remove()
    assert functional.scaled_dot_product_attention is ORIGINAL


def inputs(key_heads: int = HEADS) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, n, TOKENS, WIDTH, generator=generator) for n in (HEADS, key_heads, key_heads)]


def shards(tensors: Any, axis: ThreadAxis) -> Any:
    return [t.chunk(axis.size, 2)[axis.rank] for t in tensors]


def attended(tensors: Any, size: int, **options: Any) -> Tensor:
    """The result of all ranks, joined along the tokens."""

    def body(axis: ThreadAxis) -> Tensor:
        with attention.attention_over(axis):
            return functional.scaled_dot_product_attention(*shards(tensors, axis), **options)

    return torch.cat(on_ranks(size, body), 2)


@pytest.mark.parametrize("size", [2, 4])
def test_attention_covers_the_tokens_of_all_ranks(size: int) -> None:
    torch.testing.assert_close(attended(inputs(), size, is_causal=True), ORIGINAL(*inputs(), is_causal=True))


@pytest.mark.parametrize("key_heads", [1, 2])
def test_fewer_key_heads_than_ranks_are_repeated(key_heads: int) -> None:
    expected = ORIGINAL(*inputs(key_heads), enable_gqa=True)
    torch.testing.assert_close(attended(inputs(key_heads), 4, enable_gqa=True), expected)


@pytest.mark.parametrize("heads", [1, HEADS])
def test_masks_keep_all_tokens_and_the_local_heads(heads: int) -> None:
    mask = torch.randn(BATCH, heads, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(attended(inputs(), 2, attn_mask=mask), ORIGINAL(*inputs(), attn_mask=mask))


def test_calls_are_counted() -> None:
    def body(axis: ThreadAxis) -> int:
        with attention.attention_over(axis) as region:
            for _ in range(2):
                functional.scaled_dot_product_attention(*shards(inputs(), axis))
        return region.calls

    assert on_ranks(2, body) == [2, 2]


def test_outside_a_region_attention_is_the_original() -> None:
    assert torch.equal(functional.scaled_dot_product_attention(*inputs()), ORIGINAL(*inputs()))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 8, 3)] * 3, r"It requires \(batch, heads, tokens, width per head\)"),
        ([(2, 4, 8, 3), (2, 4, 6, 3), (2, 4, 6, 3)], "Only self-attention among the block's tokens"),
        ([(2, 3, 8, 3)] * 3, "The number of heads, 3, must be a multiple of the 2 ranks of the 'sequence' axis"),
    ],
)
def test_refusals_come_before_anything_is_sent(shapes: list[tuple[int, ...]], message: str) -> None:
    axis = Axis("sequence")
    axis.size = 2  # no collective may be reached
    query, key, value = map(torch.zeros, shapes)
    with attention.attention_over(axis), pytest.raises(PlanError, match=message):
        functional.scaled_dot_product_attention(query, key, value)


def test_only_the_owner_leaves_a_region() -> None:
    owner, axis = object(), Axis("sequence")
    attention.reenter(axis, owner)
    attention.leave(object())
    region = attention._thread.region
    attention.leave(owner)
    assert region is not None
    assert attention._thread.region is None


def test_reentering_inside_a_region_keeps_the_outer_one() -> None:
    axis = Axis("sequence")
    with attention.attention_over(axis) as region:
        attention.reenter(axis, object())
        assert attention._thread.region is region


def test_an_interception_below_another_becomes_inactive(interception: attention.Interception) -> None:
    outer = attention.Interception()
    interception.remove()
    assert functional.scaled_dot_product_attention is outer._replacement
    outer.remove()
    functional.scaled_dot_product_attention = ORIGINAL


def test_the_fast_path_of_encoder_layers_is_restored() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with attention.unfused():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled() == before
