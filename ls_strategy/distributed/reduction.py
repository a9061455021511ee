"""Gradients of one buffer on their way to their average over ranks: what every kind of reduction gives its caller."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Reduction(Protocol):
    """One buffer's gradients in flight."""

    @property
    def hops(self) -> bool:
        """Return whether `advance` has something to do. The same on all ranks."""
        ...

    @property
    def is_last(self) -> bool:
        """Return whether `finish` gives the average. If not, `collect` takes what has come. The same on all ranks."""
        ...

    @property
    def single(self) -> bool:
        """Return whether the average is of one term, and so its value."""
        ...

    def advance(self) -> bool:
        """Begin the next hop, and return whether another one follows it. Collective."""
        ...

    def collect(self, dtype: torch.dtype) -> None:
        """Keep the terms that have come, in sums of ``dtype``, for the reduction of a later round."""

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Write the average of this rank's shard to ``out``, ``(shard,)``, or add it if ``accumulate``. Collective."""
