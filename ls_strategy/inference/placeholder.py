"""What a module has in the place of a tensor that rests elsewhere.

Floating-point tensors keep identity, shape and dtype, and read as NaN, as released parameters do at stage 3. Of other
dtypes nothing reads as "no value", so that a stand-in takes the tensor's name, and raises whatever is done with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy._compat import persistent_buffer_names, version_of
from ls_strategy.errors import PlanError, StateError
from ls_strategy.zero.lazy import LazyTensor

Owner = tuple["weakref.ref[nn.Module]", str]
"""A module, and the name that it knows a tensor by."""


class Placeholder(Tensor):
    """Shape, dtype and device of a tensor; any operation raises."""

    label: str

    @staticmethod
    def __new__(cls: Any, name: str, like: Tensor, device: torch.device) -> Placeholder:  # noqa: D102 - see the class
        self = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=device)  # type: ignore[attr-defined]
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
        """Refuse, but for ``detach``, which `state_dict` and `nn.Parameter` call."""
        here = next(a for a in args if isinstance(a, Placeholder))
        if func is torch.ops.aten.detach.default:
            return Placeholder(here.label, here, here.device)
        raise StateError(away_message(here.label))


def away_message(name: str) -> str:
    """What to say of a tensor that is not here."""
    return (
        f"{name} rests on a tier, and is here only while its block runs. Call the block itself, take its values from "
        "state_dict(), or bring all weights back with restore() of what stream_blocks() returned."
    )


class RestingTensor(LazyTensor):
    """A tensor of a state dict that is read from its tier when it is used."""

    read: Callable[[int, int], Tensor]

    @staticmethod
    def __new__(cls: Any, like: Tensor, read: Callable[[int, int], Tensor]) -> RestingTensor:  # noqa: D102
        self = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[attr-defined]
        self.read = read
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RestingTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    @override
    def load(self, start: int, stop: int) -> Tensor:
        return self.read(start, stop)


class Target(Protocol):
    """A tensor of a block, under all its names."""

    name: str
    owners: Sequence[Owner]
    like: Tensor
    """On meta: its shape and dtype."""

    def prepare(self, view: Tensor) -> Tensor:
        """What is shown when ``view`` holds the values."""
        ...

    def show(self, value: Tensor) -> None:
        """Put what `prepare` made in place."""
        ...

    def hide(self) -> None:
        """Let go of the values."""
        ...

    def changed(self) -> bool:
        """Whether somebody has written to what is shown, or put something else in its place, since."""
        ...


class FloatingTarget:
    """A parameter or buffer that keeps its identity, and reads as NaN while it is away."""

    def __init__(self, name: str, tensor: Tensor, owners: Sequence[Owner], nothing: Tensor) -> None:
        """``nothing``: an element, ``(1,)``, that is no number."""
        self.name, self.owners = name, owners
        self.like = torch.empty_like(tensor, device="meta")
        self.nothing = nothing
        self._tensor = tensor
        self._nothing = nothing.expand(tensor.shape)
        self._address = self._version = -1

    def prepare(self, view: Tensor) -> Tensor:
        """The view."""
        return view

    def show(self, value: Tensor) -> None:
        """Point at ``value``."""
        self._tensor.data = value
        self._address, self._version = value.data_ptr(), version_of(self._tensor)

    def hide(self) -> None:
        """Read as NaN."""
        self.show(self._nothing)

    def changed(self) -> bool:
        """By in-place operations, or by ``.data = ...`` as ``module.to()`` does."""
        return version_of(self._tensor) != self._version or self._tensor.data_ptr() != self._address


class EntryTarget:
    """A parameter or buffer of integers, which is another object whenever it is here."""

    def __init__(self, name: str, tensor: Tensor, owners: Sequence[Owner], device: torch.device) -> None:
        """``device``: where it is when it is here."""
        self.name, self.owners = name, owners
        self.like = torch.empty_like(tensor, device="meta")
        self._is_parameter = isinstance(tensor, nn.Parameter)
        self._away = self.prepare(Placeholder(name, tensor, device))
        self._shown = tensor
        self._version = -1

    def prepare(self, view: Tensor) -> Tensor:
        """A parameter, if it is one."""
        return nn.Parameter(view, requires_grad=False) if self._is_parameter else view

    def show(self, value: Tensor) -> None:
        """Give ``value`` the tensor's names."""
        for owner, key in self.owners:
            module = owner()
            if module is not None:
                setattr(module, key, value)
        self._shown = value
        self._version = -1 if value is self._away else version_of(value)

    def hide(self) -> None:
        """Give the stand-in its names."""
        self.show(self._away)

    def changed(self) -> bool:
        """By in-place operations, or by another object of the name."""
        kept = all(getattr(owner(), key, None) is self._shown for owner, key in self.owners)
        return not kept or (self._shown is not self._away and version_of(self._shown) != self._version)


def own_tensors(
    root: str, block: nn.Module, shared: Collection[int] = ()
) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Parameters and persistent buffers of a block under every name: full name, module, its name there, tensor.

    Without those whose ``id`` is among ``shared``.

    Buffers that are not saved are none of its weights: tables, masks and caches stay where they are.
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
    """The tensors of a block, and their values.

    Args:
        roots: modules of the block, by name.
        device: where they compute.
        shared: ``id`` of tensors that other modules have too, and that stay.

    Raises:
        PlanError: one is no plain tensor.
    """
    found: dict[int, tuple[str, Tensor, list[Owner]]] = {}
    for root, block in roots.items():
        for name, module, key, tensor in own_tensors(root, block, shared):
            _, _, owners = found.setdefault(id(tensor), (name, tensor, []))
            owners.append((weakref.ref(module), key))
    targets: list[Target] = []
    values: list[Tensor] = []
    nothing: dict[torch.dtype, Tensor] = {}
    for name, tensor, owners in found.values():
        _refuse_special(name, tensor)
        values.append(tensor.detach())
        dtype = tensor.dtype
        if dtype.is_floating_point or dtype.is_complex:
            if dtype not in nothing:
                nothing[dtype] = torch.tensor([float("nan")], device=device).to(dtype)
            targets.append(FloatingTarget(name, tensor, owners, nothing[dtype]))
        else:
            targets.append(EntryTarget(name, tensor, owners, device))
    return targets, values


def _refuse_special(name: str, tensor: Tensor) -> None:
    plain = type(tensor) in (Tensor, nn.Parameter) and type(tensor.data) is Tensor
    if not plain or tensor.layout != torch.strided or tensor.is_quantized:
        raise PlanError(
            f"{name} is a {type(tensor.data).__name__} ({tensor.layout}), and only plain dense tensors are streamed. "
            "Stream the model first, or leave its block out: blocks=[...]."
        )
    if tensor.is_inference():
        raise PlanError(f"{name} was made under torch.inference_mode(), which forbids to move it: build outside of it.")
