"""Placeholders that take a tensor's place in its module while the values are stored elsewhere.

Floating-point tensors keep identity, shape and dtype, and read as NaN, like released parameters at stage 3. Integers
have no such value, so a `Placeholder` that raises on any use takes the tensor's name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy._torch import allow_data_on, make_wrapper, persistent_buffer_names, version_of
from ls_strategy.errors import PlanError, StateError
from ls_strategy.meta_init.lazy import LazyTensor

Owner = tuple["weakref.ref[nn.Module]", str]  # a module, and the tensor's name in it


class Placeholder(Tensor):
    """Shape, dtype and device of a tensor; any operation raises."""

    label: str

    @staticmethod
    def __new__(cls: Any, name: str, like: Tensor, device: torch.device) -> Placeholder:  # noqa: D102 - see the class
        self = make_wrapper(cls, like.shape, like.dtype, device)
        self.label = name
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Placeholder({self.label}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(away_message(self.label))

    def __deepcopy__(self, memo: Any) -> Any:
        raise StateError(away_message(self.label))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise, except for ``detach``, which `state_dict` and `nn.Parameter` call."""
        self = next(a for a in args if isinstance(a, Placeholder))
        if func is torch.ops.aten.detach.default:
            return Placeholder(self.label, self, self.device)
        raise StateError(away_message(self.label))


def away_message(name: str) -> str:
    """Return the error message for a tensor whose values are not loaded."""
    return (
        f"{name} is stored on a tier and is loaded only while its block runs. Call the block itself, take the values "
        "from state_dict(), or load all weights with restore() of the handle that stream_blocks() returned."
    )


class StoredTensor(LazyTensor):
    """A tensor of a state dict that is read from its tier when it is used."""

    read: Callable[[int, int], Tensor]

    @staticmethod
    def __new__(cls: Any, like: Tensor, read: Callable[[int, int], Tensor]) -> StoredTensor:  # noqa: D102
        self = make_wrapper(cls, like.shape, like.dtype)
        self.read = read
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    @override
    def load(self, start: int, stop: int) -> Tensor:
        return self.read(start, stop)


class FloatingTarget:
    """A parameter or buffer that keeps its identity, and reads as NaN while its values are not loaded."""

    def __init__(self, name: str, tensor: Tensor, owners: Sequence[Owner], nan: Tensor) -> None:
        """``nan`` is a NaN, ``(1,)``."""
        self.name, self.owners = name, owners
        self.like = torch.empty_like(tensor, device="meta")
        self.nan = nan
        self._tensor = tensor
        self._expanded_nan = nan.expand(tensor.shape)
        self._address = self._version = -1

    def prepare(self, view: Tensor) -> Tensor:
        """Return ``view``."""
        return view

    def show(self, value: Tensor) -> None:
        """Point the tensor at ``value``."""
        self._tensor.data = value
        self._address, self._version = value.data_ptr(), version_of(self._tensor)

    def hide(self) -> None:
        """Make the tensor read as NaN."""
        if self._address < 0:
            allow_data_on(self._tensor, self.nan.device)
        self.show(self._expanded_nan)

    def changed(self) -> bool:
        """Detect in-place operations, and ``.data = ...`` as in ``module.to()``."""
        return version_of(self._tensor) != self._version or self._tensor.data_ptr() != self._address


class EntryTarget:
    """An integer parameter or buffer, replaced by a `Placeholder` while its values are not loaded."""

    def __init__(self, name: str, tensor: Tensor, owners: Sequence[Owner], device: torch.device) -> None:
        """``device`` is where its values are loaded."""
        self.name, self.owners = name, owners
        self.like = torch.empty_like(tensor, device="meta")

        self._is_parameter = isinstance(tensor, nn.Parameter)
        self._placeholder = self.prepare(Placeholder(name, tensor, device))
        self._shown = tensor
        self._version = -1

    def prepare(self, view: Tensor) -> Tensor:
        """Return ``view``, as a parameter if the tensor is one."""
        return nn.Parameter(view, requires_grad=False) if self._is_parameter else view

    def show(self, value: Tensor) -> None:
        """Give ``value`` the tensor's names."""
        for owner, key in self.owners:
            module = owner()
            if module is not None and key in module._buffers:
                module._buffers[key] = value  # also an nn.Parameter, which setattr would make a parameter
            elif module is not None:
                setattr(module, key, value)
        self._shown = value
        self._version = -1 if value is self._placeholder else version_of(value)

    def hide(self) -> None:
        """Give the placeholder the tensor's names."""
        self.show(self._placeholder)

    def changed(self) -> bool:
        """Detect in-place operations, and other objects under the tensor's names."""
        kept = all(getattr(owner(), key, None) is self._shown for owner, key in self.owners)
        return not kept or (self._shown is not self._placeholder and version_of(self._shown) != self._version)


Target: TypeAlias = FloatingTarget | EntryTarget
"""A tensor of a block, under all its names: `show` takes what `prepare` returns for a view that has the values."""


def own_tensors(
    root: str, block: nn.Module, shared: Collection[int] = ()
) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield a block's parameters and persistent buffers under every name: full name, module, name in it, tensor.

    Omits tensors whose ``id`` is in ``shared``, and buffers that are not saved: tables, masks and caches are not
    streamed.
    """
    saved = persistent_buffer_names(block)
    for path, module in block.named_modules(remove_duplicate=False):
        tensors = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        tensors += [
            (key, b)
            for key, b in module.named_buffers(recurse=False, remove_duplicate=False)
            if (f"{path}.{key}" if path else key) in saved
        ]
        for key, tensor in tensors:
            if tensor.numel() and id(tensor) not in shared:
                yield ".".join(part for part in (root, path, key) if part), module, key, tensor


def targets_of(
    roots: Mapping[str, nn.Module], device: torch.device, shared: set[int]
) -> tuple[list[Target], list[Tensor]]:
    """Return the tensors of a block's modules as targets that compute on ``device``, and their values.

    Tensors whose ``id`` is in ``shared`` belong to other modules too and are omitted.

    Raises:
        PlanError: a tensor is not a plain dense tensor.
    """
    found: dict[int, tuple[str, Tensor, list[Owner]]] = {}
    for root, block in roots.items():
        for name, module, key, tensor in own_tensors(root, block, shared):
            _, _, owners = found.setdefault(id(tensor), (name, tensor, []))
            owners.append((weakref.ref(module), key))
    targets: list[Target] = []
    values: list[Tensor] = []
    nan: dict[torch.dtype, Tensor] = {}
    for name, tensor, owners in found.values():
        _refuse_special(name, tensor)
        values.append(tensor.detach())
        dtype = tensor.dtype
        if dtype.is_floating_point or dtype.is_complex:
            if dtype not in nan:
                nan[dtype] = torch.tensor([float("nan")], device=device).to(dtype)
            targets.append(FloatingTarget(name, tensor, owners, nan[dtype]))
        else:
            targets.append(EntryTarget(name, tensor, owners, device))
    return targets, values


def _refuse_special(name: str, tensor: Tensor) -> None:
    plain = type(tensor) in (Tensor, nn.Parameter) and type(tensor.data) is Tensor
    if not plain or tensor.layout != torch.strided or tensor.is_quantized:
        raise PlanError(
            f"{name} is a {type(tensor.data).__name__} ({tensor.layout}), but only plain dense tensors can be "
            "streamed. Stream the model first, or omit its block: blocks=[...]."
        )
    if tensor.is_inference():
        raise PlanError(f"{name} was created in torch.inference_mode() and cannot be moved. Create it outside of it.")
