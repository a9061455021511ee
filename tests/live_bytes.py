"""Measures how many bytes of tensors are alive, to hold forecasts against."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ls_strategy.extras.planner.live import StorageWatch, storage_of


class LiveBytes(StorageWatch):
    """Measures: `now` and `peak` of the storages that operations of this thread have made or met.

    ::

        with LiveBytes(ignore=data) as live:
            trainer.fit(module, loader)
        live.peak
    """

    def __init__(self, ignore: list[Tensor] | None = None) -> None:
        """``ignore``: tensors that are not counted (the data set)."""
        super().__init__(self._count)
        self.now = 0
        self.peak = 0
        self._ignored = ignore or []
        self._ignored_keys = {id(t.untyped_storage()) for t in self._ignored}
        self._resize: Any = None

    def _count(self, _number: int, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.now

    def note(self, tensor: Tensor) -> None:
        """See `StorageWatch`."""
        if not tensor.is_meta and id(storage_of(tensor)) not in self._ignored_keys:
            super().note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count also what the operation reads: it may have been made out of sight."""
        self.note_all((args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> LiveBytes:
        """Begin. Resizes of storages are no operations, and seen by another way."""
        self._resize = self._watch_resizes()
        self._resize.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End; storages that live on are still told of when they go."""
        super().__exit__(*error)
        self._resize.__exit__(*error)

    @contextmanager
    def _watch_resizes(self) -> Generator[None, None, None]:
        plain: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            self.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            del torch.UntypedStorage.resize_
            if torch.UntypedStorage.resize_ is not plain:
                torch.UntypedStorage.resize_ = plain
