"""Linear layers whose weight rests in 8 or 4 bits.

A layer is changed in place: it keeps its identity, name, hooks and integers, so a layer that is divided over ranks
stays so. ``weight`` is a buffer of packed levels afterwards, and ``scales`` one of fp32: see `ls_strategy.ops.linear`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ls_strategy.errors import StateError
from ls_strategy.inference import rounding
from ls_strategy.ops.linear import linear_int4, linear_int8, pack, spell_out_int4, spell_out_int8
from ls_strategy.parallel.resolved_plan import is_conv1d

Format = Literal["int8", "int4"]

FORMATS: tuple[Format, ...] = ("int8", "int4")


class QuantizedLinear(nn.Module):
    """A linear layer with a weight in 8 or 4 bits. Made by `quantize_linear` only."""

    weight: Tensor
    """Packed levels: int8 (out, in), or for int4 (out, in / 2)."""

    scales: Tensor
    """(out,), or for int4 with zeros (out, in / group, 2); fp32."""

    bias: nn.Parameter | None
    features: tuple[int, int]
    """Output and input features, of this rank."""

    format: Format
    dtype: torch.dtype
    """That the weight had."""

    adds_bias: bool
    """False where a row layer's bias is added after the sum over the ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` (..., in) times the weight; (..., out), in the dtype of ``input``.

        Raises:
            StateError: it was called with integers.
        """
        if not input.is_floating_point():
            raise StateError(
                f"a layer quantised to {self.format} got {input.dtype} values: its caller casts them to the dtype of "
                "the weight. Leave this model in its own dtype: quantize=None."
            )
        out_features, in_features = self.features
        product = linear_int8 if self.format == "int8" else linear_int4
        y = product(input.reshape(-1, in_features), self.weight, self.scales)
        if self.adds_bias and self.bias is not None:
            y = y + self.bias
        return y.view(*input.shape[:-1], out_features)

    def dequantized(self) -> Tensor:
        """The weight (out, in) as the layer uses it, in the dtype that it had."""
        spell_out = spell_out_int8 if self.format == "int8" else spell_out_int4
        return spell_out(self.weight, self.scales).to(self.dtype)

    def extra_repr(self) -> str:
        """Features and format."""
        out_features, in_features = self.features
        group = f", group={in_features // self.scales.shape[1]}" if self.format == "int4" else ""
        return f"in_features={in_features}, out_features={out_features}, {self.format}{group}"


def quantize_linear(module: nn.Module, format: Format, *, adds_bias: bool = True) -> QuantizedLinear:
    """Round the weight of a linear layer (or transformers' Conv1D), and turn the layer into a `QuantizedLinear`.

    Args:
        module: with its weight on the device on which it will compute; changed in place.
        format: ``"int4"`` needs input features that a group of 32 shards.
        adds_bias: False where something else adds the bias.
    """
    weight = module.weight.detach()  # type: ignore[union-attr, operator]
    assert isinstance(weight, Tensor)
    full = weight.T.contiguous() if is_conv1d(module) else weight
    if format == "int8":
        packed, scales = rounding.round_int8(full)
    else:
        group = rounding.group_size(full.shape[1])
        assert group is not None, "the caller has asked"
        levels, scales = rounding.round_int4(full, group)
        packed = pack(levels)
    own = vars(module)
    own.pop("forward", None)  # of a row layer whose bias is added later
    own["_parameters"].pop("weight")
    own.update(features=tuple(full.shape), format=format, dtype=weight.dtype, adds_bias=adds_bias)
    module.__class__ = QuantizedLinear
    module.register_buffer("weight", packed)
    module.register_buffer("scales", scales)
    assert isinstance(module, QuantizedLinear)
    return module
