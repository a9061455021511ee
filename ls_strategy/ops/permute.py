"""Permute rows of tokens to their experts and back: sorting, permuting, combining, and their gradients.

Each of ``S`` tokens has ``k`` choices of an expert. Choice ``j`` of token ``s`` is pair ``s * k + j``. ``order``,
``(P,)`` int64, lists the kept pairs once each, in the order of the experts' rows. Other pairs are dropped and
contribute nothing.

`permute`, `combine` and `pair_dots` are the derivatives of the sum of ``weights[s, j] * (x[s] . y[p])`` over the kept
pairs by ``y``, by ``x`` and by ``weights``. So the gradients of each, of every order, are the other two.

A function runs its kernel if there is one, or else its reference, which defines the result bit for bit: every product
and sum is rounded to fp32 (fp64 for fp64), in a fixed order, and the result is rounded once. There are no atomic
additions, so the bits are equal on every device and for any number of threads.

Mixture of experts: Shazeer et al., arXiv:1701.06538.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ls_strategy.ops.extra_library import routing_library

DOT_LANES = 128
"""Parallel sums of a dot product: a warp with four numbers per lane."""

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sort_by_expert(indices: Tensor, kept: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the pairs sorted by expert; the sort is stable.

    Args:
        indices: ``(S, k)`` int64, the expert of every pair.
        kept: ``(S, k)`` bool, False for dropped pairs; None keeps all. Counting them synchronizes with a GPU.
        num_experts: number of experts, ``E``.

    Returns:
        ``order``, ``(P,)`` int64, and the number of pairs of each expert, ``(E,)`` int64.

    Raises:
        ValueError: wrong shapes or dtypes.
        RuntimeError: the expert of a kept pair is not in ``[0, E)``. On a GPU the kernel asserts on the device, and
            without a kernel there is no check.
    """
    if indices.dim() != 2 or indices.dtype != torch.int64:
        raise ValueError(f"Got indices of {indices.dtype}, {tuple(indices.shape)}, but they must be int64, (S, k).")
    if kept is not None and (kept.shape != indices.shape or kept.dtype != torch.bool):
        raise ValueError(f"Got kept of {kept.dtype}, {tuple(kept.shape)}, but it must be bool, {tuple(indices.shape)}.")
    if _kernels(indices.device.type):
        return torch.ops.ls_strategy.sort_by_expert(indices, kept, num_experts)
    return sort_by_expert_reference(indices, kept, num_experts)


def permute(x: Tensor, order: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """Return the token's row for every kept pair, times the pair's weight if there are weights.

    Args:
        x: ``(S, h)``, rows of the tokens.
        order: ``(P,)`` int64, the kept pairs.
        k: choices per token.
        weights: ``(S, k)``, used in fp32.

    Returns:
        ``(P, h)`` in the dtype of ``x``.

    Raises:
        ValueError: shapes do not fit.
        RuntimeError: ``order`` has a pair that does not exist; on a GPU the device asserts.
    """
    _check(x, order, weights, x.shape[:1].numel(), k)
    weights = _weights_for(x, weights)
    if _has_kernel(x):
        return torch.ops.ls_strategy.permute(x, order, weights, k)
    return _PermuteTokens.apply(x, order, weights, k)


def combine(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of each token's rows, each times its weight, to undo `permute`.

    Args:
        y: ``(P, h)``, rows of the kept pairs.
        order: ``(P,)`` int64, the kept pairs.
        weights: ``(S, k)``, used in fp32.

    Returns:
        ``(S, h)`` in the dtype of ``y``, summed in the order of the choices; zero for a token without kept pairs.

    Raises:
        ValueError: shapes do not fit.
        RuntimeError: ``order`` has a pair that does not exist, or on a CPU one twice; on a GPU the device asserts.
    """
    if weights.dim() != 2:
        raise ValueError(f"Got weights of shape {tuple(weights.shape)}, but they must be (S, k).")
    return sum_pairs(y, order, weights, *weights.shape)


def pair_dots(x: Tensor, y: Tensor, order: Tensor, k: int) -> Tensor:
    """Return the dot product of each pair's row and its token's row: the gradient of `combine` by the weights.

    Args:
        x: ``(S, h)``, rows of the tokens.
        y: ``(P, h)``, rows of the kept pairs, in the dtype of ``x``.
        order: ``(P,)`` int64, the kept pairs.
        k: choices per token.

    Returns:
        ``(S, k)`` fp32 (fp64 for fp64), zero for dropped pairs. Lane ``i % DOT_LANES`` sums product ``i`` of a row, in
        order; the lanes are then folded in halves, upper onto lower.

    Raises:
        ValueError: shapes do not fit.
        RuntimeError: ``order`` has a pair that does not exist; on a GPU the device asserts.
    """
    _check(x, order, None, x.shape[:1].numel(), k)
    if y.shape != (order.numel(), *x.shape[1:]) or y.dtype != x.dtype:
        raise ValueError(
            f"Got y of {y.dtype}, {tuple(y.shape)}, but it must be {x.dtype}, ({order.numel()}, {x.shape[1]})."
        )
    if _has_kernel(x):
        return torch.ops.ls_strategy.pair_dots(x, y, order, k)
    return _PairDots.apply(x, y, order, k)


def sum_pairs(y: Tensor, order: Tensor, weights: Tensor | None, tokens: int, k: int) -> Tensor:
    """Run `combine` for ``tokens`` with ``k`` choices; all weights are one if ``weights`` is None."""
    _check(y, order, weights, tokens, k)
    if y.shape[0] != order.numel():
        raise ValueError(f"Got y of {tuple(y.shape)}, but it must have a row for each of the {order.numel()} pairs.")
    weights = _weights_for(y, weights)
    if _has_kernel(y):
        return torch.ops.ls_strategy.combine(y, order, weights, tokens, k)
    return _Combine.apply(y, order, weights, tokens, k)


def _check(rows: Tensor, order: Tensor, weights: Tensor | None, tokens: int, k: int) -> None:
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"Got rows of {rows.dtype}, {tuple(rows.shape)}, but they must be 2-d and floating point.")
    if order.dim() != 1 or order.dtype != torch.int64:
        raise ValueError(f"Got order of {order.dtype}, {tuple(order.shape)}, but it must be int64, (P,).")
    if weights is not None and weights.shape != (tokens, k):
        raise ValueError(f"Got weights of {tuple(weights.shape)}, but they must be ({tokens}, {k}), tokens by choices.")


def _weights_for(rows: Tensor, weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.to(_sums_in(rows))


def _has_kernel(rows: Tensor) -> bool:
    return rows.dtype in _KERNEL_DTYPES and _kernels(rows.device.type)


def _sums_in(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# --- references -----------------------------------------------------------------------------------------------------


def sort_by_expert_reference(indices: Tensor, kept: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """Compute `sort_by_expert` by its definition."""
    flat = indices.reshape(-1)
    pairs = None if kept is None else kept.reshape(-1).nonzero().view(-1)
    experts, order = torch.sort(flat if pairs is None else flat[pairs], stable=True)
    bounds = torch.searchsorted(experts, torch.arange(num_experts + 1, device=flat.device))
    if flat.device.type == "cpu" and not torch.compiler.is_compiling() and bounds.diff().sum() < experts.numel():
        raise RuntimeError(f"indices must be below the number of experts, {num_experts}, and not negative")
    return order if pairs is None else pairs[order], bounds.diff()


def permute_reference(x: Tensor, order: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Compute `permute` by its definition."""
    rows = x.index_select(0, order // k)
    if weights is None:
        return rows
    scale = weights.reshape(-1).index_select(0, order)
    return rows.to(_sums_in(x)).mul_(scale[:, None]).to(x.dtype)


def combine_reference(y: Tensor, order: Tensor, weights: Tensor | None, tokens: int, k: int) -> Tensor:
    """Compute `combine` by its definition."""
    total = torch.zeros(tokens, y.shape[1], dtype=_sums_in(y), device=y.device)
    if not order.numel():
        return total.to(y.dtype)
    position = torch.full((tokens * k,), -1, device=y.device)
    position[order] = torch.arange(order.numel(), device=y.device)
    for j, row in enumerate(position.view(tokens, k).unbind(1)):
        term = y.index_select(0, row.clamp(min=0)).to(total.dtype)
        if weights is not None:
            term.mul_(weights[:, j, None])
        if order.numel() < position.numel():
            term.masked_fill_(row[:, None] < 0, 0.0)
        total += term
    return total.to(y.dtype)


def pair_dots_reference(x: Tensor, y: Tensor, order: Tensor, k: int) -> Tensor:
    """Compute `pair_dots` by its definition."""
    products = x.index_select(0, order // k).to(_sums_in(x)).mul_(y)
    lanes = products.new_zeros(order.numel(), DOT_LANES)
    for part in products.split(DOT_LANES, dim=1):
        lanes[:, : part.shape[1]] += part
    width = DOT_LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    result = products.new_zeros(x.shape[0] * k)
    result[order] = lanes[:, 0]
    return result.view(-1, k)


# --- gradients ------------------------------------------------------------------------------------------------------


class _PermuteTokens(torch.autograd.Function):
    forward = staticmethod(permute_reference)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, order, weights, k = inputs
        ctx.save_for_backward(None if weights is None else x, order, weights)
        ctx.tokens, ctx.k = x.shape[0], k

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x, order, weights = ctx.saved_tensors
        of_x, _, of_weights, _ = ctx.needs_input_grad
        return (
            sum_pairs(grad, order, weights, ctx.tokens, ctx.k) if of_x else None,
            None,
            pair_dots(x, grad, order, ctx.k) if of_weights else None,
            None,
        )


class _Combine(torch.autograd.Function):
    forward = staticmethod(combine_reference)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        y, order, weights, _, k = inputs
        ctx.save_for_backward(None if weights is None else y, order, weights)
        ctx.k = k

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        y, order, weights = ctx.saved_tensors
        of_y, _, of_weights, *_ = ctx.needs_input_grad
        return (
            permute(grad, order, ctx.k, weights) if of_y else None,
            None,
            pair_dots(grad, y, order, ctx.k) if of_weights else None,
            None,
            None,
        )


class _PairDots(torch.autograd.Function):
    forward = staticmethod(pair_dots_reference)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.k = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x, y, order = ctx.saved_tensors
        of_x, of_y, *_ = ctx.needs_input_grad
        return (
            combine(y, order, grad) if of_x else None,
            permute(x, order, ctx.k, grad) if of_y else None,
            None,
            None,
        )


# --- kernels --------------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def _kernels(device_type: str) -> bool:
    return routing_library.available(device_type) and _register()


@functools.cache
def _register() -> bool:
    """Register shapes and dtypes of the results for tracing, and gradients."""

    @torch.library.register_fake("ls_strategy::sort_by_expert")
    def _(indices: Tensor, kept: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
        pairs = indices.numel() if kept is None else torch.library.get_ctx().new_dynamic_size()
        return indices.new_empty(pairs), indices.new_empty(num_experts)

    @torch.library.register_fake("ls_strategy::permute")
    def _(x: Tensor, order: Tensor, weights: Tensor | None, k: int) -> Tensor:
        return x.new_empty(order.shape[0], x.shape[1])

    @torch.library.register_fake("ls_strategy::combine")
    def _(y: Tensor, order: Tensor, weights: Tensor | None, tokens: int, k: int) -> Tensor:
        return y.new_empty(tokens, y.shape[1])

    @torch.library.register_fake("ls_strategy::pair_dots")
    def _(x: Tensor, y: Tensor, order: Tensor, k: int) -> Tensor:
        return x.new_empty(x.shape[0], k, dtype=torch.float32)

    for name, function in {"permute": _PermuteTokens, "combine": _Combine, "pair_dots": _PairDots}.items():
        torch.library.register_autograd(f"ls_strategy::{name}", function.backward, setup_context=function.setup_context)
    return True
