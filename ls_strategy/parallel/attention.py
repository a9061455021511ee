"""Attention over all tokens when every rank has a part of them: for the time of the attention, divided by heads.

::

    q, k, v  (B, H, T/size, N)  ─all-to-all─►  (B, H/size, T, N)  ─attention─►  (B, H/size, T, N)
                                                                                     │
    result                       (B, H, T/size, N)                  ◄─all-to-all─────┘

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509. Every call of `torch.nn.functional.scaled_dot_product_attention`
inside of `attention_over` does so; the function is replaced while an `Interception` is in place, and does what it
always did everywhere else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.parallel.regions import exchange, untraced


class Region:
    """A block that runs on a part of the tokens."""

    def __init__(self, axis: Axis) -> None:
        """Before its first attention."""
        self.axis = axis
        self.calls = 0
        """Calls of attention so far."""
        self.owner: object = None
        """Who entered it by `reenter`."""


_here = threading.local()  # backward, which may recompute a block, has threads of its own


@contextmanager
def attention_over(axis: Axis) -> Generator[Region, None, None]:
    """Inside, attention exchanges tokens for heads over ``axis``. Not collective by itself."""
    outer, region = getattr(_here, "region", None), Region(axis)
    _here.region = region
    try:
        with unfused():
            yield region
    finally:
        _here.region = outer


def reenter(axis: Axis, owner: object) -> None:
    """Be in a region until ``owner`` leaves; nothing inside of one."""
    if getattr(_here, "region", None) is None:
        _here.region = Region(axis)
        _here.region.owner = owner


def leave(owner: object) -> None:
    """Undo `reenter`, if it did anything for this ``owner``."""
    region = getattr(_here, "region", None)
    if region is not None and region.owner is owner:
        _here.region = None


@contextmanager
def unfused() -> Generator[None, None, None]:
    """Inside, ``nn.TransformerEncoderLayer`` calls the attention function, in evaluation too."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class Interception:
    """Replaces the attention function of torch until it is removed. Several may be in place."""

    def __init__(self) -> None:
        """Replace it now."""
        original = functional.scaled_dot_product_attention

        @untraced
        def scaled_dot_product_attention(
            query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            region = getattr(_here, "region", None)
            if region is None or self._removed:
                return original(query, key, value, *args, **kwargs)
            return _attend(region, original, (query, key, value), *args, **kwargs)

        self._removed = False
        self._original = original
        self._mine = functional.scaled_dot_product_attention = scaled_dot_product_attention

    def remove(self) -> None:
        """Restore it; if something else has replaced it since, do nothing from now on. Idempotent."""
        self._removed = True
        if functional.scaled_dot_product_attention is self._mine:
            functional.scaled_dot_product_attention = self._original


def _attend(
    region: Region, attention: Any, inputs: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None = None, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    region.calls += 1
    _check(region.axis, *inputs)
    outer, _here.region = region, None  # the attention of this rank's heads is an ordinary one
    try:
        query, key, value = _by_heads(region.axis, inputs)
        mask = _own_heads(attn_mask, inputs[0].shape[1], region.axis)
        result = attention(query, key, value, mask, *args, **kwargs)
    finally:
        _here.region = outer
    return exchange(result, region.axis, 2, 1)


def _check(axis: Axis, query: Tensor, key: Tensor, value: Tensor) -> None:
    what = f"attention in a block that is divided along the tokens: query {tuple(query.shape)}, key {tuple(key.shape)}"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise PlanError(f"{what}. It needs (batch, heads, tokens, width per head).")
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise PlanError(
            f"{what}. Only attention of the block's tokens to each other is possible: leave blocks with "
            "cross-attention or a cache of earlier keys undivided."
        )
    if query.shape[1] % axis.size:
        raise PlanError(
            f"{what}. Its {query.shape[1]} heads must be a multiple of the {axis.size} ranks of the {axis.name!r} "
            "axis: choose a size that shards them."
        )


def _by_heads(axis: Axis, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Every rank gets all tokens of the heads it works on.

    Where the ranks do not divide the heads of key and value, each of these is repeated until they do.
    """
    query, *key_value = inputs
    result = [exchange(query, axis, 1, 2)]
    for tensor in key_value:
        heads = tensor.shape[1]
        copies = math.lcm(heads, axis.size) // heads
        repeated = tensor.repeat_interleave(copies, 1) if copies > 1 else tensor
        result.append(exchange(repeated, axis, 1, 2))
    return result


def _own_heads(mask: Tensor | None, heads: int, axis: Axis) -> Tensor | None:
    """A mask that differs by head, of this rank's heads."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] != heads or heads == 1:
        return mask
    share = heads // axis.size
    return mask.narrow(-3, axis.rank * share, share)
