"""What a tier is: a place where model states rest between uses. And the simplest one, memory.

::

    lease = tier.get(key, start, stop)      starts bringing the elements
    tensor = lease.wait()                   there they are: read them, change them in place
    tier.put(key, lease, start)             let them rest again, changed     or
    lease.release()                         unchanged: forget what was brought

A later ``get`` sees what an earlier ``put`` of any thread gave, also if that has not reached its place yet.
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
"""Elements and dtype of every state that a tier will hold."""


class Lease(Protocol):
    """Elements on their way from a tier, or here. Ends with ``release``, or by being given to ``put``."""

    def wait(self) -> Tensor:
        """The elements, 1-d with the state's dtype; may be read and changed in place until the lease ends."""
        ...

    def release(self) -> None:
        """They are not needed any more, and not to be stored. Idempotent."""
        ...


class Tier(Protocol):
    """Where model states rest between uses. Safe to use from several threads."""

    name: str
    """``device``, ``cpu`` or ``nvme``."""

    def get(self, key: Key, start: int = 0, stop: int | None = None) -> Lease:
        """Start bringing elements ``[start, stop)``; to the end without ``stop``. Zeros where nothing was ever put."""
        ...

    def put(self, key: Key, value: Tensor | Lease, start: int = 0) -> None:
        """Let ``value`` rest here, from element ``start`` on; may return before it does.

        Args:
            key: the state.
            value: 1-d with the state's dtype, on any device; not read any more when this returns. Or a lease of this
                tier, which ends with this call.
            start: the first element's place.
        """
        ...

    def flush(self) -> None:
        """Return when everything that was put rests here; raises what went wrong."""
        ...

    def close(self) -> None:
        """Give memory, threads and files back. Idempotent; the states are lost."""
        ...


def resolve_range(sizes: Sizes, key: Key, start: int, stop: int | None) -> tuple[int, torch.dtype]:
    """End of the elements that were asked for, and the state's dtype.

    Raises:
        StateError: the tier holds no such state, or it has no such elements.
    """
    if key not in sizes:
        raise StateError(
            f"flat buffer {key[0]} has no state {key[1]!r} on this tier, which was made for {len(sizes)} others. Name "
            "every state in `sizes` when the tier is made."
        )
    numel, dtype = sizes[key]
    end = numel if stop is None else stop
    if not 0 <= start <= end <= numel:
        raise StateError(
            f"elements [{start}, {end}) of state {key[1]!r} of flat buffer {key[0]}: it has {numel}. Ask for a range "
            "inside that."
        )
    return end, dtype


class ResidentLease:
    """A view of a tensor that is always there."""

    def __init__(self, tensor: Tensor) -> None:
        """Lend ``tensor``, ``(stop - start,)``."""
        self._tensor = tensor

    def wait(self) -> Tensor:
        """The view."""
        return self._tensor

    def release(self) -> None:
        """Nothing to give back."""


class ResidentTier:
    """States in memory, on the device or on the host: what is lent is the resting place itself."""

    def __init__(self, sizes: Sizes, allocate: Callable[[int, torch.dtype], Tensor], name: str) -> None:
        """Allocate nothing yet; a state takes memory at its first use.

        Args:
            sizes: elements and dtype of every state.
            allocate: ``(numel, dtype)`` to a tensor ``(numel,)``, uninitialised.
            name: of the tier.
        """
        self.sizes = dict(sizes)
        self.name = name
        self._allocate = allocate
        self._tensors: dict[Key, Tensor] = {}
        self._lock = threading.Lock()
        self._closed = False

    def tensor(self, key: Key) -> Tensor:
        """The whole state, ``(numel,)``; zeros if it was never put.

        Raises:
            StateError: the tier does not hold it, or is closed.
        """
        numel, dtype = resolve_range(self.sizes, key, 0, None)
        with self._lock:
            if self._closed:
                raise StateError(f"the {self.name} tier is closed: state {key[1]!r} of flat buffer {key[0]} is gone.")
            if key not in self._tensors:
                self._tensors[key] = self._allocate(numel, dtype).zero_()
            return self._tensors[key]

    def get(self, key: Key, start: int = 0, stop: int | None = None) -> ResidentLease:
        """Lend elements ``[start, stop)``: a view of the resident tensor."""
        end, _ = resolve_range(self.sizes, key, start, stop)
        return ResidentLease(self.tensor(key)[start:end])

    def put(self, key: Key, value: Tensor | Lease, start: int = 0) -> None:
        """Copy ``value`` to its place; free if it is that place."""
        source = value if isinstance(value, Tensor) else value.wait()
        end, dtype = resolve_range(self.sizes, key, start, start + source.numel())
        assert source.dtype == dtype, f"{source.dtype} put into state {key} of {dtype}"
        target = self.tensor(key)[start:end]
        if target.data_ptr() != source.data_ptr() or target.device != source.device:
            target.copy_(source)

    def flush(self) -> None:
        """Return at once: what was put is there."""

    def close(self) -> None:
        """Forget the tensors. Idempotent."""
        with self._lock:
            self._closed = True
            self._tensors.clear()
