"""Count the bytes of live tensors: every storage that an operation creates, until it is freed.

Storages are counted instead of process or device memory, since allocators cache memory, so that their numbers depend
on what ran before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ls_strategy._torch import TorchDispatchMode, tree_iter, without_torch_function

Changed = Callable[[int, int], None]
"""Called with the number of a storage, and the bytes by which it has grown or shrunk."""


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage without gathering a parameter."""
    with without_torch_function():
        return tensor.untyped_storage()


def is_wrapped(types: Iterable[type]) -> bool:
    """Return whether tensors of these classes have no memory but that of others, whose operations follow."""
    return any(hasattr(each, "__tensor_flatten__") for each in types)


class StorageWatch(TorchDispatchMode):
    """While active, report every storage that operations create, and when it is freed.

    Covers the thread that entered it, and backward passes on the CPU, which run in the same thread.
    """

    def __init__(self, changed: Changed) -> None:
        super().__init__()
        self._changed = changed
        self._known: dict[int, tuple[Any, int, list[int]]] = {}
        self._next = 0

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if no operation created it."""
        entry = self._known.get(id(storage_of(tensor)))
        return None if entry is None else entry[1]

    def note(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, if it is not counted yet."""
        storage = storage_of(tensor)
        key = id(storage)  # a live storage has a single Python object
        if key in self._known:
            return
        number, size = self._next, [storage.nbytes()]
        self._next += 1

        def freed(_: Any) -> None:
            self._known.pop(key, None)
            self._changed(number, -size[0])

        self._known[key] = (weakref.ref(storage, freed), number, size)
        self._changed(number, size[0])

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage's new size."""
        entry = self._known.get(id(storage))
        if entry is not None:
            _, number, size = entry
            before, size[0] = size[0], storage.nbytes()
            self._changed(number, size[0] - before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count its outputs."""
        if is_wrapped(types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        self.note_all(output)
        return output

    def note_all(self, value: Any) -> None:
        """Count every tensor in nested containers."""
        for leaf in tree_iter(value):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not is_wrapped((type(leaf),)):
                self.note(leaf)
