"""Per-head biases of attention scores (ALiBi) that a model computes once for all heads: slice them to local heads.

Models compute these biases once per forward, outside the blocks, and pass them into every attention. Their shape is
``(H, 1, T)``, ``(B * H, 1, T)`` with the heads of one sequence next to each other, or ``(B, H, 1, T)``.

Press et al., "Train Short, Test Long", arXiv:2108.12409.
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
"""Class of the attention -> arguments of its forward that hold one entry per head, the biases first."""

_HEADS = ("num_heads", "n_heads")


def slice_head_biases(model: nn.Module, axis: Axis, hooks: Hooks) -> None:
    """Slice the biases on their way into every attention that takes them. Not collective.

    The attentions of ``model`` must hold the local number of heads already, the same number on every rank.
    """
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
            return args, kwargs | {name: _local_heads(kwargs[name], heads, axis) for name in names}

        hooks.before(module, before)


def _local_heads(biases: Tensor, heads: int, axis: Axis) -> Tensor:
    """Slice ``(B, H, ..., T)``, or ``(B * H, ..., T)``, to this rank's ``heads``."""
    if biases.dim() == 4:
        return biases.narrow(1, axis.rank * heads, heads)
    by_sequence = biases.unflatten(0, (-1, heads * axis.size))
    return by_sequence.narrow(1, axis.rank * heads, heads).flatten(0, 1)
