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
        self.count_elements(kind, tensor.numel() * times, tensor.element_size())

    def count_elements(self, kind: str, numel: int, itemsize: int) -> None:
        """Add sends of ``numel`` elements of ``itemsize`` bytes each."""
        self.elements[kind] += numel
        self.bytes[kind] += numel * itemsize
        spans.sent(kind, numel * itemsize)

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.elements.clear()
        self.bytes.clear()
