"""Units: the parameters that are gathered, reduced and stepped together, in one flat buffer or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import unnoticed
from ls_strategy.zero.flat.released import Released


class Unit:
    """The flat buffers that are gathered and reduced together."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[FlatBuffer], *, is_root: bool) -> None:
        """Group ``flats``, whose parameters are used by ``modules``. A root unit stays gathered for a full step."""
        self.name = name
        self.modules = modules
        self.flats = flats
        self.is_root = is_root
        self.trainable_flats = [f for f in flats if f.trainable]
        self.waiting_for = 0
        """Gradients that are missing in this backward pass."""
        self.launched = False
        self.open_backwards = 0
        """Calls of the unit's modules that are in backward. Only the methods below change it."""
        self._unclosable_backwards = 0
        """Those of them for which no gradient of an input marks the end."""
        self.pinned = False
        """Whether the unit stays gathered until the backward pass is over, because no earlier event marks its end."""
        self.differentiated = False
        """Whether its backward has made a graph (``create_graph=True``), which any later backward pass may need."""

    def admit(self, flat: FlatBuffer) -> None:
        """Send the gradients of a frozen buffer from now on. All ranks must do so at the same time."""
        flat.admit()
        self.trainable_flats = [f for f in self.flats if f.has_optimizer and not f.is_frozen]

    def begin_call(self, *, closable: bool) -> None:
        """Begin the backward of a call. ``closable``: a gradient of its inputs marks the end."""
        self.open_backwards += 1
        self._unclosable_backwards += not closable

    def end_call(self) -> bool:
        """End the backward of a call. Return whether no other one is open."""
        self.open_backwards = max(self.open_backwards - 1, 0)
        return self.open_backwards == 0

    def end_unclosable(self) -> bool:
        """End all calls that are not closable: all gradients are there. Return whether no call is open."""
        self.open_backwards = max(self.open_backwards - self._unclosable_backwards, 0)
        self._unclosable_backwards = 0
        return self.open_backwards == 0

    def pin(self) -> None:
        """Stay gathered until `unpin`."""
        self.pinned = True

    def unpin(self, *, repeats: bool = False) -> None:
        """End the backward pass or the step: no call is open, and the unit may be released.

        ``repeats``: more backward passes may follow, so it stays if its backward has made a graph.
        """
        self.open_backwards = self._unclosable_backwards = 0
        self.differentiated = self.differentiated and repeats
        self.pinned = self.differentiated


def places_of(state: Mapping[str, Any], units: list[Unit]) -> dict[str, tuple[FlatBuffer, int]]:
    """Map the keys of ``module.state_dict()`` that are parameters of the units to ``(flat, slot)``. Not collective.

    Entries are recognized by address, whatever their key. A released parameter has a unique address too.
    """
    flats = [flat for unit in units for flat in unit.flats]
    shown = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.numel()}
    stand_ins = {k: (v.flat, v.slot) for k, v in shown.items() if isinstance(v, Released) and v.held is None}
    with unnoticed():
        found = {p.data_ptr(): (flat, i) for flat in flats for i, p in enumerate(flat.params) if p.numel()}
        tensors = {k: v.data_ptr() for k, v in shown.items() if not isinstance(v, Released)}
    at = {key: found[address] for key, address in tensors.items() if address in found} | stand_ins
    return {key: at[key] for key in shown if key in at}
