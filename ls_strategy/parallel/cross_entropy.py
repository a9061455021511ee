"""Cross-entropy of vocabulary-parallel logits: no rank ever holds all columns.

::

    loss = log(sum_v exp(x_v)) - x_target        the sum goes over the ranks; one of them holds the target's column

At most four numbers per token are sent, whatever the size of the vocabulary, and none in backward.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ls_strategy._torch import is_fake
from ls_strategy.distributed.axis import Axis
from ls_strategy.parallel.dim_shard import DimShard, unshard


@dataclass(frozen=True)
class TokenLoss:
    """The axis, the columns and the options of `token_losses`."""

    axis: Axis
    """Ranks that hold the other columns."""

    start: int
    """Index of this rank's first column."""

    classes: int
    """Number of columns on all ranks."""

    ignore_index: int = -100
    """Target of tokens without a loss."""

    smoothing: float = 0.0
    """Weight of the mean over all classes: ``label_smoothing`` of `torch.nn.functional.cross_entropy`."""

    z_weight: float = 0.0
    """Weight of the squared logarithm of the sum of exponentials (Chowdhery et al., "PaLM", arXiv:2204.02311)."""

    def locate(self, target: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return which targets are among this rank's ``length`` columns, and their local columns (0 for the others)."""
        column = target - self.start
        here = (column >= 0) & (column < length)
        return here, torch.where(here, column, 0)

    def of_terms(self, target: Tensor, log_sum: Tensor, at_target: Tensor, total: Tensor, log_z: Tensor) -> Tensor:
        """Return the loss of every token, ``(tokens,)`` as all arguments; NaN where the target is out of range.

        ``log_sum``, the logit ``at_target`` and the ``total`` of logits may be relative to a logit; ``log_z`` is not.
        """
        result = log_sum - at_target
        if self.smoothing:
            result = (1 - self.smoothing) * result + self.smoothing * (log_sum - total / self.classes)
        if self.z_weight:
            result = result + self.z_weight * log_z**2
        result = torch.where((target < 0) | (target >= self.classes), torch.nan, result)
        return result.masked_fill(target == self.ignore_index, 0)

    def subtract_target(self, softmax: Tensor, target: Tensor, log_z: Tensor) -> None:
        """Turn the softmax ``(tokens, columns)`` into the gradient of the loss, in place."""
        if self.z_weight:
            softmax *= (1 + 2 * self.z_weight * log_z)[:, None]
        if self.smoothing:
            softmax -= self.smoothing / self.classes
        if softmax.shape[1]:
            here, column = self.locate(target, softmax.shape[1])
            softmax.scatter_add_(1, column[:, None], here[:, None] * softmax.new_tensor(self.smoothing - 1))


def token_losses(logits: Tensor, target: Tensor, loss: TokenLoss) -> Tensor:
    """Return the loss of every token, ``(tokens,)``, in fp32 (fp64 for fp64), bitwise equal on all ranks. Collective.

    Args:
        logits: ``(tokens, columns)`` of this rank, any floating dtype; possibly without columns.
        target: ``(tokens,)``, indices into all columns. The loss of one that is out of range is NaN.
        loss: axis, columns and options.

    Traffic:
        ``3 * tokens`` elements through an all-reduce and ``tokens`` through an all-gather; none in backward.
    """
    own = getattr(logits, "token_losses", None)
    if own is not None:  # logits that are computed in chunks: see `losses.deferred`
        return own(target, loss)  # type: ignore[no-any-return]
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
        ctx.save_for_backward(logits, highest, log_sum, target)
        ctx.loss = loss
        return loss.of_terms(target, log_sum, at_target, total, log_sum + highest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, highest, log_sum, target = ctx.saved_tensors
        loss: TokenLoss = ctx.loss
        result = logits.to(grad.dtype, copy=True)
        result -= highest[:, None]  # subtract separately: the sum of both would be rounded
        result -= log_sum[:, None]
        result.exp_()
        loss.subtract_target(result, target, log_sum + highest)
        result *= torch.where(target == loss.ignore_index, 0, grad)[:, None]
        return result.to(logits.dtype), None, None


def sum_over_ranks(value: Tensor, axis: Axis) -> Tensor:
    """Sum ``value`` over ranks that hold different tokens; backward multiplies by ``axis.size``. Collective.

    Gradients of parameters are averaged over these ranks later, as over data-parallel ones, so each rank must
    contribute ``axis.size`` times the gradient of its own tokens.
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
    z_loss: float = 0.0
    """Weight of the squared logarithm of the sum of exponentials; torch has no such option."""


def cross_entropy(
    logits: Tensor, local: Tensor, shards: Sequence[DimShard], target: Any, weight: Any, options: Options
) -> Any:
    """Compute `torch.nn.functional.cross_entropy` from the shards, for targets that are class indices. Collective.

    Args:
        logits: any tensor with the full shape, ``(N, V)`` or ``(N, V, ...)``.
        local: this rank's shard of the logits.
        shards: how the logits are sharded.
        target: full, ``(N,)`` or ``(N, ...)``.
        weight: ``(V,)``, or None.
        options: all other options.

    Returns:
        The loss, a plain tensor, bitwise equal on all ranks; ``NotImplemented`` where the full logits are needed.

    Raises:
        IndexError: A target on the CPU is out of range. On other devices, where a check would synchronise, the loss is
            NaN.
    """
    if not (_are_indices(logits, target) and _is_possible(options, shards) and _is_usable(weight, logits, options)):
        return NotImplemented
    classes, ignored = logits.shape[1], target == options.ignore_index
    _check_range(target, ~ignored, classes)
    token_shards = [shard.with_dim(shard.dim - (shard.dim > 1)) for shard in shards if shard.dim != 1]
    local_target = target
    for shard in token_shards:
        local_target = shard.shard(local_target)
    losses = token_losses(*_rows(local, local_target), _token_loss(shards, classes, options)).view(local_target.shape)
    if weight is not None:
        losses = losses * _weights(weight, local_target, options.ignore_index, losses.dtype)
    dtype = _loss_dtype(logits)
    if options.reduction == "none":
        return unshard(losses, token_shards).to(dtype)
    total = losses.sum()
    for shard in token_shards:
        total = sum_over_ranks(total, shard.axis)
    if options.reduction == "mean":
        counts = ~ignored if weight is None else _weights(weight, target, options.ignore_index, total.dtype)
        total = total / counts.sum()
    return total.to(dtype)


def _rows(local: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits as ``(tokens, columns)`` and targets as ``(tokens,)``."""
    rows = local.movedim(1, -1)
    return rows.reshape(target.numel(), rows.shape[-1]), target.reshape(-1)


def _token_loss(shards: Sequence[DimShard], classes: int, options: Options) -> TokenLoss:
    columns = next((shard for shard in shards if shard.dim == 1), None)
    axis, start = (Axis("alone"), 0) if columns is None else (columns.axis, columns.start)
    return TokenLoss(axis, start, classes, options.ignore_index, options.label_smoothing, options.z_loss)


def _is_possible(options: Options, shards: Sequence[DimShard]) -> bool:
    modern = options.size_average is None and options.reduce is None and options.reduction in ("none", "mean", "sum")
    return modern and all(shard.plain for shard in shards if shard.dim == 1)


def _are_indices(logits: Any, target: Any) -> bool:
    shape = tuple(logits.shape)
    plain = (type(target) is Tensor or is_fake(target)) and not target.is_floating_point()
    return plain and len(shape) > 1 and tuple(target.shape) == (shape[0], *shape[2:])


def _is_usable(weight: Any, logits: Any, options: Options) -> bool:
    if weight is None:
        return True
    usable = type(weight) is Tensor and not weight.requires_grad and tuple(weight.shape) == (logits.shape[1],)
    return usable and not options.label_smoothing


def _check_range(target: Tensor, counted: Tensor, classes: int) -> None:
    """Raise what torch raises on the CPU. On other devices a check would synchronise; there the loss becomes NaN."""
    if target.device.type == "cpu" and not is_fake(target):
        wrong = target[counted & ((target < 0) | (target >= classes))]
        if wrong.numel():
            raise IndexError(f"Target {wrong[0].item()} is out of bounds.")


def _weights(weight: Tensor, target: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of every token's class, 0 for tokens without a loss."""
    ignored = target == ignore_index
    return weight.to(dtype)[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)


def _loss_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype of torch's loss for these logits, with or without autocast."""
    sample = torch.zeros((1, 2), dtype=logits.dtype, device=logits.device)
    return functional.cross_entropy(sample, torch.zeros(1, dtype=torch.long, device=logits.device)).dtype
