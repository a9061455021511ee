"""Models that were built on meta get their weights module by module, from files or from ``reset_parameters()``.

=================================================  ====================================================
``fill_from``                                      read by
=================================================  ====================================================
a file or folder of safetensors (Hugging Face)     ranges of the files, without the package
a checkpoint folder of this package, or of DCP     ranges of the files, each compared with its checksum
a file of ``torch.save``: ``.ckpt``, ``.pt``       a map of the file
None                                               the modules fill themselves: random weights
=================================================  ====================================================

Nothing is read before it is used, and no more than a chunk of a tensor at a time beside the module that it fills.
"""

from __future__ import annotations

import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy._compat import persistent_buffer_names
from ls_strategy.checkpoint.safetensors import DTYPES
from ls_strategy.checkpoint.source import as_bytes, is_folder, read_checkpoint, read_weights
from ls_strategy.errors import CheckpointError, PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.zero.lazy import LazyTensor, parts_of
from ls_strategy.zero.parts import part_of

logger = logging.getLogger("ls_strategy.inference")

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
"""Bytes, as the format has it."""


class FileTensor(LazyTensor):
    """A tensor in a file of safetensors that is read when it is used."""

    path: Path
    first: int
    label: str

    @staticmethod
    def __new__(cls: Any, path: Path, name: str, dtype: torch.dtype, shape: list[int], first: int) -> FileTensor:  # noqa: D102
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        self.path, self.label, self.first = path, name, first
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FileTensor({self.label} of {self.path}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.dtype)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.first + start * self.dtype.itemsize)
                target, done = as_bytes(out), 0
                while done < len(target):
                    moved = file.readinto(target[done:])
                    if not moved:
                        raise CheckpointError(f"{self.path} ends inside {self.label}: it is not whole. Copy it anew.")
                    done += moved
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error
        return out


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file, or of all files of a folder, by name; each is read when it is used.

    Raises:
        CheckpointError: a file is missing, or is no whole file of safetensors.
    """
    place = Path(path)
    if not place.is_dir():
        return _tensors_of(place)
    if (place / _INDEX).is_file():
        try:
            files = sorted(set(json.loads((place / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{place / _INDEX} cannot be read: {error!r}. Copy it anew.") from error
    else:
        files = sorted(file.name for file in place.glob("*.safetensors"))
    found: dict[str, Tensor] = {}
    for file in files:
        found |= _tensors_of(place / file)
    return found


def _tensors_of(path: Path) -> dict[str, Tensor]:
    header, begin_of_data, nbytes = _header_of(path)
    found: dict[str, Tensor] = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = _BY_NAME[entry["dtype"]], entry["shape"], entry["data_offsets"]
            whole = end - begin == torch.Size(shape).numel() * dtype.itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the header's entry of {name} cannot be read: {error!r}.") from error
        if not whole or not 0 <= begin <= end <= nbytes:
            raise CheckpointError(
                f"{path} is damaged: {name} is said to be at bytes [{begin}, {end}) of {nbytes}. Copy it anew."
            )
        found[name] = FileTensor(path, name, dtype, shape, begin_of_data + begin)
    return found


def _header_of(path: Path) -> tuple[dict[str, Any], int, int]:
    """What a file says of its tensors, where their bytes begin, and how many there are."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length <= min(size - 8, _LARGEST_HEADER) else None
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no file of safetensors, or is damaged: {error}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no file of safetensors, or is damaged: it has no header.")
    header.pop("__metadata__", None)
    return header, 8 + length, size - 8 - length


def open_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Weights by name, of any kind of file or folder; each is read when it is used.

    Raises:
        CheckpointError: there is nothing of this name, it is not whole, or has no weights.
    """
    place = Path(path)
    if place.suffix == ".safetensors" or (place.is_dir() and any(place.glob("*.safetensors"))):
        return read_safetensors(place)
    if is_folder(path):
        return {n: t for n, t in read_weights(path).state_dict().items() if isinstance(t, Tensor)}
    found = read_checkpoint(path, weights_only=True)
    found = found.get("state_dict", found)
    weights = {n: t for n, t in found.items() if isinstance(t, Tensor)} if isinstance(found, Mapping) else {}
    if not weights:
        raise CheckpointError(f"{path} has no weights: neither under 'state_dict', nor tensors by name.")
    return weights


def has_meta(model: nn.Module) -> bool:
    """Whether some of it was built without memory."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


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
            model: some of it on meta.
            source: file or folder. None: modules fill themselves.
            parts: ``id(parameter)`` -> what of it is on this rank, for parameters that are divided.

        Raises:
            CheckpointError: names are missing, or have other shapes.
            PlanError: random weights for parameters that are divided.
        """
        self._source = source
        self._parts = parts or {}
        self._values: dict[int, Tensor] = {}
        self._fillers = dict(_outside_initialisers(model))
        named = _names(model)
        if source is None:
            if self._parts:
                raise PlanError(
                    "random weights of a model that is divided over ranks, on meta: give fill_from, or build it with "
                    "memory and divide it then."
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
                f"has {', '.join(list(weights)[:3])}, ...: give the file of this model, or build the model that was "
                "saved."
            )
        unused = [name for name in weights if name not in used]
        if unused:
            logger.info("%s: %d tensors are not of the model, %s first", source, len(unused), unused[0])

    def _fitting(self, name: str, tensor: Tensor, value: Tensor) -> Tensor:
        part = self._parts.get(id(tensor))
        shape = tuple(tensor.shape) if part is None else tuple(part.full_shape)
        if tuple(value.shape) != shape:
            raise CheckpointError(
                f"{name} is {tuple(value.shape)} in {self._source}, and {shape} in the model: build the model that was "
                "saved."
            )
        return part_of(value, part)

    def fill(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Give a module's own meta tensors, not those of its children, memory and values.

        Args:
            name: of the module in the model.
            module: to be filled.
            device: where the memory is taken.

        Raises:
            PlanError: it has something that is in no file, and cannot fill it by itself.
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
            setattr(module, key, torch.empty_like(b, device=device))
        if any(value is None for value in values):
            self._reset(name, module)
        filled = [*params.values(), *(getattr(module, key) for key in buffers)]
        for tensor, value in zip(filled, values, strict=True):
            if value is not None:
                _copy(tensor.detach(), value)

    def _reset(self, name: str, module: nn.Module) -> None:
        """Let the module fill itself, or a Hugging Face model around it."""
        initialise = getattr(module, "reset_parameters", None)
        if not callable(initialise):
            outside = self._fillers.get(id(module))
            if outside is None:
                raise PlanError(
                    f"module {name!r} ({type(module).__name__}) was built on meta, has tensors that no file holds "
                    "(random weights, or buffers that are not saved), and no reset_parameters() to fill them. Add that "
                    "method, or build this module with memory."
                )
            with torch.no_grad():
                outside(module)
            return
        with torch.no_grad():
            initialise()


def _outside_initialisers(model: nn.Module) -> Iterator[tuple[int, Callable[[nn.Module], Any]]]:
    """``id`` of every module inside a Hugging Face model, and the method of the innermost one that fills it."""

    def walk(module: nn.Module, outside: Callable[[nn.Module], Any] | None) -> Iterator[tuple[int, Any]]:
        own = getattr(module, "_init_weights", None)
        outside = own if callable(own) else outside
        if outside is not None:
            yield id(module), outside
        for child in module.children():
            yield from walk(child, outside)

    return walk(model, None)


def _names(model: nn.Module) -> dict[int, tuple[list[str], Tensor]]:
    """Parameters and persistent buffers by ``id``, with all their names."""
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
    """From names in the model to names in the file, which may begin with one module more, or less.

    More: ``network.``, of the LightningModule around the model. Less: ``transformer.``, of a head around the model.
    """
    if any(name in weights for name in wanted):
        return lambda name: name
    for name in wanted:
        longer = next((other for other in weights if other.endswith(f".{name}")), None)
        if longer is not None:
            prefix = longer[: -len(name)]
            return lambda name: prefix + name
        head, _, rest = name.partition(".")
        if rest in weights:
            return lambda name: name.removeprefix(f"{head}.")
    return lambda name: name


def _copy(target: Tensor, value: Tensor) -> None:
    """Chunk by chunk, cast to the target's dtype. ``target`` is contiguous, or takes the value whole."""
    if not target.is_contiguous():
        target.copy_(value.materialize() if isinstance(value, LazyTensor) else value)
        return
    flat = target.view(-1)
    for start, part in parts_of(value, 0, value.numel()):
        flat[start : start + part.numel()].copy_(part)
