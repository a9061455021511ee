"""Load safetensors files into any module: one on meta keeps the record of where its values are."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ls_strategy._torch import persistent_buffer_names
from ls_strategy.checked import checked
from ls_strategy.errors import CheckpointError
from ls_strategy.meta_init.lazy import LazyTensor, give_source, note_owner
from ls_strategy.pretrained.safetensors import read_safetensors
from ls_strategy.pretrained.together import LoadTarget, fill


class Keys(NamedTuple):
    """Names without a counterpart, as ``Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    """In the module, not in the files: the module's own ``reset_parameters`` fills them."""

    unexpected_keys: list[str]
    """In the files, not in the module."""


@checked()
def load_safetensors(
    module: nn.Module,
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> Keys:
    """Load a module from safetensors files, of which every rank later reads only its shards.

    Call it in ``configure_model``, on all ranks with the same arguments. Parameters on meta stay there until the
    strategy shards them, and then every rank reads the ranges that it stores. Other parameters, and buffers, are
    loaded at once: in ``configure_model`` at stages 0 to 2 each rank reads a part, and the ranks exchange the parts.
    Values are cast to the dtype of the parameter.

    Args:
        module: The module, or a part of a model.
        files: A folder, an index (``model.safetensors.index.json``), a file, or a list of these.
        strict: Whether names must agree.
        rename: Maps names in the files to names in the module.

    Returns:
        The names that are missing in the files, and those that the module does not have.

    Raises:
        CheckpointError: Shapes differ, names differ although ``strict``, or a file cannot be read. The module is
            unchanged then.
    """
    found = read_safetensors(files, recording=True)
    values = {rename(name) if rename else name: value for name, value in found.items()}
    places = _places(module)
    names = {name for same in places.values() for name, _, _ in same}
    missing, mismatched = [], []
    chosen: dict[int, Tensor] = {}
    for key, same in places.items():
        hit = next((name for name, _, _ in same if name in values), None)
        if hit is None:
            missing.append(same[0][0])
            continue
        tensor = getattr(same[0][1], same[0][2])
        chosen[key] = values[hit]
        if values[hit].shape != tensor.shape:
            mismatched.append(f"{hit}: {tuple(values[hit].shape)} instead of {tuple(tensor.shape)}")
    keys = Keys(missing, [name for name in values if name not in names])
    if mismatched or (strict and any(keys)):
        raise CheckpointError(_difference(files, keys, mismatched))
    with_memory: list[LoadTarget] = []
    for key, value in chosen.items():
        assert isinstance(value, LazyTensor)
        name, owner, child = places[key][0]
        tensor = getattr(owner, child)
        if not tensor.is_meta:
            with_memory.append(LoadTarget(name, tensor, value))
            continue
        for _, owner, child in places[key]:
            _load(owner, child, value)
    fill(with_memory)
    return keys


def _places(module: nn.Module) -> Mapping[int, list[tuple[str, nn.Module, str]]]:
    """Return ``id`` of each parameter and saved buffer, with the name, owner and attribute of every place it has."""
    saved = persistent_buffer_names(module)
    places: defaultdict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for child, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and (child in owner._parameters or start + child in saved):
                places[id(tensor)].append((start + child, owner, child))
    return places


def _load(owner: nn.Module, child: str, value: LazyTensor) -> None:
    """Note where the values of a parameter on meta are, or load a buffer."""
    tensor = getattr(owner, child)
    if child in owner._parameters:
        give_source(tensor, value)
        note_owner(owner, child, value)
    else:
        owner._buffers[child] = value.materialize().to(tensor.dtype)


def _difference(files: object, keys: Keys, mismatched: list[str]) -> str:
    def some(what: str, names: list[str]) -> str:
        return f" {what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' * (len(names) > 5)}." if names else ""

    listed = some("Missing", keys.missing_keys) + some("Unexpected", keys.unexpected_keys)
    return (
        f"{files} and the module differ.{listed}{some('Other shapes', mismatched)} Build the module that was saved, "
        "give rename=... for other names, or set strict=False to load what fits by name."
    )
