"""Grouped products: ``nn.Linear`` of all experts at once, on rows ordered by expert.

On CUDA one kernel computes all groups (``torch.nn.functional.grouped_mm``, bf16). On other devices, and if the strides
do not fit the kernel, each group is one product, written into its rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ls_strategy.device import compute_capability


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
    """Compute ``x[i] @ weight[g].T + bias[g]`` for every row i of each group g.

    Args:
        x: ``(T, in)``, ordered by group.
        weight: ``(G, out, in)``.
        bias: ``(G, out)`` or None.
        counts: Rows of each group. The gradients of a group without rows are 0.

    Returns:
        ``(T, out)``, in the dtype that ``nn.Linear`` would return, also under autocast.

    Raises:
        ValueError: The number of counts is not G, or their sum is not T.
    """
    check_counts(counts, weight, x)
    return _GroupedLinear.apply(*autocast(x, weight, bias), tuple(counts))  # type: ignore[no-any-return]


def check_counts(counts: Sequence[int], weight: Tensor, x: Tensor) -> None:
    """Check that there is one count per group, and that they add up to the number of rows.

    Raises:
        ValueError: One of the two does not hold.
    """
    if len(counts) != len(weight) or sum(counts) != len(x):
        raise ValueError(
            f"Got counts for {len(counts)} groups of {sum(counts)} rows in total, but {len(weight)} weights and "
            f"{len(x)} rows."
        )


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which ``nn.Linear`` multiplies ``x``."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def autocast(x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """Cast rows and weights to the dtype in which ``nn.Linear`` multiplies them."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return [x, *weights]
    dtype = autocast_dtype(x)
    return [None if t is None else t.to(dtype) for t in (x, *weights)]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return multiply(x, weight.transpose(1, 2), bias, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        counts: tuple[int, ...] = ctx.counts
        grad = grad.contiguous()  # the gradient of a sum is expanded
        d_x = multiply(grad, weight, None, counts) if ctx.needs_input_grad[0] else None
        d_weight = outer(grad, x, counts) if ctx.needs_input_grad[1] else None
        d_bias = sums(grad, counts) if ctx.needs_input_grad[2] else None
        return d_x, d_weight, d_bias, None


def _fits_kernel(x: Tensor, other: Tensor) -> bool:
    """Return whether the kernel supports these tensors: bf16 on CUDA, rows of a multiple of 16 bytes, at least one row.

    For others torch itself loops over the groups, and waits for the device to read their sizes, which the loop here
    knows (``_grouped_mm_fallback`` in ATen's GroupedMMUtils.h). So it does on GPUs other than Hopper and data center
    Blackwell, such as A100 and RTX 4090.
    """
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or not len(x):
        return False
    if compute_capability(x.device)[0] not in (9, 10):
        return False
    return all(n * x.element_size() % 16 == 0 for n in (x.shape[-1], other.shape[-1]))


def _lengths(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts).to(device, non_blocking=True)


def _ends(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(device, torch.int32, non_blocking=True)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...], out: Tensor | None = None
) -> Tensor:
    """Multiply ``(T, n)`` by ``(G, n, m)`` group by group: ``(T, m)``, written into ``out`` if given (CPU only)."""
    if out is None and _fits_kernel(x, weight):
        out = functional.grouped_mm(x.contiguous(), weight, offs=_ends(counts, x.device))
        return out if bias is None else out.add_(bias.repeat_interleave(_lengths(counts, x.device), 0))
    if out is None:
        out = x.new_empty(len(x), weight.shape[-1])
    for group, (rows, target) in enumerate(zip(x.split(counts), out.split(counts), strict=True)):
        if not len(rows):
            continue
        if bias is None:
            torch.mm(rows, weight[group], out=target)
        else:
            torch.addmm(bias[group], rows, weight[group], out=target)
    return out


def outer(grad: Tensor, x: Tensor, counts: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """Compute ``grad.T @ x`` group by group: ``(G, out, in)``, 0 for empty groups. ``out`` is as in `multiply`."""
    if kernel := out is None and _fits_kernel(x, grad.unsqueeze(0)):
        result = functional.grouped_mm(grad.t(), x.contiguous(), offs=_ends(counts, x.device))
    else:
        result = x.new_empty(len(counts), grad.shape[-1], x.shape[-1]) if out is None else out
    for target, gradient, rows in zip(result, grad.split(counts), x.split(counts), strict=True):
        if not len(rows):
            target.zero_()
        elif not kernel:
            torch.mm(gradient.t(), rows, out=target)
    return result


def sums(grad: Tensor, counts: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """Sum the rows of each group: ``(G, out)``, 0 for empty groups. ``out`` is as in `multiply`."""
    result = grad.new_empty(len(counts), grad.shape[-1]) if out is None else out
    for target, rows in zip(result, grad.split(counts), strict=True):
        torch.sum(rows, 0, out=target)
    return result
