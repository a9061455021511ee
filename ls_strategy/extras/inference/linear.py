"""Linear layers with 8-bit or 4-bit weights.

A layer is converted in place and keeps its identity, name, hooks and integer attributes, so a tensor-parallel layer
stays tensor parallel. ``weight`` becomes a buffer of packed levels and ``scales`` an fp32 buffer: see
`ls_strategy.ops.linear`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ls_strategy.blocks import is_conv1d
from ls_strategy.errors import StateError
from ls_strategy.extras.inference import rounding
from ls_strategy.ops.linear import linear_int4, linear_int8, pack, spell_out_int4, spell_out_int8

Format = Literal["int8", "int4"]

FORMATS: tuple[Format, ...] = ("int8", "int4")


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight. Created by `quantize_linear` only."""

    weight: Tensor  # packed levels: int8 (out, in), or for int4 (out, in / 2)
    scales: Tensor  # fp32: (out,), or for int4 scales and zeros (out, in / group, 2)
    bias: nn.Parameter | None
    features: tuple[int, int]  # output and input features on this rank
    format: Format
    dtype: torch.dtype  # the weight's dtype before quantization
    adds_bias: bool  # false for a row layer whose bias is added after the sum over ranks

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``input`` (..., in) by the weight. Returns (..., out) in the dtype of ``input``.

        Raises:
            StateError: ``input`` is an integer tensor.
        """
        if not input.is_floating_point():
            raise StateError(
                f"Got {input.dtype} input for a linear layer quantized to {self.format}: its caller casts them to the "
                "dtype of the weight. Set quantize=None for this model."
            )
        out_features, in_features = self.features
        product = linear_int8 if self.format == "int8" else linear_int4
        y = product(input.reshape(-1, in_features), self.weight, self.scales)
        if self.adds_bias and self.bias is not None:
            y = y + self.bias
        return y.view(*input.shape[:-1], out_features)

    def dequantized(self) -> Tensor:
        """Return the dequantized weight (out, in) in its original dtype."""
        spell_out = spell_out_int8 if self.format == "int8" else spell_out_int4
        return spell_out(self.weight, self.scales).to(self.dtype)

    def extra_repr(self) -> str:
        """Return features and format."""
        out_features, in_features = self.features
        group = f", group={in_features // self.scales.shape[1]}" if self.format == "int4" else ""
        return f"in_features={in_features}, out_features={out_features}, {self.format}{group}"


def quantize_linear(module: nn.Module, format: Format, *, adds_bias: bool = True) -> QuantizedLinear:
    """Quantize a linear layer (or transformers' Conv1D) in place, which makes it a `QuantizedLinear`.

    Args:
        module: the layer, with its weight on the device on which it computes.
        format: ``"int4"`` requires input features that are a multiple of 32.
        adds_bias: False if other code adds the bias.
    """
    weight = module.weight.detach()  # type: ignore[union-attr, operator]
    assert isinstance(weight, Tensor)
    full = weight.T.contiguous() if is_conv1d(module) else weight
    if format == "int8":
        packed, scales = rounding.round_int8(full)
    else:
        group = rounding.group_size(full.shape[1])
        assert group is not None, "the caller has checked the group size"
        levels, scales = rounding.round_int4(full, group)
        packed = pack(levels)
    own = vars(module)
    own.pop("forward", None)  # set on a row layer whose bias is added later
    own["_parameters"].pop("weight")
    own.update(features=tuple(full.shape), format=format, dtype=weight.dtype, adds_bias=adds_bias)
    module.__class__ = QuantizedLinear
    module.register_buffer("weight", packed)
    module.register_buffer("scales", scales)
    assert isinstance(module, QuantizedLinear)
    return module
