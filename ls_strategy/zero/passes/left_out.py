"""Backward passes whose gradients do not count: they run for their collectives alone.

The one invariant: after such a pass, this rank's gradients are what they were before it, bit for bit. They are moved
aside and put back, because multiplying what the pass produces by zero would keep its infinities and NaNs.
"""

from __future__ import annotations

from torch import Tensor, nn

from ls_strategy.zero.flat.parameters import grad_of, set_grad, unnoticed
from ls_strategy.zero.flat.units import Flat, Unit


class LeftOut:
    """The gradients that this rank had before a backward pass that does not count."""

    def __init__(self, units: list[Unit]) -> None:
        """Move the gradients of ``units`` aside, so that autograd does not add to them."""
        self._held: dict[int, list[tuple[nn.Parameter, Tensor | None]]] = {}
        with unnoticed():
            for unit in units:
                for flat in unit.flats:
                    self._held[id(flat)] = [(p, grad_of(p)) for p in flat.params if p.requires_grad]
                    for p, _ in self._held[id(flat)]:
                        set_grad(p, None)

    def drop(self, param: nn.Parameter) -> None:
        """Drop a gradient that the pass has produced."""
        set_grad(param, None)

    def put_back(self, flats: list[Flat]) -> None:
        """Put the gradients of some buffers back; what the pass has produced there is dropped. Once per buffer."""
        with unnoticed():
            for flat in flats:
                for p, grad in self._held.pop(id(flat), ()):
                    set_grad(p, grad)
