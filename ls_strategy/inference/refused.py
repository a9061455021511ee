"""Models that tensor parallelism is known not to divide rightly, by the ``model_type`` of their configuration.

Most models that cannot be divided are refused by their layers (see `ls_strategy.parallel.plan_from_names`). Here are
those whose layers look as if they could, or of which more is to be said than a name of a layer.
"""

from __future__ import annotations

from torch import nn

from ls_strategy.errors import PlanError

_SHARED_TABLES = "its attention multiplies tables of relative positions by projections of whole queries and keys"
_WINDOWS = "its attention over windows reshapes by the number of heads of the configuration, in several functions"
_LISTS = "it keeps attentions, feed-forwards and norms in separate lists, which are not blocks"
_STATE = "it mixes tokens by a recurrent state over all channels, not by heads"

REASONS = {
    "codegen": "one matrix makes query, key and value of four groups of heads, interleaved for another hardware",
    "deberta": _SHARED_TABLES,
    "deberta-v2": _SHARED_TABLES,
    "flaubert": _LISTS,
    "fsmt": "its attention reshapes time-major tensors by the number of heads and the model's width",
    "led": _WINDOWS,
    "longformer": _WINDOWS,
    "mamba": _STATE,
    "mamba2": _STATE,
    "pegasus_x": "its encoder attends within blocks of tokens, reshaped by the width of all heads",
    "reformer": "its attention hashes tokens into buckets, at random and over all heads",
    "rwkv": _STATE,
    "xlm": _LISTS,
    "xlnet": "its query, key and value are bare parameters, used by einsum",
}
"""``model_type`` -> why."""


def refuse_known(model: nn.Module) -> None:
    """Refuse the models of `REASONS`.

    Raises:
        PlanError: the model, or a part of it, is one.
    """
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(kind, str) and kind in REASONS:
            raise PlanError(
                f"tensor_parallel_size: {type(module).__name__} ({kind}) cannot be divided: {REASONS[kind]}. Use "
                "tensor_parallel_size=1; quantize and offload make it smaller on one rank."
            )
