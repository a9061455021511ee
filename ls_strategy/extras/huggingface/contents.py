"""What a folder for ``from_pretrained`` holds: the one file of this product that knows transformers and peft.

Both packages run their own code on tensors that only record what is done to them, so that names, conversions, tied
weights and the choice of adapters are theirs, and no value is read before the folder is written:

::

    names of the module ── without prefixes ── tied weights once ── cast ── their own conversion     a full model
                                            └─ `get_peft_model_state_dict` ── cast                   adapters
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.meta_init.lazy import LazyTensor, narrowed
from ls_strategy.meta_init.recipe import Recipe, RecordedTensor, recipe_of
from ls_strategy.zero.setup.kept import named_by_authors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of the weights that are written, by name."""

Kind = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor
_COMPILED = "_orig_mod"


@dataclass(frozen=True)
class Promised(Recipe):
    """A tensor that is found by its name when its values are needed."""

    name: str
    values: dict[str, Tensor]  # all tensors by name, lazy or not. Filled before the first value is needed.

    @override
    def box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        found = self._found()
        return found.box(offsets, sizes) if isinstance(found, LazyTensor) else narrowed(found, offsets, sizes)

    @override
    def flat(self, start: int, stop: int) -> Tensor:
        found = self._found()
        return found.range(start, stop) if isinstance(found, LazyTensor) else found.reshape(-1)[start:stop]

    def _found(self) -> Tensor:
        if self.name not in self.values:
            raise PlanError(
                f"The export of {self.name} depends on its values, which are on other ranks until they are saved. Save "
                "it with save_pretrained inside strategy.gathered_parameters instead."
            )
        return self.values[self.name].detach()


@dataclass
class FolderContents:
    """What is in a folder: weights that are not read yet, and small files."""

    # By the start of the files' names (``model``, ``adapter_model``): tensors by name.
    weights: dict[str, dict[str, Tensor]]
    files: dict[str, bytes]  # other files by their path in the folder
    # Where the weights find the tensors of the module, by their names in it. To be filled before writing.
    values: dict[str, Tensor] = field(default_factory=dict)
    max_shard_bytes: int | None = None  # largest file of weights. None: one for each of ``weights``.

    @property
    def needed(self) -> set[str]:
        """Return the names of the module's tensors that the weights are made of."""
        return {leaf for part in self.weights.values() for t in part.values() for leaf in _leaves(recipe_of(t))}


def _leaves(recipe: Any) -> Iterator[str]:
    if isinstance(recipe, Promised):
        yield recipe.name
        return
    inner = [getattr(recipe, "source", None), *getattr(recipe, "sources", ()), *getattr(recipe, "args", ())]
    for each in inner:
        if isinstance(each, (list, tuple)):
            for one in each:
                yield from _leaves(one)
        elif isinstance(each, RecordedTensor):
            yield from _leaves(each.recipe)
        elif each is not None:
            yield from _leaves(each)


def find_model(module: nn.Module, wanted: str | None) -> tuple[str, nn.Module]:
    """Return the name in ``module`` and the model of transformers or peft, not compiled.

    Args:
        module: the LightningModule, or the model itself.
        wanted: name of the model. None: the only one.

    Raises:
        ConfigError: there is none of that name, or several and no name.
        PlanError: transformers is not installed.
    """
    kinds = _model_classes()
    found: dict[str, nn.Module] = {}
    for name, each in module.named_modules():
        if isinstance(each, kinds) and not any(not outer or name.startswith(f"{outer}.") for outer in found):
            found[name] = each
    plain = {plain_name(name): name for name in found}
    if wanted is None and len(found) == 1 and found:
        return next(iter(found.items()))
    if wanted in plain:
        return plain[wanted], found[plain[wanted]]
    raise ConfigError(
        f"Got module={wanted!r}, but {type(module).__name__} has "
        f"{'the models ' + ', '.join(sorted(plain)) if plain else 'no model of transformers or peft'}. "
        "Give the name of the attribute that holds the model, such as module='model'."
    )


def _model_classes() -> tuple[type, ...]:
    try:
        from transformers import PreTrainedModel  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PlanError(
            "An export for Hugging Face needs transformers. Install it: pip install 'ls_strategy[huggingface]'."
        ) from error
    try:
        from peft import PeftModel  # pyright: ignore[reportMissingImports]
    except ImportError:
        return (PreTrainedModel,)
    return (PeftModel, PreTrainedModel)


def plain_name(name: str) -> str:
    """Return a name without what `torch.compile` adds.

    >>> plain_name("model._orig_mod.layers.0._orig_mod.weight")
    'model.layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def contents_of(
    model: nn.Module,
    prefix: str,
    kinds: Mapping[str, Kind],
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    tokenizer: Any = None,
) -> FolderContents:
    """Return the folder of a model. Reads no weights.

    Args:
        model: of transformers or peft.
        prefix: of its names in ``kinds``, with a dot at its end or empty.
        kinds: shapes and dtypes of tensors by their names in the module, also of other modules.
        dtype: of floating-point tensors, but for those that the model's authors keep in fp32. None: as they are.
        max_shard_bytes: largest file of a full model.
        tokenizer: anything with ``save_pretrained``, whose files are added.

    Raises:
        PlanError: what is to be written cannot be made of recorded tensors.
    """
    values: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {
        plain_name(name[len(prefix) :]): RecordedTensor(Promised(shape, kind, name, values))
        for name, (shape, kind) in kinds.items()
        if name.startswith(prefix)
    }
    cast = {} if dtype is None else _cast(model, tensors, dtype)
    adapters = _adapters(model)
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder:
        if adapters:
            weights = {
                f"{place}adapter_model": _adapter_weights(model, adapter, {**tensors, **cast})
                for place, adapter in adapters.items()
            }
            for place, adapter in adapters.items():
                _save_adapter_config(model, adapter, Path(folder, place))
        else:
            weights = {"model": _full_weights(model, {**tensors, **cast})}
            floats = {t.dtype for t in weights["model"].values() if t.is_floating_point()} or {torch.float32}
            _save_config(model, dtype or functools.reduce(torch.promote_types, floats), folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        found = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    return FolderContents(weights, files, values, None if adapters else max_shard_bytes)


def _cast(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    kept = named_by_authors(model, dtype)
    found = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    names = {plain_name(name) for name, tensor in found if id(tensor) in kept}
    floats = {name: t for name, t in tensors.items() if t.is_floating_point()}
    return {name: t.to(torch.float32 if name in names else dtype) for name, t in floats.items()}


# --- a full model ----------------------------------------------------------------------------------------------------


def _full_weights(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import (  # pyright: ignore[reportMissingImports]
        revert_weight_conversion,
    )

    left_out = {*_tied_names(model, tensors), *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    return dict(revert_weight_conversion(model, kept))


def _tied_names(model: Any, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names under which ``from_pretrained`` does not look, because the model ties them to others."""
    params: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if plain_name(name) in tensors:
            params.setdefault(id(param), []).append(plain_name(name))
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    return {name for names in params.values() for name in names if declared.get(name) in names}


def _save_config(model: Any, dtype: torch.dtype, folder: str) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model._auto_class is not None:  # is_remote_code(), which older ones than 5.3 do not have
        from transformers.dynamic_module_utils import custom_object_save  # pyright: ignore[reportMissingImports]

        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


# --- adapters --------------------------------------------------------------------------------------------------------


def _is_plain(model: Any) -> bool:
    """Return whether this is a model of transformers, and not one that peft has wrapped."""
    from transformers import PreTrainedModel  # pyright: ignore[reportMissingImports]

    return isinstance(model, PreTrainedModel)


def _adapters(model: Any) -> dict[str, str]:
    """Return the adapters of a model by their folder, which is empty or ends with a slash."""
    if _is_plain(model) and not getattr(model, "_hf_peft_config_loaded", False):
        return {}
    names: list[str] = list(model.peft_config)
    prompts = [name for name in names if model.peft_config[name].is_prompt_learning]
    if prompts:
        raise PlanError(
            f"The adapter {prompts[0]!r} is of the kind {model.peft_config[prompts[0]].peft_type}, whose file PEFT "
            "computes from the weights, of which no rank has all. Save it with save_pretrained inside "
            "strategy.gathered_parameters instead."
        )
    if len(names) == 1:
        return {"": names[0]}
    return {"" if name == "default" else f"{name}/": name for name in names}


def _adapter_weights(model: Any, adapter: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from peft.utils import get_peft_model_state_dict  # pyright: ignore[reportMissingImports]

    found = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=adapter)
    # The names of adapters that transformers has added itself begin inside of the model.
    return {f"base_model.model.{name}" if _is_plain(model) else name: tensor for name, tensor in found.items()}


def _save_adapter_config(model: Any, adapter: str, folder: Path) -> None:
    config = copy.deepcopy(model.peft_config[adapter])
    base = model if _is_plain(model) else model.get_base_model()
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
