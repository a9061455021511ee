"""Exchange tokens for heads around attention, when every rank holds a shard of the sequence (Ulysses).

::

    q, k, v  (B, H, T/size, N)  ─all-to-all─►  (B, H/size, T, N)  ─attention─►  (B, H/size, T, N)
                                                                                     │
    result                       (B, H, T/size, N)                  ◄─all-to-all─────┘

Every call of `torch.nn.functional.scaled_dot_product_attention` inside `attention_over` does this, and every call of
`attend_to_documents`. An `Interception` replaces torch's function; outside `attention_over` the replacement calls the
original.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.parallel.context.ring import AxisPart, ring_attention, split_axis
from ls_strategy.parallel.regions import exchange, untraced


class Region:
    """The execution of one block on this rank's tokens."""

    def __init__(self, axis: Axis, ring: int = 1) -> None:
        self.axis = axis
        self.ring = ring
        """Ranks among which keys and values pass in a ring; the others exchange tokens for heads."""
        self.calls = 0
        """Number of attention calls so far."""
        self.owner: object = None
        """The object that entered the region by `reenter`."""


_thread = threading.local()  # backward, which may recompute a block, runs in other threads


def _region() -> Region | None:
    return getattr(_thread, "region", None)


@contextmanager
def attention_over(axis: Axis, ring: int = 1) -> Generator[Region, None, None]:
    """Make attention exchange tokens for heads over ``axis``, or keys in rings of it. Not collective by itself."""
    outer, region = _region(), Region(axis, ring)
    _thread.region = region
    try:
        with unfused():
            yield region
    finally:
        _thread.region = outer


def reenter(axis: Axis, owner: object, ring: int = 1) -> None:
    """Enter a region until ``owner`` leaves it. Inside a region, do nothing."""
    if _region() is None:
        _thread.region = Region(axis, ring)
        _thread.region.owner = owner


def leave(owner: object) -> None:
    """Leave the region that ``owner`` entered by `reenter`, if there is one."""
    region = _region()
    if region is not None and region.owner is owner:
        _thread.region = None


@contextmanager
def unfused() -> Generator[None, None, None]:
    """Make ``nn.TransformerEncoderLayer`` call the attention function in evaluation too."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class Interception:
    """Replace torch's attention function until `remove`. Several interceptions may be active at once."""

    def __init__(self) -> None:
        original = functional.scaled_dot_product_attention

        @untraced
        def scaled_dot_product_attention(
            query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> Tensor:
            region = _region()
            if region is None or self._removed:
                return original(query, key, value, *args, **kwargs)
            return _attend(region, original, (query, key, value), *args, **kwargs)

        self._removed = False
        self._original = original
        self._replacement = functional.scaled_dot_product_attention = scaled_dot_product_attention

    def remove(self) -> None:
        """Restore the original, or become inactive if other code has replaced the function since. Idempotent."""
        self._removed = True
        if functional.scaled_dot_product_attention is self._replacement:
            functional.scaled_dot_product_attention = self._original


def _attend(
    region: Region, attention: Any, inputs: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None = None, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    region.calls += 1
    if region.ring > 1:
        return _attend_in_ring(region, inputs, attn_mask, *args, **kwargs)
    _check(region.axis, *inputs)
    _check_mask(attn_mask, inputs[0], region.axis)
    outer, _thread.region = region, None  # over the local heads, attention is an ordinary call
    try:
        query, key, value = _tokens_to_heads(region.axis, inputs)
        mask = _local_heads(attn_mask, inputs[0].shape[1], region.axis)
        result = attention(query, key, value, mask, *args, **kwargs)
    finally:
        _thread.region = outer
    return exchange(result, region.axis, 2, 1)


def all_documents(documents: Tensor, query: Tensor) -> Tensor:
    """Return the numbers of documents ``(B, T)`` of all tokens. Collective in a block sharded along the tokens.

    Args:
        documents: for the tokens of ``query``, or already for those of all ranks.
        query: ``(B, H, t, N)``, with this rank's tokens.

    Raises:
        PlanError: In a sharded block, the numbers are for other tokens. Raised on all ranks.
        ConfigError: The same, elsewhere.
    """
    region, tokens = _region(), query.shape[2]
    ranks = 1 if region is None else region.axis.size
    if documents.shape[1] not in (tokens, tokens * ranks):
        got = f"Got documents {tuple(documents.shape)} for {tokens} tokens"
        if region is None:
            raise ConfigError(
                f"{got}, but every token needs the number of its document. Pass (batch, tokens), with parallel.context "
                "as an argument of the blocks."
            )
        raise PlanError(
            f"{got} on each of {ranks} ranks in a block sharded along the tokens, which needs the numbers of these or "
            "of all. Pass them in as an argument of the block (batch, tokens), so that they are sliced as the tokens."
        )
    if region is None or documents.shape[1] == tokens * ranks:
        return documents
    return region.axis.all_gather(documents.to(query.device, torch.int64), 1)  # which every back end sends


def attend_to_documents(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    documents: Tensor,
    scale: float | None,
) -> Tensor:
    """Compute causal attention within documents: ``attend(query, key, value)`` for all tokens of some heads.

    Collective in a block sharded along the tokens, where the arguments are for this rank's tokens, and rings compute
    it themselves. ``documents`` ``(B, T)`` are those of all tokens.
    """
    region, inputs = _region(), _as_autocast(inputs)
    if region is None:
        return attend(*inputs)
    region.calls += 1
    heads, ring = split_axis(region.axis, region.ring)
    _check(heads, *inputs)
    outer, _thread.region = region, None
    try:
        query, key, value = _tokens_to_heads(heads, inputs)
        if region.ring > 1:
            runs = functional.pad((documents[:, 1:] != documents[:, :-1]).cumsum(1), (1, 0)).to(query.device)
            result = ring_attention(ring, (query, key, value), None, True, scale, runs)
        else:
            result = attend(query, key, value)
    finally:
        _thread.region = outer
    return exchange(result, heads, 2, 1)


def _attend_in_ring(
    region: Region, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    heads, ring = split_axis(region.axis, region.ring)
    _check(heads, *inputs)
    _check_mask(mask, inputs[0], region.axis)
    if dropout_p:
        raise PlanError(
            f"attention in a block sharded along the tokens got dropout_p={dropout_p}, which rings do not compute. Set "
            "parallel.ring=1, or disable the dropout of attention."
        )
    query, key, value = _tokens_to_heads(heads, _as_autocast(inputs))
    result = ring_attention(ring, (query, key, value), _local_heads(mask, inputs[0].shape[1], heads), is_causal, scale)
    return exchange(result, heads, 2, 1)


def _as_autocast(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the inputs as torch's autocast does for attention. It does not see that of rings."""
    kind = inputs[0].device.type
    if not torch.is_autocast_enabled(kind):
        return inputs
    dtype = torch.get_autocast_dtype(kind)
    query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in inputs)
    return query, key, value


def _check(axis: Axis | AxisPart, query: Tensor, key: Tensor, value: Tensor) -> None:
    got = f"attention in a block sharded along the tokens got query {tuple(query.shape)}, key {tuple(key.shape)}"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise PlanError(f"{got}. It requires (batch, heads, tokens, width per head).")
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise PlanError(
            f"{got}. Only self-attention among the block's tokens is supported: do not shard blocks with "
            "cross-attention or a cache of earlier keys."
        )
    if query.shape[1] % axis.size:
        raise PlanError(
            f"{got}. The number of heads, {query.shape[1]}, must be a multiple of the {axis.size} ranks of the "
            f"{axis.name!r} axis: choose a size that divides it."
        )


def _check_mask(mask: Tensor | None, query: Tensor, axis: Axis) -> None:
    """Refuse masks that are not for all tokens, on all ranks in the same way."""
    tokens = query.shape[2] * axis.size
    if mask is None or (mask.dim() <= 4 and all(n in (1, tokens) for n in mask.shape[-2:])):
        return
    raise PlanError(
        f"attention in a block sharded along the tokens got attn_mask {tuple(mask.shape)} for {query.shape[2]} of "
        f"{tokens} tokens, but it must be a mask for all of them. Build it before the blocks, and pass it in as a bool "
        "tensor (..., tokens, tokens), or as a floating one with four dimensions, so that it is not sliced as a table "
        "of positions would be; or use is_causal=True."
    )


def _tokens_to_heads(axis: Axis | AxisPart, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Give every rank all tokens of its heads.

    Key and value heads are repeated until their number is a multiple of the number of ranks.
    """
    query, *key_value = inputs
    result = [exchange(query, axis, 1, 2)]
    for tensor in key_value:
        heads = tensor.shape[1]
        copies = math.lcm(heads, axis.size) // heads
        repeated = tensor.repeat_interleave(copies, 1) if copies > 1 else tensor
        result.append(exchange(repeated, axis, 1, 2))
    return result


def _local_heads(mask: Tensor | None, heads: int, axis: Axis | AxisPart) -> Tensor | None:
    """Slice a mask that differs between heads to this rank's heads."""
    if mask is None or mask.dim() < 3 or mask.shape[-3] != heads or heads == 1:
        return mask
    share = heads // axis.size
    return mask.narrow(-3, axis.rank * share, share)
