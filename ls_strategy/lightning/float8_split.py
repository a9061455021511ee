"""Products in fp8 of linear layers that tensor-parallel ranks share, with the scales of one process.

A scale is decided by the largest magnitude of a tensor (recipe ``tensorwise``) or of a row of it. Where the ranks of a
layer hold parts of what a scale covers, they agree on it first::

    column  y_r = x W_r^T       parts of   W (tensorwise),  dy
    row     y = sum x_r W_r^T   parts of   W,               x

So each number is rounded to the fp8 number that one process would round it to, on any number of ranks; products differ
in the order of their sums, as they do without fp8. There is one all-gather of magnitudes in forward and one in
backward, of 4 bytes per scale. These layers gather their weights in the parameters' dtype at stage 3.

Source: the casts and their order are those of torchao.float8 (``matmul_with_hp_or_float8_args``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ls_strategy.distributed.axis import Axis
from ls_strategy.parallel.regions import untraced


@dataclass(frozen=True)
class WeightSplit:
    """How a layer's weight, ``(out, in)``, is sharded."""

    axis: Axis
    dim: int
    """0: every rank has some outputs (column). 1: some inputs (row)."""

    sums_outside: bool
    """Whether tensor parallelism adds the bias, after the sum over the ranks."""


@dataclass(frozen=True)
class _Operand:
    """A matrix that is cast to fp8 before a product."""

    matrix: Tensor
    cast: Any
    """torchao's CastConfig."""

    role: Any
    """torchao's GemmInputRole."""

    along: int
    """The dimension that a scale covers, if it covers one."""

    split: int | None = None
    """The dimension of which each rank has a part."""


@untraced
def split_product(input: Tensor, weight: Tensor, split: WeightSplit, mm_config: Any, config: Any) -> Tensor:
    """Return this rank's ``input @ weight.t()``, multiplied in fp8. Collective over the ranks that share the layer.

    Args:
        input: ``(..., in)``, a part of the last dimension if the weight is split along its inputs.
        weight: this rank's part, ``(out, in)``.
        split: how the weight is sharded.
        mm_config: torchao's LinearMMConfig of the layer.
        config: torchao's Float8LinearConfig of the layer.
    """
    return _SplitProduct.apply(input, weight, split, mm_config, config)  # type: ignore[no-any-return]


class _SplitProduct(torch.autograd.Function):
    """The three products of a linear layer. Autograd saves what torchao saves: both operands as they are."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor, split: WeightSplit, mm_config: Any, config: Any
    ) -> Tensor:
        from torchao.float8.float8_training_tensor import GemmInputRole as Role

        ctx.save_for_backward(input, weight)
        ctx.split, ctx.mm_config, ctx.config = split, mm_config, config
        x, w = _in_float8(
            [
                _Operand(_rows(input), config.cast_config_input, Role.INPUT, -1, 1 if split.dim == 1 else None),
                _Operand(weight.t(), config.cast_config_weight, Role.WEIGHT, 0, 1 - split.dim),
            ],
            ctx,
        )
        return torch.mm(x, w).reshape(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from torchao.float8.float8_training_tensor import GemmInputRole as Role

        (input, weight), config, of = ctx.saved_tensors, ctx.config, ctx.split.dim
        dy, x = _rows(grad), _rows(input)
        columns = 1 if of == 0 else None
        dy_for_input, w, dy_for_weight, x_for_weight = _in_float8(
            [
                _Operand(dy, config.cast_config_grad_output, Role.GRAD_OUTPUT, -1, columns),
                _Operand(weight.t(), config.cast_config_weight_for_grad_input, Role.WEIGHT, -1, 1 - of),
                _Operand(dy, config.cast_config_grad_output_for_grad_weight, Role.GRAD_OUTPUT, 0, columns),
                _Operand(x, config.cast_config_input_for_grad_weight, Role.INPUT, 0, 1 if of == 1 else None),
            ],
            ctx,
        )
        to_input = torch.mm(dy_for_input, w.t()).reshape(input.shape)
        return to_input, torch.mm(dy_for_weight.t(), x_for_weight), None, None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _in_float8(operands: Sequence[_Operand], ctx: Any) -> list[Tensor]:
    """Cast operands, those whose cast is switched off excepted. Collective."""
    from torchao.float8.config import ScalingGranularity, ScalingType
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

    largest: dict[int, Tensor] = {}
    shared: list[int] = []
    for number, operand in enumerate(operands):
        if operand.cast.scaling_type is ScalingType.DISABLED:
            continue
        by_row = operand.cast.scaling_granularity is ScalingGranularity.AXISWISE
        along = operand.along if by_row else None
        largest[number] = tensor_to_amax(
            operand.matrix, scaling_granularity=operand.cast.scaling_granularity, axiswise_dim=along
        )
        if operand.split is not None and (along is None or along % 2 == operand.split):
            shared.append(number)
    if shared:
        flat = torch.cat([largest[number].float().flatten() for number in shared])
        agreed = _largest_of_all(flat, ctx.split.axis).split([largest[number].numel() for number in shared])
        for number, values in zip(shared, agreed, strict=True):
            largest[number] = values.view(largest[number].shape).to(largest[number].dtype)
    cast: list[Tensor] = []
    for number, operand in enumerate(operands):
        if number not in largest:
            cast.append(operand.matrix)
            continue
        to, by_row = operand.cast.target_dtype, largest[number].dim() > 0
        scale = amax_to_scale(largest[number], to, ctx.config.round_scales_to_power_of_2)
        along = operand.along if by_row else None
        cast.append(
            hp_tensor_and_scale_to_float8(operand.matrix, scale, to, ctx.mm_config, operand.role, axiswise_dim=along)
        )
    return cast


def _largest_of_all(magnitudes: Tensor, axis: Axis) -> Tensor:
    """Return the largest of each number, ``(numbers,)`` fp32 and not negative, over the ranks; NaN above all."""
    bits = magnitudes.view(torch.int32) & 0x7FFFFFFF  # in the order of the numbers, also those of NaN
    return axis.all_gather(bits[None], 0).amax(0).view(torch.float32)
