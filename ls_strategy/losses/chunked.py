"""Cross-entropy of a linear layer's logits, computed for a few tokens at a time and again in backward.

::

    hidden (N, D) ─chunk─► (n, D) ─weight─► logits (n, V) ─► log-sum-exp, target's logit      kept: 2 N numbers
                                                                                              freed: the logits
    backward: the same logits again ─► (softmax - one-hot) ─► gradients of hidden (n, D), weight (V, D), bias (V)

Backward costs one matrix product more than with stored logits, three instead of two. Nothing is approximated, and any
gradient of the tokens' losses may arrive. Sums over tokens (of the weight's gradient) are in fp32 for 16-bit weights.

Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009; Hsu et al., "Liger Kernel",
arXiv:2410.10989, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ls_strategy.parallel.cross_entropy import TokenLoss

MIN_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 256 << 20
CHUNKS = 32
"""Without a size, logits are computed in this many chunks, each of them between the two limits."""

Change = Callable[[Tensor], Tensor]
"""An operation that acts on each logit alone."""


@dataclass(frozen=True)
class Product:
    """Computation of logits from hidden states: a matrix product in one dtype, then operations on each logit."""

    dtype: torch.dtype
    """Of the product: autocast's, if it was active."""

    autocast: bool
    """Whether the operations run with autocast to ``dtype``."""

    changes: tuple[Change, ...] = ()

    chunk_bytes: int | None = None
    """Size of a chunk's logits in fp32. None: 1/32 of all, between 1 MiB and 256 MiB."""

    def rows(self, tokens: int, columns: int) -> int:
        """Return the number of tokens in a chunk.

        >>> Product(torch.float32, False, chunk_bytes=4096).rows(100, 256)
        4
        """
        one = 4 * max(columns, 1)
        size = self.chunk_bytes
        if size is None:
            size = min(max(tokens * one // CHUNKS, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        return max(size // one, 1)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``(..., V)`` of ``hidden``, ``(..., D)``. Differentiable where gradients are enabled."""
        with torch.autocast(hidden.device.type, enabled=False):
            result = functional.linear(
                hidden.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
            )
        return self.changed(result)

    def changed(self, logits: Tensor) -> Tensor:
        """Apply the operations."""
        if not self.changes:
            return logits
        dtype = self.dtype if self.autocast else None
        with torch.autocast(logits.device.type, dtype=dtype, enabled=self.autocast):
            for change in self.changes:
                logits = change(logits)
        return logits


def token_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None, product: Product, loss: TokenLoss
) -> Tensor:
    """Return the loss of every token, ``(N,)``, in fp32 (fp64 for fp64), bitwise equal on all ranks. Collective.

    The logits of ``product.rows`` tokens are held at a time.

    Args:
        hidden: ``(N, D)``.
        weight: this rank's rows ``(V / size, D)`` of the output layer.
        bias: ``(V / size,)``, or None.
        target: ``(N,)``, indices into all columns. The loss of one that is out of range is NaN. None: return the
            logarithm of the sum of exponentials instead.
        product: dtype, operations and size of chunks.
        loss: axis, columns and options.

    Traffic:
        ``3 * N`` elements through an all-reduce and ``N`` through an all-gather; none in backward.
    """
    return _Losses.apply(hidden, weight, bias, target, product, loss)  # type: ignore[no-any-return]


def highest_columns(hidden: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Return the column of the highest logit of every token, ``(N,)``. Local, without a gradient."""
    with torch.no_grad():
        found = [
            product.logits(h, weight, bias).argmax(-1) for h in hidden.split(product.rows(*_shape(hidden, weight)))
        ]
    return torch.cat(found)


def _shape(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    return hidden.shape[0], weight.shape[0]


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor | None, product: Product,
        loss: TokenLoss,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.product, ctx.loss = product, loss
        rows = product.rows(*_shape(hidden, weight))
        operand, added = _operands(weight, bias, product)
        parts = [
            _statistics(product.logits(h, operand, added), t, loss)
            for h, t in _chunks(hidden, target, rows)
        ]  # fmt: skip
        highest, terms = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        log_sum, at_target, total = _over_ranks(highest, terms, loss)
        ctx.log_sum = log_sum
        if target is None:
            return log_sum.clone()
        return loss.of_terms(target, log_sum, at_target, total, log_sum)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, target = ctx.saved_tensors
        product: Product = ctx.product
        wants = ctx.needs_input_grad
        rows = product.rows(*_shape(hidden, weight))
        operand, added = _operands(weight, bias, product)
        sums = _sum_dtype(product.dtype)
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grad_weight = weight.new_zeros(weight.shape, dtype=sums) if wants[1] else None
        grad_bias = weight.new_zeros(weight.shape[0], dtype=sums) if bias is not None and wants[2] else None
        plain = replace(product, changes=())
        start = 0
        for h, t in _chunks(hidden, target, rows):
            stop = start + len(h)
            logits = plain.logits(h, operand, added)
            of_logits = _gradient(logits, t, grad[start:stop], ctx.log_sum[start:stop], product, ctx.loss)
            del logits
            if grad_hidden is not None:
                grad_hidden[start:stop] = of_logits @ operand
            if grad_weight is not None:
                _add_product(grad_weight, of_logits, h.to(product.dtype))
            if grad_bias is not None:
                grad_bias += of_logits.sum(0, dtype=sums)
            del of_logits  # before the next chunk's logits exist
            start = stop
        grad_weight, grad_bias = (None if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _chunks(hidden: Tensor, target: Tensor | None, rows: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    parts = hidden.split(rows)
    yield from zip(parts, [None] * len(parts) if target is None else target.split(rows), strict=True)


def _operands(weight: Tensor, bias: Tensor | None, product: Product) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in the dtype of the product, cast once for all chunks."""
    return weight.detach().to(product.dtype), None if bias is None else bias.detach().to(product.dtype)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _statistics(logits: Tensor, target: Tensor | None, loss: TokenLoss) -> tuple[Tensor, Tensor]:
    """Return the highest logit ``(n,)``; and ``(3, n)``: the target's logit, the sum, and the sum of exponentials.

    The last is relative to the highest logit of this rank.
    """
    x = logits.to(_sum_dtype(logits.dtype))
    length = x.shape[1]
    highest = x.amax(1) if length else x.new_full(x.shape[:1], -torch.inf)
    nothing = torch.zeros_like(highest)
    at_target = total = nothing
    if target is not None and length:
        here, column = loss.locate(target, length)
        at_target = torch.where(here, x.gather(1, column[:, None])[:, 0], 0)
        total = x.sum(1) if loss.smoothing else nothing
    if not length:
        return highest, torch.stack((nothing, nothing, nothing))
    # Out of place: selective recompute may have kept the product.
    return highest, torch.stack((at_target, total, (x - highest[:, None]).exp_().sum(1)))


def _over_ranks(highest: Tensor, terms: Tensor, loss: TokenLoss) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithm of the sum of exponentials, the target's logit and the sum of logits over all columns."""
    if loss.axis.size == 1:
        return terms[2].log() + highest, terms[0], terms[1]
    of_all = loss.axis.all_gather(highest[None], 0).amax(0)
    terms[2] *= (highest - of_all).exp()
    at_target, total, exponentials = loss.axis.all_reduce(terms)
    return exponentials.log() + of_all, at_target, total


def _gradient(
    logits: Tensor, target: Tensor | None, grad: Tensor, log_sum: Tensor, product: Product, loss: TokenLoss
) -> Tensor:
    """Return the gradient of a chunk's logits before the operations, ``(n, columns)``, in their dtype.

    ``logits`` are those before the operations; they are overwritten.
    """
    changed = logits
    if product.changes:
        logits.requires_grad_()
        with torch.enable_grad():
            changed = product.changed(logits)
    x = changed.detach().to(_sum_dtype(changed.dtype), copy=bool(product.changes))
    x -= log_sum[:, None]
    x.exp_()
    if target is not None:
        loss.subtract_target(x, target, log_sum)
        grad = torch.where(target == loss.ignore_index, 0, grad)
    x *= grad[:, None]
    x = x.to(changed.dtype)
    return torch.autograd.grad(changed, logits, x)[0] if product.changes else x


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    else:
        total += left.T @ right
