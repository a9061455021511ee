"""`Traffic`: counts what a rank sends."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from ls_strategy import spans


class Traffic:
    """Counts what this rank sends, per kind of collective: at the send calls, not from a formula."""

    def __init__(self) -> None:
        self.elements: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, kind: str, tensor: Tensor, times: int = 1) -> None:
        """Add ``times`` sends of ``tensor``."""
        nbytes = tensor.numel() * tensor.element_size() * times
        self.elements[kind] += tensor.numel() * times
        self.bytes[kind] += nbytes
        spans.sent(kind, nbytes)

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.elements.clear()
        self.bytes.clear()
