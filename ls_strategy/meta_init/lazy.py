"""Tensors in files or on other ranks that are read range by range, to load states without a full copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy._torch import make_wrapper, tree_map

READ_CHUNK = 1 << 24
"""Elements that are read at a time: 64 MiB of fp32, all that loading needs in addition to the states."""


class LazyTensor(Tensor):
    """A tensor with shape and dtype, but no data in memory: every torch operation reads it in full.

    After a view or an in-place operation the data stay in memory, so that changes count.
    """

    held: Tensor | None = None

    @property
    def at_once(self) -> int:
        """Return how many elements a read should have."""
        return READ_CHUNK

    def load(self, start: int, stop: int) -> Tensor:
        """Read elements ``[start, stop)`` of the flattened tensor from their source, ``(stop - start,)``."""
        raise NotImplementedError

    def range(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the flattened tensor, ``(stop - start,)``."""
        return self.load(start, stop) if self.held is None else self.held.reshape(-1)[start:stop]

    def load_box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a rectangular part from its source. Shape: ``sizes``."""
        return narrowed(self.materialize(), offsets, sizes)

    def box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a rectangular part. Shape: ``sizes``."""
        return self.load_box(offsets, sizes) if self.held is None else narrowed(self.held, offsets, sizes)

    def materialize(self) -> Tensor:
        """Return the full tensor."""
        return self.range(0, self.numel()).view(self.shape)

    def tolist(self) -> Any:
        """Return the full tensor as nested lists."""
        return self.materialize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the full tensor as an array."""
        return self.materialize().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.materialize()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Read the tensors that the operation needs."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, LazyTensor) and argument.alias_info is not None and value.held is None:
                value.held = value.materialize()

        def load(x: Any) -> Any:
            return x.materialize() if isinstance(x, LazyTensor) else x

        return func(*tree_map(load, args), **tree_map(load, kwargs or {}))


class LazyCast(LazyTensor):
    """A lazy tensor in another dtype."""

    source: LazyTensor

    @staticmethod
    def __new__(cls: Any, source: LazyTensor, dtype: torch.dtype) -> LazyCast:  # noqa: D102
        self = make_wrapper(cls, source.shape, dtype)
        self.source = source
        return self

    @property
    @override
    def at_once(self) -> int:
        return self.source.at_once

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyCast({self.dtype}, of {self.source!r})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        return self.source.range(start, stop).to(self.dtype)

    @override
    def load_box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        return self.source.box(offsets, sizes).to(self.dtype)


_SOURCE = "_ls_strategy_source"


def give_source(tensor: Tensor, source: LazyTensor) -> None:
    """Record where the values of a tensor on meta come from: ``source``, of the same shape.

    The record is an attribute of the tensor, so that it stays when ``tensor.data`` is replaced by this rank's part; and
    of its memory, so that copies and views of the tensor are recognized.
    """
    setattr(tensor, _SOURCE, source)
    setattr(tensor.untyped_storage(), _SOURCE, source)


def source_of(tensor: Tensor) -> LazyTensor | None:
    """Return where the values of a tensor on meta come from, if it was recorded.

    The result has the shape that the tensor had when it was recorded.
    """
    if not tensor.is_meta:
        return None
    source = source_of_memory(tensor)
    return source if source is not None and source.shape == tensor.shape else vars(tensor).get(_SOURCE, source)


def source_of_memory(tensor: Tensor) -> LazyTensor | None:
    """Return where the values of the memory come from of which a tensor on meta is a view."""
    return getattr(tensor.untyped_storage(), _SOURCE, None)


def forget_source(tensor: Tensor) -> None:
    """Undo `give_source`: the values are in memory now, and will change."""
    vars(tensor).pop(_SOURCE, None)


def drop_source(tensor: Tensor) -> None:
    """Undo `give_source` for the memory of a tensor: it was written to."""
    storage = tensor.untyped_storage()
    if getattr(storage, _SOURCE, None) is not None:
        setattr(storage, _SOURCE, None)


OWNED = "_ls_strategy_sources"
"""Attribute of modules under which `note_owner` records."""


def note_owner(owner: nn.Module, name: str, source: LazyTensor) -> None:
    """Record where the values of the parameter ``name`` of a module come from, whatever object takes its place."""
    vars(owner).setdefault(OWNED, {})[name] = source


def forget_owner(owner: nn.Module, name: str) -> None:
    """Undo `note_owner` for one parameter."""
    vars(owner).get(OWNED, {}).pop(name, None)


def narrowed(value: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Return a rectangular part of a tensor, a view. Shape: ``sizes``."""
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        value = value.narrow(dim, at, size)
    return value


def parts_of(value: Tensor, start: int, stop: int, multiple_of: int = 1) -> Iterator[tuple[int, Tensor]]:
    """Yield elements ``[start, stop)`` of a flattened tensor, lazy or not, as ``(first element, portion)``.

    All portions but the last have a multiple of ``multiple_of`` elements.
    """
    if not isinstance(value, LazyTensor):
        yield start, value.detach().reshape(-1)[start:stop]
        return
    step = -(-max(value.at_once, 1) // multiple_of) * multiple_of
    for at in range(start, stop, step):
        yield at, value.range(at, min(at + step, stop))
