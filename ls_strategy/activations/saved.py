"""Tensors that autograd saves for backward: which of them may be kept elsewhere, and the hooks that do it.

::

    forward   | pack(tensor)   ─► may it be taken? ─► its region of memory ─► keeper.keep(region) ─► handle in the graph
    backward  | unpack(handle) ─► kept.load() ─► the same view of the region
              | the graph lets the handle go ─► kept.drop()

What is kept is the memory under a tensor, once, however many views of it are saved: the same activation as the input of
three linear layers, or queries, keys and values that are slices of one product.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ls_strategy._compat import StorageWeakRef, storage_key, version_of


class Kept(Protocol):
    """A region that is kept elsewhere."""

    def add_use(self) -> None:
        """It will be brought once more."""
        ...

    def load(self) -> Tensor:
        """The region, on the device, the same bits; read-only. Once per handle, or more often."""
        ...

    def drop(self) -> None:
        """It will not be brought again. Must not raise, nor wait for long: it runs when autograd frees the graph."""
        ...


class Keeper(Protocol):
    """Keeps regions elsewhere."""

    def keep(self, region: Tensor) -> Kept:
        """Take a region, 1-d, on the device; it is not changed afterwards."""
        ...


def may_be_taken(tensor: Tensor, device: torch.device, protected: Collection[int]) -> bool:
    """Whether a saved tensor is an activation in plain memory of ``device``.

    Not parameters and buffers, whose memory stays where it is and is refilled under the same storage; not subclasses
    (DTensor), other layouts, other devices, and tensors that repeat elements (expanded ones).
    """
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != device:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or tensor.numel() == 0:
        return False
    return span(tensor) >= tensor.numel() and storage_key(tensor) not in protected


def span(tensor: Tensor) -> int:
    """Elements from the first to the last in memory, with the gaps between them."""
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def region_of(tensor: Tensor) -> tuple[Tensor, int]:
    """The memory to keep for a tensor, 1-d of its dtype, and where in it the tensor begins.

    That is its whole storage if it takes half of it or more, so that views of one storage are kept together; else its
    own span, so that a batch which is a slice of the whole data set takes no more than itself.
    """
    begin = start = int(tensor.storage_offset())
    length = span(tensor)
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    if 2 * length >= whole:
        start, length = 0, whole
    return tensor.detach().as_strided((length,), (1,), start), begin - start


class _Entry:
    """A region that is kept, and the handles on it."""

    def __init__(self, key: tuple[Any, ...], kept: Kept, storage: StorageWeakRef) -> None:
        self.key = key
        self.kept = kept
        self.storage = storage  # as long as this lives, the number in the key is given to no other storage
        self.handles = 0


class _Handle:
    """What the graph holds instead of a tensor."""

    __slots__ = ("_let_go", "entry", "offset", "size", "stride")

    def __init__(self, entry: _Entry, tensor: Tensor, offset: int, let_go: Callable[[_Entry], None]) -> None:
        self.entry = entry
        self.offset = offset
        self.size, self.stride = tensor.size(), tensor.stride()
        self._let_go = let_go

    def __del__(self) -> None:
        self._let_go(self.entry)


class SavedTensors:
    """Hooks that hand what autograd saves to a keeper."""

    def __init__(
        self,
        keeper: Keeper,
        device: torch.device,
        *,
        min_bytes: int,
        protected: Callable[[], Collection[int]],
        floating_only: bool = False,
    ) -> None:
        """Make the hooks; `around` puts them in force.

        Args:
            keeper: where regions go.
            device: of the activations.
            min_bytes: smaller tensors are saved as ever.
            protected: `storage_key` of all memory of parameters, buffers and gradients. Asked when a forward begins.
            floating_only: leave integers and booleans alone.
        """
        self.keeper = keeper
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.bytes_packed = 0
        """Handed to the keeper so far, each region once."""
        self.bytes_left = 0
        """Of tensors that were saved as ever so far, parameters among them."""
        self._min_bytes = min_bytes
        self._floating_only = floating_only
        self._find_protected = protected
        self._protected: Collection[int] = ()
        self._entries: dict[tuple[Any, ...], _Entry] = {}
        self._let_go: deque[_Entry] = deque()
        self._lock = threading.Lock()

    @property
    def regions(self) -> int:
        """Regions kept now."""
        return len(self._entries)

    @contextmanager
    def around(self) -> Generator[None, None, None]:
        """Inside, saved tensors are taken."""
        if not self._entries:
            self._protected = self._find_protected()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if (
            tensor.nbytes < self._min_bytes
            or (self._floating_only and not tensor.is_floating_point())
            or not may_be_taken(tensor, self.device, self._protected)
        ):
            self.bytes_left += tensor.nbytes
            return tensor
        region, offset = region_of(tensor)
        key = (storage_key(region), region.data_ptr(), region.numel(), region.dtype, version_of(region))
        try:
            with self._lock, torch.no_grad():
                entry = self._entries.get(key)
                if entry is None:
                    entry = _Entry(key, self.keeper.keep(region), StorageWeakRef(region.untyped_storage()))
                    self._entries[key] = entry
                    self.bytes_packed += region.nbytes
                entry.handles += 1
                entry.kept.add_use()
                return _Handle(entry, tensor, offset, self._released)
        finally:
            self._drop_released()

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Handle):
            return saved
        try:
            with self._lock, torch.no_grad():
                region = saved.entry.kept.load()
                return region.as_strided(saved.size, saved.stride, int(region.storage_offset()) + saved.offset)
        finally:
            self._drop_released()

    def _released(self, entry: _Entry) -> None:
        """A handle is gone: on any thread, at any moment, also inside `_pack` by way of the garbage collector."""
        self._let_go.append(entry)
        self._drop_released()

    def _drop_released(self) -> None:
        # Whoever holds the lock comes by here when it has let go.
        while self._let_go and self._lock.acquire(blocking=False):
            try:
                while self._let_go:
                    entry = self._let_go.popleft()
                    entry.handles -= 1
                    if entry.handles == 0:
                        del self._entries[entry.key]
                        entry.kept.drop()
            finally:
                self._lock.release()
