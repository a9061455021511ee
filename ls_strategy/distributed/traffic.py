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
        self.bytes_between_nodes: Counter[str] = Counter()
        """Those of `bytes` that went to ranks on other nodes. With NCCL, which chooses the way of the bytes itself: as
        if every shard went straight to its owner."""

    def count(self, kind: str, tensor: Tensor, times: int = 1, *, far: int = 0) -> None:
        """Add ``times`` sends of ``tensor``, ``far`` of them to other nodes."""
        numel = tensor.numel()
        self.count_elements(kind, numel * times, tensor.element_size(), numel * far)

    def count_elements(self, kind: str, numel: int, itemsize: int, far_numel: int = 0) -> None:
        """Add sends of ``numel`` elements of ``itemsize`` bytes each, ``far_numel`` of them to other nodes."""
        self.elements[kind] += numel
        self.bytes[kind] += numel * itemsize
        if far_numel:
            self.bytes_between_nodes[kind] += far_numel * itemsize
        spans.sent(kind, numel * itemsize)

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.elements.clear()
        self.bytes.clear()
        self.bytes_between_nodes.clear()
