"""The protocol of a tier, which stores model states between uses, and the simplest one, in memory.

::

    lease = tier.get(key, start, stop)      start loading the elements
    tensor = lease.wait()                   read them, or change them in place
    tier.put(key, lease, start)             store the changed elements       or
    lease.release()                         drop the unchanged elements

A ``get`` sees what an earlier ``put`` of any thread has passed, even if it is not stored yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from ls_strategy.errors import StateError

Key = tuple[int, str]
"""Number of the flat buffer and name of the state, e.g. ``(3, "exp_avg")``."""

Sizes = Mapping[Key, tuple[int, torch.dtype]]
"""Elements and dtype of every state of a tier."""


class Lease(Protocol):
    """Elements that are loaded, or in flight. A lease ends with ``release``, or with ``put``."""

    def wait(self) -> Tensor:
        """Return the elements, 1-d with the state's dtype; valid for reads and writes until the lease ends."""
        ...

    def release(self) -> None:
        """End the lease without storing the elements. Idempotent."""


class Tier(Protocol):
    """Storage for model states between uses. Several threads may use it."""

    @property
    def sizes(self) -> Sizes:
        """Return elements and dtype of its states."""
        ...

    def get(self, key: Key, start: int = 0, stop: int | None = None) -> Lease:
        """Start loading elements ``[start, stop)``, to the end without ``stop``. Elements are zero before a ``put``."""
        ...

    def put(self, key: Key, value: Tensor | Lease, start: int = 0) -> None:
        """Store ``value`` from element ``start`` on; may return before it is stored.

        Args:
            key: the state.
            value: 1-d with the state's dtype, on any device; not read after this returns. Or a lease of this tier,
                which ends with this call.
            start: index of the first element.
        """
        # ``value``: 1-d with the state's dtype, on any device; not read after this returns. Or a lease of this tier,
        # which ends.

    def flush(self) -> None:
        """Wait until everything that was put is stored; raise the first error."""

    def close(self) -> None:
        """Free memory, threads and files. The states are lost. Idempotent."""


def resolve_range(sizes: Sizes, key: Key, start: int, stop: int | None) -> tuple[int, torch.dtype]:
    """Return the end of a range of elements, and the state's dtype.

    Raises:
        StateError: the tier does not have this state, or the state does not have these elements.
    """
    if key not in sizes:
        raise StateError(
            f"flat buffer {key[0]} has no state {key[1]!r} on this tier, which was created for {len(sizes)} others. "
            "Name every state in `sizes` when the tier is created."
        )
    numel, dtype = sizes[key]
    end = numel if stop is None else stop
    if not 0 <= start <= end <= numel:
        raise StateError(
            f"Got elements [{start}, {end}) of state {key[1]!r} of flat buffer {key[0]}, but it has {numel}. Request a "
            "range inside that."
        )
    return end, dtype


class ResidentLease:
    """A view of a resident tensor."""

    def __init__(self, tensor: Tensor) -> None:
        """Wrap ``tensor``, ``(stop - start,)``."""
        self._tensor = tensor

    def wait(self) -> Tensor:
        """Return the view."""
        return self._tensor

    def release(self) -> None:
        """Do nothing: there is no buffer to free."""


class ResidentTier:
    """States in memory, on the device or on the host. A lease is a view of the stored tensor itself."""

    def __init__(self, sizes: Sizes, allocate: Callable[[int, torch.dtype], Tensor], name: str) -> None:
        """Allocate nothing yet. A state takes memory at its first use.

        Args:
            sizes: elements and dtype of every state.
            allocate: ``(numel, dtype)`` to an uninitialized tensor ``(numel,)``.
            name: of the tier.
        """
        self.sizes = dict(sizes)
        self.name = name
        self._allocate = allocate
        self._tensors: dict[Key, Tensor] = {}
        self._lock = threading.Lock()
        self._closed = False

    def tensor(self, key: Key) -> Tensor:
        """Return the full state, ``(numel,)``; zeros if it was never put.

        Raises:
            StateError: the tier does not have it, or is closed.
        """
        numel, dtype = resolve_range(self.sizes, key, 0, None)
        with self._lock:
            if self._closed:
                raise StateError(f"the {self.name} tier is closed: state {key[1]!r} of flat buffer {key[0]} is lost.")
            if key not in self._tensors:
                self._tensors[key] = self._allocate(numel, dtype).zero_()
            return self._tensors[key]

    def drop(self, key: Key) -> None:
        """Free the memory of a state, if it has any."""
        with self._lock:
            self._tensors.pop(key, None)

    def get(self, key: Key, start: int = 0, stop: int | None = None) -> ResidentLease:
        """Return elements ``[start, stop)`` as a view of the resident tensor."""
        end, _ = resolve_range(self.sizes, key, start, stop)
        return ResidentLease(self.tensor(key)[start:end])

    def put(self, key: Key, value: Tensor | Lease, start: int = 0) -> None:
        """Copy ``value`` to its place, unless it already is a view of it."""
        source = value if isinstance(value, Tensor) else value.wait()
        end, dtype = resolve_range(self.sizes, key, start, start + source.numel())
        assert source.dtype == dtype, f"{source.dtype} put into state {key} of {dtype}"
        target = self.tensor(key)[start:end]
        if target.data_ptr() != source.data_ptr() or target.device != source.device:
            target.copy_(source)

    def flush(self) -> None:
        """Return at once: everything is stored."""

    def close(self) -> None:
        """Free the tensors. Idempotent."""
        with self._lock:
            self._closed = True
            self._tensors.clear()
