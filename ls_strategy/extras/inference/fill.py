"""Fill models that were built on meta, module by module, from files or by ``reset_parameters()``.

=================================================  ====================================================
``fill_from``                                      read as
=================================================  ====================================================
a file or folder of safetensors (Hugging Face)     ranges of the files, without the package
a checkpoint folder of this package, or of DCP     ranges of the files, each verified by its checksum
a file of ``torch.save``: ``.ckpt``, ``.pt``       a memory-mapped file
None                                               the modules initialize themselves: random weights
=================================================  ====================================================

Tensors are read when they are used, and at most one chunk of a tensor is in memory in addition to the module.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy._torch import persistent_buffer_names
from ls_strategy.checkpoint.source import is_folder, read_checkpoint, read_weights
from ls_strategy.errors import CheckpointError, PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.meta_init.lazy import LazyTensor, parts_of
from ls_strategy.pretrained.safetensors import is_index, read_safetensors
from ls_strategy.zero.parts import part_of

logger = logging.getLogger("ls_strategy.inference")


def open_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights of any supported file or folder by name. Each is read when it is used.

    Raises:
        CheckpointError: the path does not exist, is incomplete, or has no weights.
    """
    place = Path(path)
    if place.suffix == ".safetensors" or is_index(place) or (place.is_dir() and _has_safetensors(place)):
        return read_safetensors(place)
    if is_folder(path):
        return {n: t for n, t in read_weights(path).state_dict().items() if isinstance(t, Tensor)}
    found = read_checkpoint(path, weights_only=True)
    found = found.get("state_dict", found)
    weights = {n: t for n, t in found.items() if isinstance(t, Tensor)} if isinstance(found, Mapping) else {}
    if not weights:
        raise CheckpointError(f"{path} has no weights: neither under 'state_dict', nor tensors by name.")
    return weights


def _has_safetensors(folder: Path) -> bool:
    return any(is_index(entry) or entry.suffix == ".safetensors" for entry in folder.iterdir())


def needs_filling(model: nn.Module, source: str | os.PathLike[str] | None) -> bool:
    """Return whether any parameter or buffer is on the meta device.

    Raises:
        PlanError: there is a ``source``, but the model has its weights already.
    """
    on_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if source is not None and not on_meta:
        raise PlanError(
            f"Got fill_from={os.fspath(source)!r} for a model that has its weights already. Build it under "
            '`with torch.device("meta"):`, or omit fill_from.'
        )
    return on_meta


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter with memory; without one, the CPU."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


class Filler:
    """Fills the modules of one model that was built on meta, each once."""

    def __init__(
        self,
        model: nn.Module,
        source: str | os.PathLike[str] | None,
        parts: Mapping[int, TensorPart] | None = None,
    ) -> None:
        """Find every name in the files, before anything is filled.

        Args:
            model: the model, with some or all tensors on meta.
            source: file or folder. None: modules initialize themselves.
            parts: ``id(parameter)`` -> this rank's part of it, for sharded parameters.

        Raises:
            CheckpointError: names are missing, or have other shapes.
            PlanError: random weights were requested for sharded parameters.
        """
        self._source = source
        self._parts = parts or {}
        self._values: dict[int, Tensor] = {}
        self._fillers = dict(_initializers(model))
        named = _names(model)
        if source is None:
            if self._parts:
                raise PlanError(
                    "Got a model on meta that is sharded over ranks, and no fill_from: random weights would differ "
                    "between ranks. Set fill_from, or build the model with memory."
                )
            return
        weights = open_weights(source)
        rename = _renaming([names[0] for names, _ in named.values()], weights)
        missing: list[str] = []
        used: set[str] = set()
        for key, (names, tensor) in named.items():
            hits = [rename(name) for name in names if rename(name) in weights]
            used.update(hits)
            if not tensor.is_meta:
                continue
            if not hits:
                missing.append(names[0])
                continue
            self._values[key] = self._fitting(names[0], tensor, weights[hits[0]])
        if missing:
            raise CheckpointError(
                f"{source} has no {', '.join(missing[:5])}{f' and {len(missing) - 5} more' * (len(missing) > 5)}. It "
                f"has {', '.join(list(weights)[:3])}, ... Give the file of this model, or build the model that was "
                "saved."
            )
        unused = [name for name in weights if name not in used]
        if unused:
            logger.info("%s: %d tensors do not belong to the model, first %s", source, len(unused), unused[0])

    def _fitting(self, name: str, tensor: Tensor, value: Tensor) -> Tensor:
        part = self._parts.get(id(tensor))
        shape = tuple(tensor.shape) if part is None else tuple(part.full_shape)
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(value.shape)} in {self._source}, but {shape} in the model. Build the model "
                "that was saved."
            )
        return part_of(value, part)

    def fill(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Allocate and fill the meta tensors of the module ``name`` on ``device``, without those of its children.

        Raises:
            PlanError: a tensor is in no file, and the module cannot initialize it.
            CheckpointError: a file cannot be read.
        """
        params = {k: p for k, p in module.named_parameters(recurse=False) if p.is_meta}
        buffers = {k: b for k, b in module.named_buffers(recurse=False) if b.is_meta}
        if not params and not buffers:
            return
        values = [self._values.get(id(t)) for t in (*params.values(), *buffers.values())]
        for p in params.values():
            real = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
            torch.utils.swap_tensors(p, real)
        for key, b in buffers.items():
            module._buffers[key] = torch.empty_like(b, device=device)
        if any(value is None for value in values):
            self._reset(name, module)
        filled = [*params.values(), *(getattr(module, key) for key in buffers)]
        for tensor, value in zip(filled, values, strict=True):
            if value is not None:
                _copy(tensor.detach(), value)

    def _reset(self, name: str, module: nn.Module) -> None:
        """Let the module, or the Hugging Face model around it, initialize its tensors."""
        initialise = getattr(module, "reset_parameters", None)
        if not callable(initialise):
            initializer = self._fillers.get(id(module))
            if initializer is None:
                raise PlanError(
                    f"module {name!r} ({type(module).__name__}) was built on meta and has tensors that are in no file "
                    "(random weights, or buffers that are not saved), but it has no reset_parameters() to fill them. "
                    "Add that method, or build this module with memory."
                )
            with torch.no_grad():
                initializer(module)
            return
        with torch.no_grad():
            initialise()


def _initializers(model: nn.Module) -> Iterator[tuple[int, Callable[[nn.Module], Any]]]:
    """Yield the ``id`` of each module in a Hugging Face model, and ``_init_weights`` of the innermost one around it."""

    def walk(module: nn.Module, initializer: Callable[[nn.Module], Any] | None) -> Iterator[tuple[int, Any]]:
        own = getattr(module, "_init_weights", None)
        initializer = own if callable(own) else initializer
        if initializer is not None:
            yield id(module), initializer
        for child in module.children():
            yield from walk(child, initializer)

    return walk(model, None)


def _names(model: nn.Module) -> dict[int, tuple[list[str], Tensor]]:
    """Return parameters and persistent buffers by ``id``, with all their names."""
    saved = persistent_buffer_names(model)
    names: defaultdict[int, list[str]] = defaultdict(list)
    tensors: dict[int, Tensor] = {}
    found = [*model.named_parameters(remove_duplicate=False)]
    found += [(name, b) for name, b in model.named_buffers(remove_duplicate=False) if name in saved]
    for name, tensor in found:
        names[id(tensor)].append(name)
        tensors[id(tensor)] = tensor
    return {key: (names[key], tensor) for key, tensor in tensors.items()}


def _renaming(wanted: list[str], weights: Mapping[str, Tensor]) -> Callable[[str], str]:
    """Return a function from names in the model to names in the file, which may have one leading module more, or less.

    More: ``network.``, from the LightningModule around the model. Less: ``transformer.``, in a model with a head.
    """
    if any(name in weights for name in wanted):
        return lambda name: name
    for name in wanted:
        longer = next((other for other in weights if other.endswith(f".{name}")), None)
        if longer is not None:
            prefix = longer[: -len(name)]
            return lambda name: prefix + name
        head, _, inner = name.partition(".")
        if inner in weights:
            return lambda name: name.removeprefix(f"{head}.")
    return lambda name: name


def _copy(target: Tensor, value: Tensor) -> None:
    """Copy and cast, chunk by chunk if ``target`` is contiguous."""
    if not target.is_contiguous():
        target.copy_(value.materialize() if isinstance(value, LazyTensor) else value)
        return
    flat = target.view(-1)
    for start, part in parts_of(value, 0, value.numel()):
        flat[start : start + part.numel()].copy_(part)
