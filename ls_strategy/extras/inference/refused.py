"""Models that tensor parallelism cannot shard correctly, by the ``model_type`` of their configuration.

Most unsupported models are refused by their layers (see `ls_strategy.parallel.tensor.plan_from_names`). Listed here are
those whose layers look supported, or which need a longer explanation.
"""

from __future__ import annotations

from torch import nn

from ls_strategy.errors import PlanError

_SHARED_TABLES = "its attention multiplies tables of relative positions by projections of full queries and keys"
_WINDOWS = "its attention over windows reshapes by the number of heads of the configuration, in several functions"
_LISTS = "it keeps attentions, feed-forwards and norms in separate lists, which are not blocks"
_STATE = "it mixes tokens by a recurrent state over all channels, not by heads"

REASONS = {
    "codegen": "one matrix computes query, key and value of four groups of heads, interleaved for other hardware",
    "deberta": _SHARED_TABLES,
    "deberta-v2": _SHARED_TABLES,
    "flaubert": _LISTS,
    "fsmt": "its attention reshapes time-major tensors by the number of heads and the model's width",
    "led": _WINDOWS,
    "longformer": _WINDOWS,
    "mamba": _STATE,
    "mamba2": _STATE,
    "pegasus_x": "its encoder attends within blocks of tokens, reshaped by the width of all heads",
    "reformer": "its attention hashes tokens into random buckets over all heads",
    "rwkv": _STATE,
    "xlm": _LISTS,
    "xlnet": "its query, key and value are bare parameters, used by einsum",
}
"""``model_type`` -> the reason."""


def refuse_known(model: nn.Module) -> None:
    """Refuse the models of `REASONS`.

    Raises:
        PlanError: the model, or a submodule of it, is listed.
    """
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(kind, str) and kind in REASONS:
            raise PlanError(
                f"tensor_parallel_size: {type(module).__name__} ({kind}) cannot be sharded: {REASONS[kind]}. Set "
                "tensor_parallel_size=1; use quantize and offload to save memory on one rank."
            )
