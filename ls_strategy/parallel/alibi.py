"""Biases of attention scores that a model makes for all heads at once (ALiBi), cut to those of a rank's heads.

Press et al., "Train Short, Test Long", arXiv:2108.12409. Models make them once per forward, outside of the blocks, and
pass them into every attention: ``(H, 1, T)``, or ``(B * H, 1, T)`` with the heads of one text side by side, or
``(B, H, 1, T)``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.parallel.hooks import Hooks

ARGUMENTS = {
    "BloomAttention": ("alibi",),
    "MptAttention": ("position_bias",),
    "FalconAttention": ("alibi", "attention_mask"),
}
"""Class of the attention -> arguments of its forward: the biases, and a mask that holds them too."""

_HEADS = ("num_heads", "n_heads")


def cut_head_biases(model: nn.Module, axis: Axis, hooks: Hooks) -> int:
    """Cut the argument on its way into every attention that takes one; how many those are. Not collective.

    Args:
        model: divided: attentions count the heads of this rank.
        axis: ranks that hold the heads, as many each.
        hooks: that are removed with the division.
    """
    found = 0
    for module in model.modules():
        names = ARGUMENTS.get(type(module).__name__)
        if names is None or axis.size == 1:
            continue
        heads = next(int(vars(module)[key]) for key in _HEADS if key in vars(module))

        def before(
            _module: nn.Module, args: Any, kwargs: Any, names: tuple[str, ...] = names, heads: int = heads
        ) -> Any:
            if kwargs[names[0]] is None:  # Falcon with rotary positions
                return None
            return args, kwargs | {name: _own_heads(kwargs[name], heads, axis) for name in names}  # passed by name

        hooks.before(module, before)
        found += 1
    return found


def _own_heads(biases: Tensor, heads: int, axis: Axis) -> Tensor:
    """``(B, H, ..., T)``, or the first two as one."""
    if biases.dim() == 4:
        return biases.narrow(1, axis.rank * heads, heads)
    by_text = biases.unflatten(0, (-1, heads * axis.size))
    return by_text.narrow(1, axis.rank * heads, heads).flatten(0, 1)
