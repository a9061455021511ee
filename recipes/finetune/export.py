"""Write a fine-tuned model for transformers and PEFT: ``python -m recipes.finetune export CHECKPOINT FOLDER``.

An adapter is written as PEFT does (``PeftModel.from_pretrained(base, FOLDER)``); with ``--merge``, and without an
adapter, a full model (``AutoModelForCausalLM.from_pretrained(FOLDER)``). The base model's weights are read only to be
merged with an adapter. A full model needs its size in host memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.errors import CheckpointError, ConfigError, LSError
from recipes.finetune.model import AdapterConfig, with_adapter

PREFIX = "model."
"""Prefix of the model's names in `FinetuneModule`."""


def export(checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str], *, merge: bool = False) -> None:
    """Write a folder for transformers or PEFT.

    Args:
        checkpoint: folder or file of a trained `FinetuneModule`, with or without frozen parameters.
        folder: folder to create.
        merge: add the adapter to the weights, and write a model that does not need PEFT.

    Raises:
        ConfigError: it is not a checkpoint of `FinetuneModule`, ``folder`` exists, or there is no adapter to merge.
        CheckpointError: the checkpoint lacks weights.
    """
    if Path(folder).exists():
        raise ConfigError(f"Got {folder}, which exists. Remove it, or give another folder.")
    saved = read_checkpoint(checkpoint, weights_only=True)
    options = saved.get("hyper_parameters", {})
    if not {"model", "adapter", "teacher"} <= options.keys():
        raise ConfigError(f"Got {checkpoint}, which was not saved by recipes.finetune.")
    weights = {
        name.removeprefix(PREFIX): value.clone()
        for name, value in saved["state_dict"].items()
        if name.startswith(PREFIX) and isinstance(value, Tensor)
    }
    if options["adapter"] is None:
        if merge:
            raise ConfigError(f"Got {checkpoint} and merge, but it has no adapter: all weights were trained.")
        model = _filled(_on_meta(options["model"]), weights, complete=True)
    elif merge:
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(options["model"], dtype=options["dtype"])
        adapted = with_adapter(base, AdapterConfig(**options["adapter"]))
        model = _filled(adapted, _trained(adapted, weights), complete=False).merge_and_unload()
    else:
        model = with_adapter(_on_meta(options["model"]), AdapterConfig(**options["adapter"]))
        weights = _trained(model, weights)
    model.save_pretrained(folder, **({} if options["adapter"] is None or merge else {"state_dict": weights}))
    _copy_tokenizer(options["model"], folder)


def _on_meta(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _trained(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the adapter.

    Raises:
        CheckpointError: some are missing.
    """
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    missing = sorted(names - weights.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks {len(missing)} weights of the adapter, for example {missing[0]}.")
    return {name: weights[name] for name in names}


def _filled(model: Any, weights: dict[str, Tensor], *, complete: bool) -> Any:
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tied = set(model.all_tied_weights_keys) if complete else set()
    missing = [name for name in missing if name not in tied]
    if (complete and missing) or unexpected:
        wrong = [*missing, *unexpected] if complete else unexpected
        raise CheckpointError(f"the checkpoint and the model differ in {len(wrong)} names, for example {wrong[0]}.")
    if complete:
        model.tie_weights()
    return model


def _copy_tokenizer(name: str, folder: str | os.PathLike[str]) -> None:
    from recipes.finetune.data import TokenizerEncoder, make_encoder

    encoder = make_encoder(name)
    if isinstance(encoder, TokenizerEncoder):
        encoder.save(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.finetune export",
        description="Write a fine-tuned model or adapter as a folder that transformers or PEFT loads.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or file that the training saved")
    parser.add_argument("folder", metavar="FOLDER", help="folder to create")
    parser.add_argument("--merge", action="store_true", help="add the adapter to the base model's weights")
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.folder, merge=args.merge)
    except LSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.folder}")
    return 0
