"""A folder that ``from_pretrained`` opens, of a checkpoint and the configuration of its model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ls_strategy.checkpoint.output import Progress
from ls_strategy.checkpoint.safetensors import write_safetensors
from ls_strategy.checkpoint.source import read_weights
from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras.huggingface.contents import contents_of, plain_name

_SMALL = (".json", ".txt", ".model", ".jinja", ".py")
"""Suffixes of the small files that are copied: those of tokenizers, processors and models with their own code."""

_OTHERS = ("config.json", "adapter_config.json")
"""Of these suffixes, but of the model itself. Indexes of weights are left out too."""


def export_for_transformers(  # noqa: PLR0913 - options of an export, keyword-only
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model: Path,
    module: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int,
    average: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the weights of a checkpoint as ``save_pretrained`` would. Needs memory for a few portions of a tensor.

    Args:
        source: a sharded checkpoint or a single file. The model may be a part of the module that was saved.
        target: the folder to create.
        model: a folder with the model's ``config.json``. Its other small files are copied.
        module: where the model is in the module that was saved. None: the only place whose names fit.
        dtype: as for `contents_of`.
        max_shard_bytes: largest file. A larger tensor gets its own file.
        average: write the average of `ShardedEMA` instead of the weights.
        force: replace ``target`` if an export wrote it.
        progress: called with the bytes written so far and the total.

    Raises:
        CheckpointError: ``source`` is incomplete, or ``target`` could not be written.
        ConfigError: the weights are not those of the model, or ``target`` exists.
        PlanError: transformers is not installed, or does not know the model.
    """
    made = _model(model)
    weights = read_weights(source, average=average)
    saved = {plain_name(n): t for n, t in weights.state_dict().items() if isinstance(t, Tensor)}
    prefix = _prefix(made, saved, module, f"Got --model {model}, but {source}")
    kinds = {name: (tuple(t.shape), t.dtype) for name, t in saved.items()}
    contents = contents_of(made, prefix, kinds, dtype=dtype, max_shard_bytes=max_shard_bytes)
    contents.values.update(saved)
    for path in sorted(model.iterdir()):
        if path.suffix in _SMALL and path.name not in _OTHERS and not path.name.endswith(".index.json"):
            contents.files[path.name] = path.read_bytes()
    write_safetensors(
        target,
        contents.weights,
        files=contents.files,
        max_shard_bytes=contents.max_shard_bytes,
        force=force,
        progress=progress,
    )


def _model(folder: Path) -> Any:
    """Return the model on the meta device."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"Got --model {folder}, which has no config.json. Give a folder of the model that was trained."
        )
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PlanError(
            "An export for Hugging Face needs transformers. Install it: pip install 'ls_strategy[huggingface]'."
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    name = (getattr(config, "architectures", None) or [None])[0]
    kind: Any = getattr(transformers, name or "", None)
    if kind is None:
        raise PlanError(
            f"Got --model {folder}, whose config.json names the class {name!r}, which transformers does not have. Use "
            "HuggingFaceExport while training, or --format safetensors."
        )
    with torch.device("meta"):
        return kind(config)


def _prefix(model: Any, saved: Mapping[str, Tensor], module: str | None, given: str) -> str:
    """Return the prefix of the model's names in a checkpoint.

    Raises:
        ConfigError: no prefix, or not only one, gives all tensors of the model, and nothing else, with their shapes.
    """
    expected = {name: t.shape for name, t in model.state_dict().items()}
    first = next(iter(expected))
    found = {name.removesuffix(first) for name in saved if name == first or name.endswith(f".{first}")} or {""}
    if module is not None:
        found = {f"{module}." if module else ""}
    problems = {prefix: _problem(expected, saved, prefix) for prefix in sorted(found)}
    fitting = [prefix for prefix, problem in problems.items() if problem is None]
    if len(fitting) > 1:
        names = ", ".join(repr(prefix.rstrip(".")) for prefix in fitting)
        raise ConfigError(f"{given} holds several such models. Give --module with one of {names}.")
    if not fitting:
        raise ConfigError(
            f"{given} does not hold this {type(model).__name__}: {next(iter(problems.values()))}. Give a folder with "
            "the config.json of the model that was trained; for adapters, use HuggingFaceExport while training."
        )
    return fitting[0]


def _problem(expected: Mapping[str, Any], saved: Mapping[str, Tensor], prefix: str) -> str | None:
    for name, shape in expected.items():
        if prefix + name not in saved:
            return f"it has no {prefix}{name}"
        if saved[prefix + name].shape != shape:
            return f"{prefix}{name} has shape {tuple(saved[prefix + name].shape)}, the model has {tuple(shape)}"
    more = [n for n in saved if prefix and n.startswith(prefix) and n.removeprefix(prefix) not in expected]
    return f"it has {more[0]} too" if more else None
