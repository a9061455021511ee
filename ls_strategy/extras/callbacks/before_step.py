"""What a step changes besides parameters and optimizer states, to be put back if the step is left out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ls_strategy.checkpoint.random import RandomStream
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.moe.router import RoutingAccounts
from ls_strategy.optimizers.qk_clip import QKClip


class BeforeStep:
    """Buffers, random states, loads of experts and logits of QK clips, as they were before a step.

    Buffers are copied in every step, because writes through ``.data`` cannot be noticed.
    """

    def __init__(self, strategy: ZeROStrategy, module: nn.Module) -> None:
        """Take the states of now."""
        self._strategy = strategy
        self._parts = list(module.modules())  # once: walking through a large model takes milliseconds
        self._routers = [part for part in self._parts if isinstance(part, RoutingAccounts)]
        self._clips = [part for part in self._parts if isinstance(part, QKClip)]
        self._random = RandomStream()
        self._draw_again: Callable[[], None] | None = None
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        """Where a buffer is, its name, the buffer, and a copy of it."""
        self._loads: list[tuple[RoutingAccounts, Tensor | None]] = []
        self._logits: list[tuple[QKClip, Tensor | None]] = []
        self.take()

    def take(self) -> None:
        """Take the states of now. Not collective."""
        virtual = self._strategy.virtual
        self._draw_again = None if virtual is None else virtual.random.mark()
        self._random.take()
        earlier = {id(buffer): copy for *_, buffer, copy in self._buffers}
        self._buffers = [
            (part._buffers, name, buffer, _copied(buffer, earlier.pop(id(buffer), None)))
            for part in self._parts
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._loads = [(router, router.counts.loads) for router in self._routers]
        self._logits = [(clip, clip.max_logits) for clip in self._clips]

    @torch.no_grad()
    def put_back(self) -> None:
        """Put them back. Not collective."""
        for buffers, name, buffer, copy in self._buffers:
            buffers[name] = buffer
            buffer.copy_(copy)
        for router, loads in self._loads:
            router.counts.loads = loads
        for clip, logits in self._logits:
            clip.max_logits = logits
        self._random.put()
        if self._draw_again is not None:
            self._draw_again()


def _copied(buffer: Tensor, copy: Tensor | None) -> Tensor:
    """Return a copy of a buffer, in the memory of an earlier copy of it if that fits."""
    if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype or copy.device != buffer.device:
        return buffer.detach().clone()
    return copy.copy_(buffer.detach())
