"""Tensors in files or on other ranks that are read range by range, to load states without a full copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ls_strategy._compat import tree_map

READ_CHUNK = 1 << 24
"""Elements that are read at a time: 64 MiB of fp32, all that loading needs in addition to the states."""


class LazyTensor(Tensor):
    """A tensor with shape and dtype, but no data in memory: every torch operation reads it in full.

    After a view or an in-place operation the data stay in memory, so that changes count.
    """

    held: Tensor | None = None

    def load(self, start: int, stop: int) -> Tensor:
        """Read elements ``[start, stop)`` of the flattened tensor from their source, ``(stop - start,)``."""
        raise NotImplementedError

    def range(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the flattened tensor, ``(stop - start,)``."""
        return self.load(start, stop) if self.held is None else self.held.reshape(-1)[start:stop]

    def load_box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a rectangular part from its source. Shape: ``sizes``."""
        return _narrowed(self.materialize(), offsets, sizes)

    def box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a rectangular part. Shape: ``sizes``."""
        return self.load_box(offsets, sizes) if self.held is None else _narrowed(self.held, offsets, sizes)

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


def _narrowed(value: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        value = value.narrow(dim, at, size)
    return value


def parts_of(value: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield elements ``[start, stop)`` of a flattened tensor, lazy or not, as ``(first element, portion)``."""
    if not isinstance(value, LazyTensor):
        yield start, value.detach().reshape(-1)[start:stop]
        return
    for at in range(start, stop, READ_CHUNK):
        yield at, value.range(at, min(at + READ_CHUNK, stop))
