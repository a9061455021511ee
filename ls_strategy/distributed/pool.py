"""`BufferPool`: receive and staging buffers that are used again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class BufferPool:
    """Reuses receive and staging buffers: a new allocation of 64 MiB costs its page faults every time."""

    def __init__(
        self,
        make: Callable[[int, torch.dtype, torch.device], Tensor] = lambda n, dtype, device: torch.empty(
            n, dtype=dtype, device=device
        ),
        *,
        kept: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            make: allocates a new buffer.
            kept: the maximum number of free buffers per size. None: no maximum.
        """
        self._make = make
        self._kept = kept
        self._free: defaultdict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        self.bytes = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of exactly this size, with arbitrary contents."""
        free = self._free[(numel, dtype, device)]
        if free:
            return free.pop()
        buffer = self._make(numel, dtype, device)
        self.bytes += buffer.numel() * buffer.element_size()
        return buffer

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Take back buffers that are no longer read or written."""
        for buffer in buffers:
            free = self._free[(buffer.numel(), buffer.dtype, buffer.device)]
            if self._kept is None or len(free) < self._kept:
                free.append(buffer)
