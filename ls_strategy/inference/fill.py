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
"""Maximum bytes of a header, as the format defines it."""


class FileTensor(LazyTensor):
    """A tensor in a safetensors file that is read when it is used."""

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
                        raise CheckpointError(f"{self.path} ends inside {self.label}: it is incomplete. Copy it again.")
                    done += moved
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error
        return out


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a file, or of all files of a folder, by name. Each is read when it is used.

    Raises:
        CheckpointError: a file is missing, or is not a complete safetensors file.
    """
    place = Path(path)
    if not place.is_dir():
        return _tensors_of(place)
    if (place / _INDEX).is_file():
        try:
            files = sorted(set(json.loads((place / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{place / _INDEX} cannot be read: {error!r}. Copy it again.") from error
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
            fits = end - begin == torch.Size(shape).numel() * dtype.itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the header's entry of {name} cannot be read: {error!r}.") from error
        if not fits or not 0 <= begin <= end <= nbytes:
            raise CheckpointError(
                f"{path} is damaged: its header puts {name} at bytes [{begin}, {end}) of {nbytes}. Copy it again."
            )
        found[name] = FileTensor(path, name, dtype, shape, begin_of_data + begin)
    return found


def _header_of(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return a file's header, the offset of its data, and the bytes of data."""
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
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: {error}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged: it has no header.")
    header.pop("__metadata__", None)
    return header, 8 + length, size - 8 - length


def open_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights of any supported file or folder by name. Each is read when it is used.

    Raises:
        CheckpointError: the path does not exist, is incomplete, or has no weights.
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


def needs_filling(model: nn.Module, source: str | os.PathLike[str] | None) -> bool:
    """Whether any parameter or buffer is on meta.

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
            setattr(module, key, torch.empty_like(b, device=device))
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
