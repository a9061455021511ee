"""Export a trained GPT as a Hugging Face ``LlamaForCausalLM``.

::

    python -m recipes.gpt.huggingface CHECKPOINT OUT_DIR

With rotary positions and SwiGLU the network is Llama's: same RMSNorm, no biases, rotary pairs (i, i + N/2). Only names
differ, and fused matrices are split. ``OUT_DIR`` gets ``config.json`` and the weights as safetensors;
``LlamaForCausalLM.from_pretrained(OUT_DIR)`` loads it. Neither package is needed here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ls_strategy.checkpoint.safetensors import MAX_SHARD_BYTES, FilePart, Rename, export_safetensors
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.errors import ConfigError, LSError
from recipes.gpt.network import GPTConfig, SwiGLU

PREFIX = "model."
"""Prefix of the network's names in `GPTModule`."""

IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
"""Weights of a block that are only renamed."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def llama_config(config: GPTConfig) -> dict[str, Any]:
    """Return the network's ``config.json``.

    Raises:
        ConfigError: Llama cannot express the network.
    """
    wrong = [
        f"{name}={getattr(config, name)!r} (Llama has {llamas!r})"
        for name, llamas in (("positions", "rotary"), ("mlp", "swiglu"))
        if getattr(config, name) != llamas
    ]
    if wrong:
        raise ConfigError(
            f"LlamaForCausalLM cannot express this GPT: {' and '.join(wrong)}. Train with Llama's, or use "
            "ls-strategy consolidate, which writes one file, or safetensors under the original names."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": mlp_width(config),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.block_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": config.rotary_base,  # transformers before 5; later ones read the next line
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def mlp_width(config: GPTConfig) -> int:
    """Return the hidden units of the MLP."""
    with torch.device("meta"):
        return SwiGLU(config).down.in_features


def llama_names(config: GPTConfig) -> Rename:
    """Map names in `GPTModule`'s state dict to names in ``LlamaForCausalLM``'s, with the rows that each gets."""
    head, hidden = config.head_width, mlp_width(config)
    query, keys = config.num_heads * head, config.kv_heads * head
    outside = {
        "token_embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight",
    }

    def rename(name: str, shape: tuple[int, ...]) -> Sequence[FilePart]:
        bare = name.removeprefix(PREFIX)
        if bare in outside:
            return [FilePart(outside[bare])]
        place, _, inside = bare.partition(".")
        index, _, inner = inside.partition(".")
        layer = f"model.layers.{index}"
        if place == "blocks" and inner in IN_BLOCK:
            return [FilePart(f"{layer}.{IN_BLOCK[inner]}")]
        if place == "blocks" and inner == "attention.query_key_value.weight":
            return [
                FilePart(f"{layer}.self_attn.q_proj.weight", (0, query)),
                FilePart(f"{layer}.self_attn.k_proj.weight", (query, query + keys)),
                FilePart(f"{layer}.self_attn.v_proj.weight", (query + keys, query + 2 * keys)),
            ]
        if place == "blocks" and inner == "mlp.gate_up.weight":
            return [
                FilePart(f"{layer}.mlp.gate_proj.weight", (0, hidden)),
                FilePart(f"{layer}.mlp.up_proj.weight", (hidden, 2 * hidden)),
            ]
        raise ConfigError(f"Got {name}, which is not a weight of the GPT in recipes/gpt/network.py.")

    return rename


def export(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    average: bool = False,
    force: bool = False,
) -> None:
    """Write ``config.json`` and safetensors.

    Args:
        checkpoint: folder or file of a trained `GPTModule`.
        target: folder to create.
        dtype: dtype of the weights; None: as saved.
        max_shard_bytes: maximum file size.
        average: write the average of `ShardedEMA` instead of the weights.
        force: replace ``target`` if it exists.

    Raises:
        ConfigError: Llama cannot express the network, it is not a checkpoint of a GPT, or ``target`` exists.
        CheckpointError: the checkpoint is incomplete, or ``target`` could not be written.
    """
    saved = read_checkpoint(checkpoint, weights_only=True)
    hyperparameters = saved.get("hyper_parameters", {}).get("config")
    if not isinstance(hyperparameters, dict):
        raise ConfigError(f"Got {checkpoint}, which has no hyperparameter 'config': it was not saved by GPTModule.")
    config = GPTConfig(**hyperparameters)
    text = llama_config(config)
    kept = next((t.dtype for t in saved["state_dict"].values() if isinstance(t, torch.Tensor)), torch.float32)
    text["torch_dtype"] = str(dtype or kept).removeprefix("torch.")
    export_safetensors(
        checkpoint,
        target,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        rename=llama_names(config),
        average=average,
        extra_files={"config.json": json.dumps(text, indent=2) + "\n"},
        force=force,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.gpt.huggingface", description="Write a trained GPT as a Hugging Face LlamaForCausalLM."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or file that the training saved")
    parser.add_argument("target", metavar="OUT_DIR", help="folder for config.json and safetensors")
    parser.add_argument("--dtype", choices=("keep", *DTYPES), default="keep", help="dtype of the weights")
    parser.add_argument(
        "--max-shard-gb", type=float, default=MAX_SHARD_BYTES / 1e9, metavar="GB", help="maximum file size"
    )
    parser.add_argument("--ema", action="store_true", help="write the averaged weights (ShardedEMA)")
    parser.add_argument("--force", action="store_true", help="replace OUT_DIR if it exists")
    args = parser.parse_args(argv)
    try:
        export(
            args.checkpoint,
            args.target,
            dtype=DTYPES.get(args.dtype),
            max_shard_bytes=int(args.max_shard_gb * 1e9),
            average=args.ema,
            force=args.force,
        )
    except LSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.target}: LlamaForCausalLM.from_pretrained({args.target!r}) loads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
