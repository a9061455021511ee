"""Saved-tensor hooks: which tensors saved for backward are kept elsewhere, and how they return.

::

    forward   | pack(tensor)   ─► eligible? ─► its region of memory ─► keeper.keep(region) ─► handle in the graph
    backward  | unpack(handle) ─► keeper.load() ─► the same view of the region
              | the graph frees the handle ─► keeper.drop()

The memory under a tensor is kept once, however many views of it are saved: the same activation may be the input of
three linear layers, and queries, keys and values may be slices of one product.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ls_strategy._torch import StorageWeakRef, VersionedTensor, storage_key, version_of


class Keeper(Protocol):
    """Keeps regions elsewhere. ``kept`` is what `keep` returned."""

    def keep(self, region: Tensor) -> Any:
        """Keep a region, 1-d, on the device. It is not changed afterwards."""
        ...

    def add_use(self, kept: Any) -> None:
        """Announce one more `load`."""
        ...

    def load(self, kept: Any) -> Tensor:
        """Return the region on the device, bitwise equal and read-only. Called once per handle or more often."""
        ...

    def drop(self, kept: Any) -> None:
        """Free the region. Must not raise or wait for long: it runs when autograd frees the graph."""
        ...


def is_eligible(tensor: Tensor, device: torch.device, protected: Collection[int]) -> bool:
    """Return whether a saved tensor is an activation in plain memory of ``device``.

    Parameters and buffers are excluded: their memory stays in place and is refilled under the same storage. So are
    subclasses (DTensor), other layouts and devices, and tensors that repeat elements (expanded ones).
    """
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != device:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or tensor.numel() == 0:
        return False
    return span(tensor) >= tensor.numel() and storage_key(tensor) not in protected


def span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last in memory, gaps included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def region_of(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the memory to keep for a tensor, 1-d of its dtype, and the tensor's offset in it.

    The region is the full storage if the tensor spans at least half of it, so that views of one storage are kept
    together. Otherwise it is the tensor's span: a batch that is a slice of the data set must not keep the data set.
    """
    begin = start = int(tensor.storage_offset())
    length = span(tensor)
    total = tensor.untyped_storage().nbytes() // tensor.element_size()
    if 2 * length >= total:
        start, length = 0, total
    return tensor.detach().as_strided((length,), (1,), start), begin - start


class _KeptRegion:
    def __init__(self, key: tuple[Any, ...], kept: Any, storage: StorageWeakRef) -> None:
        self.key = key
        self.kept = kept
        self.storage = storage  # while this exists, no other storage gets the id in the key
        self.handles = 0


class _Handle:
    """Replaces a saved tensor in the graph."""

    __slots__ = ("_on_release", "entry", "offset", "size", "stride")

    def __init__(
        self, entry: _KeptRegion, tensor: Tensor, offset: int, on_release: Callable[[_KeptRegion], None]
    ) -> None:
        self.entry = entry
        self.offset = offset
        self.size, self.stride = tensor.size(), tensor.stride()
        self._on_release = on_release

    def __del__(self) -> None:
        self._on_release(self.entry)


class SavedTensors:
    """Hooks that pass the tensors that autograd saves to a keeper."""

    def __init__(
        self,
        keeper: Keeper,
        device: torch.device,
        *,
        min_bytes: int,
        protected: Callable[[], Collection[int]],
        floating_only: bool = False,
    ) -> None:
        """Create the hooks; `around` installs them.

        Args:
            keeper: Takes the regions.
            device: Device of the activations.
            min_bytes: Smaller tensors stay in the graph.
            protected: Returns the `storage_key` of all memory of parameters, buffers and gradients. Called at the start
                of each forward.
            floating_only: Leave integer and boolean tensors in the graph.
        """
        self.keeper = keeper
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.bytes_packed = 0
        """Bytes passed to the keeper so far, each region once."""
        self.bytes_left = 0
        """Bytes of tensors left in the graph so far, parameters included."""
        self._min_bytes = min_bytes
        self._floating_only = floating_only
        self._find_protected = protected
        self._protected: Collection[int] = ()
        self._entries: dict[tuple[Any, ...], _KeptRegion] = {}
        self._queue: deque[_KeptRegion] = deque()
        self._lock = threading.Lock()

    @property
    def regions(self) -> int:
        """Number of regions kept now."""
        return len(self._entries)

    @contextmanager
    def around(self) -> Generator[None, None, None]:
        """Install the hooks."""
        if not self._entries:
            self._protected = self._find_protected()
        # Around a compiled part dynamo looks at every function that is called, and compiles what it can.
        pack: Any = torch.compiler.disable(self._pack)
        unpack: Any = torch.compiler.disable(self._unpack)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if (
            tensor.nbytes < self._min_bytes
            or (self._floating_only and not tensor.is_floating_point())
            or not is_eligible(tensor, self.device, self._protected)
        ):
            self.bytes_left += tensor.nbytes
            return VersionedTensor(tensor)
        region, offset = region_of(tensor)
        key = (storage_key(region), region.data_ptr(), region.numel(), region.dtype, version_of(region))
        try:
            with self._lock, torch.no_grad():
                entry = self._entries.get(key)
                if entry is None:
                    entry = _KeptRegion(key, self.keeper.keep(region), StorageWeakRef(region.untyped_storage()))
                    self._entries[key] = entry
                    self.bytes_packed += region.nbytes
                entry.handles += 1
                self.keeper.add_use(entry.kept)
                return _Handle(entry, tensor, offset, self._released)
        finally:
            self._drop_released()

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Handle):
            return saved.get()
        try:
            with self._lock, torch.no_grad():
                region = self.keeper.load(saved.entry.kept)
                return region.as_strided(saved.size, saved.stride, int(region.storage_offset()) + saved.offset)
        finally:
            self._drop_released()

    def _released(self, entry: _KeptRegion) -> None:
        """Note a freed handle. Runs on any thread at any moment, even inside `_pack` through the garbage collector."""
        self._queue.append(entry)
        self._drop_released()

    def _drop_released(self) -> None:
        # A thread that holds the lock calls this after it has released the lock.
        while self._queue and self._lock.acquire(blocking=False):
            try:
                while self._queue:
                    entry = self._queue.popleft()
                    entry.handles -= 1
                    if entry.handles == 0:
                        del self._entries[entry.key]
                        self.keeper.drop(entry.kept)
            finally:
                self._lock.release()
