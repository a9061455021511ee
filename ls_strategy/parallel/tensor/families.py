"""Tables from the names of transformer layers to their roles in a block.

A key is the last component of a module's name, or its last two. The names are those of Hugging Face transformers,
Meta's Llama, OpenAI's GPT-2, T5 and common teaching code.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Role = Literal["query", "key", "value", "fused", "out", "up", "down"]

ROLES: dict[str, Role] = {
    **dict.fromkeys(("q_proj", "query", "q", "wq", "to_q", "q_lin", "query_proj", "q_attn"), "query"),
    **dict.fromkeys(("k_proj", "key", "k", "wk", "to_k", "k_lin", "key_proj"), "key"),
    **dict.fromkeys(("v_proj", "value", "v", "wv", "to_v", "v_lin", "value_proj"), "value"),
    **dict.fromkeys(
        ("qkv", "c_attn", "query_key_value", "qkv_proj", "Wqkv", "wqkv", "in_proj", "W_pack", "to_qkv", "to_kv", "kv"),
        "fused",
    ),
    **dict.fromkeys(("o_proj", "out_lin", "to_out", "to_out.0"), "out"),
    **dict.fromkeys(
        ("gate_proj", "up_proj", "fc1", "c_fc", "w1", "w3", "wi", "wi_0", "wi_1", "dense_h_to_4h", "fc_in"), "up"
    ),
    **dict.fromkeys(("intermediate.dense", "lin1", "linear1", "feed_forward.up", "feed_forward.gate", "ffn"), "up"),
    **dict.fromkeys(("down_proj", "fc2", "w2", "dense_4h_to_h", "fc_out", "output.dense"), "down"),
    **dict.fromkeys(("lin2", "linear2", "feed_forward.down", "ffn_output"), "down"),
}
"""By the last two components of the name if these are listed, else by the last one."""

LAST_LAYERS = frozenset(("wo", "o", "c_proj", "proj", "dense", "out_proj", "output_proj", "output", "out", "down"))
"""Names of the last (row-parallel) layer of an attention or of a feed-forward; its siblings decide which."""

FIRST_LAYERS = frozenset(("gate", "up"))
"""Names of the first (column-parallel) layers of a feed-forward, if a sibling is in `LAST_LAYERS`."""

HEAD_COUNTS = frozenset(
    ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "num_query_heads", "n_local_heads")
)
"""Attributes that hold the number of query heads."""

KEY_HEAD_COUNTS = frozenset(
    ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_heads", "n_local_kv_heads", "n_kv_head")
)
"""Attributes that hold the number of key and value heads."""

GROUP_COUNTS = frozenset(("num_key_value_groups", "num_kv_groups", "n_rep", "num_queries_per_kv"))
"""Attributes that hold the number of query heads per key head."""

HEAD_SIZES = (
    *("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv", "dim_head", "dim_per_head"),
    *("d_head", "attn_head_size"),
)
"""Attributes that hold the number of features of one head."""

JOINT_WIDTHS = frozenset(("all_head_size", "inner_dim", "split_size", "q_size"))
"""Attributes that hold the number of features of all heads together."""

MODEL_WIDTHS = frozenset(("embed_dim", "hidden_size", "d_model", "n_embd", "dim", "width", "n_state"))
"""Attributes that hold the model's width, which often equals the width of all heads."""

UNSHARDED_WIDTHS = {"BloomAttention": ("hidden_size",)}
"""Class of the attention -> attributes of `MODEL_WIDTHS` that mean the model's width everywhere in its methods."""

HEAD_NORMS = frozenset(("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm", "q_ln", "k_ln"))
"""Norms of query and key over the features of one head, with parameters that all heads share."""

HEAD_TABLES = frozenset(("relative_attention_bias",))
"""Embeddings with one column per head (T5)."""

FUSED_PER_HEAD = frozenset(("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention"))
"""Classes of attention whose fused layer holds query, key and value head by head."""

FUSED_SECTIONS = frozenset(("GPT2Attention", "MptAttention", "modeling_openai.Attention"))
"""Classes of attention (with their file if the name is ambiguous) whose fused layer holds all queries, then all keys,
then all values."""

FUSED_BY_FLAGS = frozenset(("FalconAttention", "FalconFlashAttention2", "GPTBigCodeAttention"))
"""Classes of attention whose layout follows from ``new_decoder_architecture`` and ``multi_query``."""

PLAIN_LINEARS = frozenset(("FalconLinear",))
"""Subclasses of `nn.Linear` that override forward but compute the same."""

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters of transformers' expert modules: ``(E, 2 * inner, D)``, gate before up, and ``(E, D, inner)``."""

TOKEN_EMBEDDINGS = frozenset(
    (
        *("embed_tokens", "word_embeddings", "wte", "tok_embeddings", "token_embedding", "tok_emb", "embed_in"),
        *("shared", "token_embeddings", "embedding", "tokens", "embed"),
    )
)
"""Names of the token embedding, outside the blocks."""

OUTPUT_HEADS = frozenset(("lm_head", "output", "embed_out", "head", "decoder", "unembed", "to_logits"))
"""Names of the layer that computes the logits, outside the blocks."""


def role_of(name: str, siblings: Collection[str]) -> Role | None:
    """Return the role of the linear layer ``name`` (relative to its block), or None if it is unknown.

    ``siblings`` are the last components of the names of the linear layers next to it.

    >>> role_of("attention.output.dense", []), role_of("output.dense", []), role_of("attn.c_proj", ["c_attn"])
    ('out', 'down', 'out')
    """
    components = name.split(".")
    if len(components) > 2 and components[-3].endswith("attention") and components[-2:] == ["output", "dense"]:
        return "out"  # attention.output.dense, crossattention.output.dense
    for length in (2, 1):
        ending = ".".join(components[-length:])
        if length <= len(components) and ending in ROLES:
            return ROLES[ending]
    last, roles = components[-1], {ROLES.get(s) for s in siblings}
    if last in LAST_LAYERS:
        if roles & {"query", "fused"}:
            return "out"
        return "down" if "up" in roles or FIRST_LAYERS & set(siblings) else None
    return "up" if last in FIRST_LAYERS and LAST_LAYERS & set(siblings) else None
