"""Cross-entropy of logits of which every rank has some columns: no rank ever holds all of them.

::

    loss = log(sum_v exp(x_v)) - x_target        the sum goes over the ranks; one of them has the target's column

As section 3 of Shoeybi et al., "Megatron-LM", arXiv:1909.08053. Four numbers per token travel at most, whatever the
size of the vocabulary, and none in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.parallel.dim_shard import DimShard, unsharded


@dataclass(frozen=True)
class TokenLoss:
    """What `token_losses` needs to know besides logits and targets."""

    axis: Axis
    """Ranks with the other columns."""

    start: int
    """This rank's first column."""

    classes: int
    """Columns on all ranks."""

    ignore_index: int = -100
    """Target of tokens without a loss."""

    smoothing: float = 0.0
    """Weight of the mean over all classes, as ``label_smoothing`` of `torch.nn.functional.cross_entropy`."""

    def locate(self, target: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Which targets are among this rank's ``length`` columns, and at which of them (0 for the others)."""
        column = target - self.start
        here = (column >= 0) & (column < length)
        return here, torch.where(here, column, 0)


def token_losses(logits: Tensor, target: Tensor, loss: TokenLoss) -> Tensor:
    """The loss of every token, ``(tokens,)``, fp32 (fp64 of fp64), the same bits on every rank. Collective.

    Args:
        logits: ``(tokens, columns)`` of this rank, any floating dtype. A rank may have no column at all.
        target: ``(tokens,)``, indices into all columns. NaN is the loss of one that is out of range.
        loss: the rest.

    Traffic:
        ``3 * tokens`` elements through an all-reduce and ``tokens`` through an all-gather; none in backward.
    """
    return _TokenLosses.apply(logits, target, loss)  # type: ignore[no-any-return]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, loss: TokenLoss) -> Tensor:
        length = logits.shape[1]
        x = logits.detach().to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        highest = x.amax(1) if length else x.new_full(x.shape[:1], -torch.inf)
        highest = loss.axis.all_gather(highest[None], 0).amax(0)
        x -= highest[:, None]
        here, column = loss.locate(target, length)
        at_target = x.gather(1, column[:, None])[:, 0] if length else torch.zeros_like(highest)
        terms = torch.stack((torch.where(here, at_target, 0), x.sum(1), x.exp_().sum(1)))
        at_target, total, exponentials = loss.axis.all_reduce(terms)
        log_sum = exponentials.log()
        result = log_sum - at_target
        if loss.smoothing:
            result = (1 - loss.smoothing) * result + loss.smoothing * (log_sum - total / loss.classes)
        result = torch.where((target < 0) | (target >= loss.classes), torch.nan, result)
        ctx.save_for_backward(logits, highest, log_sum, target)
        ctx.loss = loss
        return result.masked_fill(target == loss.ignore_index, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, highest, log_sum, target = ctx.saved_tensors
        loss: TokenLoss = ctx.loss
        result = logits.to(grad.dtype, copy=True)
        result -= highest[:, None]  # one after the other: their sum would be rounded
        result -= log_sum[:, None]
        result.exp_()
        if loss.smoothing:
            result -= loss.smoothing / loss.classes
        if result.shape[1]:
            here, column = loss.locate(target, result.shape[1])
            result.scatter_add_(1, column[:, None], here[:, None] * result.new_tensor(loss.smoothing - 1))
        result *= torch.where(target == loss.ignore_index, 0, grad)[:, None]
        return result.to(logits.dtype), None, None


def sum_over_ranks(value: Tensor, axis: Axis) -> Tensor:
    """Sum ``value`` over ranks that saw different tokens; the gradient goes back ``axis.size`` times. Collective.

    Parameters' gradients are averaged over these ranks later, as over data-parallel ones, so that each rank must give
    ``axis.size`` times its own part.
    """
    return _SumOverRanks.apply(value, axis)  # type: ignore[no-any-return]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        ctx.scale = axis.size
        return axis.all_reduce(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad * ctx.scale, None


@dataclass(frozen=True)
class Options:
    """The options of `torch.nn.functional.cross_entropy`."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    size_average: bool | None = None
    reduce: bool | None = None


def cross_entropy(
    logits: Tensor, part: Tensor, cuts: Sequence[DimShard], target: Any, weight: Any, options: Options
) -> Any:
    """`torch.nn.functional.cross_entropy` on the parts, of targets that are indices of classes. Collective.

    Args:
        logits: looks like the unsharded: ``(N, V)`` or ``(N, V, ...)``.
        part: of it.
        cuts: of it.
        target: whole, ``(N,)`` or ``(N, ...)``.
        weight: of the classes, ``(V,)``, or None.
        options: all others.

    Returns:
        The loss, plain and the same bits on every rank; ``NotImplemented`` for what takes the whole logits.

    Raises:
        IndexError: a target is out of range. On the CPU; elsewhere, where it would mean to wait, the loss is NaN.
    """
    if not (_are_indices(logits, target) and _is_possible(options, cuts) and _is_usable(weight, logits, options)):
        return NotImplemented
    classes, ignored = logits.shape[1], target == options.ignore_index
    _check_range(target, ~ignored, classes)
    tokens = [cut.moved(cut.dim - (cut.dim > 1)) for cut in cuts if cut.dim != 1]
    mine = target
    for cut in tokens:
        mine = cut.part(mine)
    losses = token_losses(*_rows(part, mine), _how(cuts, classes, options)).view(mine.shape)
    if weight is not None:
        losses = losses * _weights(weight, mine, options.ignore_index, losses.dtype)
    dtype = _loss_dtype(logits)
    if options.reduction == "none":
        return unsharded(losses, tokens).to(dtype)
    total = losses.sum()
    for cut in tokens:
        total = sum_over_ranks(total, cut.axis)
    if options.reduction == "mean":
        counts = ~ignored if weight is None else _weights(weight, target, options.ignore_index, total.dtype)
        total = total / counts.sum()
    return total.to(dtype)


def _rows(part: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Classes last, and one dimension of tokens."""
    rows = part.movedim(1, -1)
    return rows.reshape(target.numel(), rows.shape[-1]), target.reshape(-1)


def _how(cuts: Sequence[DimShard], classes: int, options: Options) -> TokenLoss:
    columns = next((cut for cut in cuts if cut.dim == 1), None)
    axis, start = (Axis("alone"), 0) if columns is None else (columns.axis, columns.start)
    return TokenLoss(axis, start, classes, options.ignore_index, options.label_smoothing)


def _is_possible(options: Options, cuts: Sequence[DimShard]) -> bool:
    modern = options.size_average is None and options.reduce is None and options.reduction in ("none", "mean", "sum")
    return modern and all(cut.plain for cut in cuts if cut.dim == 1)


def _are_indices(logits: Any, target: Any) -> bool:
    shape = tuple(logits.shape)
    whole = type(target) is Tensor and not target.is_floating_point()
    return whole and len(shape) > 1 and tuple(target.shape) == (shape[0], *shape[2:])


def _is_usable(weight: Any, logits: Any, options: Options) -> bool:
    if weight is None:
        return True
    usable = type(weight) is Tensor and not weight.requires_grad and tuple(weight.shape) == (logits.shape[1],)
    return usable and not options.label_smoothing


def _check_range(target: Tensor, counted: Tensor, classes: int) -> None:
    """As torch does; on other devices, where it would mean to wait for them, the loss becomes NaN instead."""
    if target.device.type == "cpu":
        wrong = target[counted & ((target < 0) | (target >= classes))]
        if wrong.numel():
            raise IndexError(f"Target {wrong[0].item()} is out of bounds.")


def _weights(weight: Tensor, target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Of every token, by its class; 0 of those that do not count."""
    ignored = target == ignore_index
    return weight.to(dtype)[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)


def _loss_dtype(logits: Tensor) -> torch.dtype:
    """What the loss of a plain tensor would have here, with autocast or without."""
    sample = torch.zeros((1, 2), dtype=logits.dtype, device=logits.device)
    return functional.cross_entropy(sample, torch.zeros(1, dtype=torch.long, device=logits.device)).dtype
