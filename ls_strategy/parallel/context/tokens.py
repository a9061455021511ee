"""Slice the arguments of a transformer block that have a token dimension to this rank's tokens.

=====================================================  ==========================================================
argument (T tokens)                                    what a rank gets
=====================================================  ==========================================================
first floating tensor ``(B, T, ...)``: hidden states   its tokens
floating or complex ``(..., T, N)``: rotary tables     its tokens
4-d ``(B, T, H, N)``: rotary tables with heads         its tokens
integers ``(..., T)``: position ids                    its tokens
bool, or 4-d ``(..., T or 1, T)``: attention masks     all tokens, as attention runs over all of them
anything else                                          the argument unchanged
=====================================================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ls_strategy.errors import PlanError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def map_tensors(tree: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Apply ``change`` to the tensors in lists, tuples and dicts, and ``other`` to all other leaves."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return type(tree)((key, map_tensors(value, change, other)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        values = [map_tensors(value, change, other) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return other(tree)


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first floating tensor with at least three dimensions: ``(B, T, ...)``.

    Raises:
        PlanError: There is none.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3:
            return value
    raise PlanError(
        "sequence parallelism: a block was called without a floating tensor (batch, tokens, width) among its "
        "arguments. Choose blocks that take such a tensor, outside lists."
    )


def token_dim(tensor: Tensor, tokens: int) -> int | None:
    """Return the token dimension of an argument; None for masks and if there is none."""
    shape = tensor.shape
    if tensor.dtype == torch.bool:
        return None
    if tensor.dim() == 4:
        if shape[3] == tokens and shape[2] in (1, tokens):
            return None
        return 2 if shape[2] == tokens else 1 if shape[1] == tokens else None
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.dim() - 1 if tensor.dim() and shape[-1] == tokens else None
    return tensor.dim() - 2 if tensor.dim() > 1 and shape[-2] == tokens else None


def narrow(call: Call, tokens: int, start: int, length: int) -> Call:
    """Slice the arguments that have ``tokens`` tokens to ``[start, start + length)``. Masks stay unchanged."""
    args, kwargs = call
    hidden = hidden_states(args, kwargs)

    def part(tensor: Tensor) -> Tensor:
        dim = 1 if tensor is hidden else token_dim(tensor, tokens)
        if dim is None or tensor.shape[dim] != tokens:
            return tensor
        # A copy, so that the full tensor can be freed, and view() works.
        return tensor.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)

    return map_tensors(args, part), map_tensors(kwargs, part)


def crop(call: Call, tokens: int, length: int) -> Call:
    """Slice all arguments, masks too, to the first ``length`` tokens."""
    args, kwargs = narrow(call, tokens, 0, length)

    def part(tensor: Tensor) -> Tensor:
        for dim in range(max(tensor.dim() - 2, 0), tensor.dim()):
            is_mask = tensor.dtype == torch.bool or tensor.dim() == 4
            if is_mask and tensor.shape[dim] == tokens and token_dim(tensor, tokens) is None:
                tensor = tensor.narrow(dim, 0, length)
        return tensor

    return (map_tensors(args, part), map_tensors(kwargs, part)) if length < tokens else (args, kwargs)
