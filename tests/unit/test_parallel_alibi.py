"""Per-head biases are sliced to a rank's heads, in every shape that models use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.parallel.hooks import Hooks
from ls_strategy.parallel.tensor.alibi import slice_head_biases

HEADS, RANKS, BATCH, TOKENS = 6, 3, 2, 5


class BloomAttention(nn.Module):
    """The name is what counts; it holds the local number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS // RANKS

    def forward(self, x: Tensor, *, alibi: Tensor | None) -> Any:
        return alibi


def attention(rank: int, hooks: Hooks) -> nn.Module:
    axis = Axis("tensor")
    axis.rank, axis.size = rank, RANKS
    model = nn.ModuleDict({"attention": BloomAttention(), "other": nn.Linear(2, 2)})
    slice_head_biases(model, axis, hooks)
    return model["attention"]


BIASES = torch.arange(BATCH * HEADS * TOKENS, dtype=torch.float).view(BATCH, HEADS, 1, TOKENS)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("full", "local"),
    [
        (BIASES, lambda heads: BIASES[:, heads]),
        (BIASES.flatten(0, 1), lambda heads: BIASES[:, heads].flatten(0, 1)),
        (BIASES[0], lambda heads: BIASES[0, heads]),
    ],
    ids=["(B, H, 1, T)", "(B * H, 1, T)", "(H, 1, T)"],
)
def test_biases_of_local_heads(rank: int, full: Tensor, local: Any) -> None:
    heads = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(attention(rank, Hooks())(torch.zeros(1), alibi=full), local(heads))


def test_an_attention_without_biases_gets_none() -> None:
    assert attention(1, Hooks())(torch.zeros(1), alibi=None) is None


def test_removed_hooks_slice_nothing() -> None:
    hooks = Hooks()
    module = attention(1, hooks)
    hooks.remove()
    assert module(torch.zeros(1), alibi=BIASES) is BIASES
