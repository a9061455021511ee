"""The comparison of a block on some tokens with the block on all: what passes, what fails, what is restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.errors import PlanError
from ls_strategy.parallel.context.attention import Interception
from ls_strategy.parallel.context.token_check import CHECKED, compare_with_full
from tests.unit.thread_ranks import ThreadAxis, on_ranks

WIDTH = 8


@pytest.fixture(autouse=True)
def interception() -> Iterator[None]:
    active = Interception()
    yield
    active.remove()


class Block(nn.Module):
    """Attention of two heads, with dropout and a counter; ``positions`` come from the length of the input."""

    def __init__(self, positions: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = positions
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        self.calls += 1
        if cache is not None:
            cache.append(x)
        q = self.dropout(self.norm(x))
        if self.positions:
            q = q + torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        heads = q.unflatten(-1, (2, -1)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


def compared(block: Block, tokens: int = 8, **kwargs: Any) -> None:
    x = torch.randn(2, tokens, WIDTH, dtype=block.norm.weight.dtype, generator=torch.Generator().manual_seed(1))

    def body(axis: ThreadAxis) -> None:
        compare_with_full(block, block.forward, ((x,), kwargs), axis, "blocks.0")

    on_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_that_gets_its_positions_from_outside_passes(dtype: torch.dtype) -> None:
    compared(Block(dtype=dtype).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_from_the_length_of_the_input_are_found(dtype: torch.dtype) -> None:
    with pytest.raises(PlanError, match=r"block 'blocks.0' gives another result for 4 of 8 tokens"):
        compared(Block(positions=True, dtype=dtype).eval())


def test_long_sequences_are_cropped() -> None:
    with pytest.raises(PlanError, match=f"gives another result for {CHECKED // 2} of {CHECKED} tokens"):
        compared(Block(positions=True).eval(), CHECKED + 2)


def test_a_block_that_fails_on_fewer_tokens_is_refused_with_the_reason() -> None:
    class Fixed(Block):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            return super().forward(x.reshape(2, 8, WIDTH))

    with pytest.raises(PlanError, match=r"it failed: shape '\[2, 8, 8\]' is invalid"):
        compared(Fixed().eval())


def one_rank(block: Block, **kwargs: Any) -> None:
    """A single rank compares the block with itself; what it restores does not depend on others."""
    on_ranks(1, lambda axis: compare_with_full(block, block.forward, ((torch.ones(1, 4, WIDTH),), kwargs), axis, ""))


def test_dropout_is_off_and_the_mode_restored() -> None:
    block = Block().train()
    one_rank(block)
    assert block.training
    assert block.dropout.training


def test_buffers_are_restored() -> None:
    block = Block()
    one_rank(block)
    assert block.calls == 0


def test_counters_of_modules_and_of_classes_are_restored() -> None:
    class Counting(Block):
        number = 0

        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            type(self).number += 1
            self.own = getattr(self, "own", 0) + 1
            return super().forward(x)

    block = Counting()
    one_rank(block)
    assert (Counting.number, vars(block).get("own")) == (0, None)


def test_random_states_are_restored() -> None:
    class Random(Block):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            torch.rand(3)
            return super().forward(x)

    block, before = Random(), torch.random.get_rng_state()
    one_rank(block)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_caches_get_nothing() -> None:
    cache: deque[Tensor] = deque()
    one_rank(Block(), cache=cache)
    assert not cache


def test_a_block_without_attention_is_left_to_the_refusal_that_names_it() -> None:
    class Mean(Block):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            return x - x.mean(1, keepdim=True)

    compared(Mean())
