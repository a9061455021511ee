"""The averaged gradients of one flat buffer, as user code sees them: sharded until their elements are needed.

Objects that ``p.grad`` returns are gathered when they are used (`ls_strategy.zero.user_code.sharded_gradient`). Each
rank then compares its shard of the gathered buffer with a copy, and takes elements that user code has changed into the
averages. Tensors that user code assigns to ``p.grad`` stay the user's; the engine reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ls_strategy._torch import storage_users, version_of
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import grad_of
from ls_strategy.zero.flat.writes import differing
from ls_strategy.zero.user_code import sharded_gradient


class GradientOwner(Protocol):
    """Decides which buffers are gathered, and when; see `ls_strategy.zero.user_code.gradients`."""

    def average(self, flat: FlatBuffer) -> UserGradients:
        """Average the gradients that were not sent yet. Collective the first time after a backward."""
        ...

    def gather(self, shown: UserGradients) -> None:
        """Gather one buffer, and keep it until `used`. Collective."""

    def used(self, shown: UserGradients) -> None:
        """End an operation that needed the elements."""

    def norm(self, shown: UserGradients, index: int, order: float) -> Tensor:
        """Return the norm of one parameter's gradient, ``()``. Collective unless it is cached."""
        ...

    def holds(self, value: Tensor) -> bool:
        """Return whether ``value`` is a view of a buffer of gathered gradients, which is reused."""
        ...


class UserGradients:
    """The averaged gradients of one flat buffer, as user code sees them."""

    # More than 20 public members: `Gradients`, which decides what is gathered, shares half of the attributes.

    def __init__(self, owner: GradientOwner, flat: FlatBuffer) -> None:
        self.owner = owner
        self.flat = flat
        self.used = [False] * len(flat.params)
        """Which parameters have a gradient."""
        self.objects: dict[int, Tensor] = {}
        """Objects that ``p.grad`` returned, by parameter."""
        self.given: dict[int, Tensor] = {}
        """Tensors that user code assigned to ``p.grad``, by parameter."""
        self.full: Tensor | None = None
        """The gathered elements, ``(numel,)``. It stays as long as user code has a view of it."""
        self._views: list[Tensor] = []
        self.is_current = False
        """Whether the objects are views of ``full``."""
        self.owned_before: Tensor | None = None
        """A copy of this rank's shard of ``full`` as it was gathered, to detect writes."""
        self.users = 0
        """Operations in progress that need the elements."""
        self.changed = False
        """Whether user code may have changed anything since the last `take`; the same on all ranks."""
        self.norms: dict[float, dict[int, Tensor]] = {}
        """Cached norms: order -> parameter -> norm."""
        self._sources = [_Source(weakref.ref(self), i) for i in range(len(flat.params))]
        self._placeholder = torch.full((), float("nan"), dtype=flat.average_dtype, device=flat.full.device)
        self._versions: dict[int, int] = {}
        """Recorded versions of objects and given tensors, to detect writes. -1: not copied to the averages yet."""
        self._generation = flat.averages.generation
        """Generation of the averages that given tensors show."""
        self._own_users = 0
        """References to the memory of ``full`` while user code has no view of it."""
        self._has_leavers = False
        """Whether user code may have an object at ``full`` that was dropped, and must keep its elements."""

    # called by user code ---------------------------------------------------------------------------------------------

    def object_of(self, i: int) -> Tensor:
        """Return the object for ``p.grad``. Collective if user code has assigned it."""
        given = self.given.get(i)
        if given is not None:
            if self._generation != self.flat.averages.generation:
                # Copy the engine's changes of the gradients into the given tensors.
                self.late_writes()
                self.owner.gather(self)
                for j, each in self.given.items():
                    if self._versions[j] != -1:
                        each.detach().copy_(self._views[j])
                        self._versions[j] = version_of(each)
                self._generation = self.flat.averages.generation
                self.owner.used(self)
            return given
        if i not in self.objects:
            shape = torch.Size(self.flat.layout.slots[i].shape)
            self.objects[i] = sharded_gradient.new_gradient(shape, self._placeholder, self._sources[i])
            if self.is_current:
                sharded_gradient.give_elements(self.objects[i], self._views[i])
        return self.objects[i]

    def give(self, i: int, value: Tensor) -> None:
        """Set ``p.grad``. Collective."""
        slot = self.flat.layout.slots[i]
        if tuple(value.shape) != tuple(slot.shape):
            raise StateError(
                f"Got a gradient of shape {tuple(value.shape)} for {slot.name!r}, whose shape is {tuple(slot.shape)}. "
                "Set p.grad to a tensor of the parameter's shape."
            )
        value = sharded_gradient.as_plain(value)
        if self.owner.holds(value):
            value = value.clone()
        self.changed = True
        self.drop(i)
        self.used[i] = True
        self.given[i] = value
        self._versions[i] = -1

    def drop(self, i: int) -> None:
        """Remove the gradient of parameter ``i``."""
        self.used[i] = False
        self.given.pop(i, None)
        self._versions.pop(i, None)
        for norms in self.norms.values():
            norms.pop(i, None)
        gradient = self.objects.pop(i, None)
        if gradient is not None:
            sharded_gradient.forget(gradient)
            self._has_leavers |= self.full is not None

    def edit(self, i: int, change: Callable[[Tensor], Any], *, linear: bool) -> None:
        """Change this rank's elements of one gradient in place. ``linear``: see `Source.edit`. Not collective."""
        flat, piece = self.flat, self.flat.pieces[i]
        self.changed = True
        for norms in self.norms.values():
            if linear and i in norms:
                change(norms[i])
                norms[i].abs_()
            else:
                norms.pop(i, None)
        if piece.numel == 0 or not flat.averages.hold_values:
            return
        flat.averages.edit(piece.start, piece.stop, change)

    def zero(self, wanted: list[int], *, set_to_none: bool) -> None:
        """Drop or zero these gradients here; the caller does it in the averages. Not collective."""
        for i in wanted:
            if set_to_none:
                self.drop(i)
                continue
            if self.full is not None:
                self._views[i].zero_()
            if i in self.given:
                self.given[i].detach().zero_()
                self._versions[i] = version_of(self.given[i])
            for norms in self.norms.values():
                norms.pop(i, None)

    # elements --------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Gather the elements into ``full``, and point every object at it. Collective."""
        if self.is_current:
            return
        self.flush()
        flat = self.flat
        if self.full is None:
            self.full = torch.zeros(flat.layout.numel, dtype=flat.average_dtype, device=flat.full.device)
            self._views = [view.detach() for view in flat.split(self.full)]
            self._own_users = storage_users(self.full)
        flat.averages.gather(self.full)
        self.owned_before = self.full[slice(*flat.owned)].clone()
        for i, gradient in self.objects.items():
            sharded_gradient.give_elements(gradient, self._views[i])
        self.is_current = self.changed = True  # user code may write to the elements
        self.norms.clear()

    def let_go(self) -> None:
        """Make the objects sharded again, and free ``full`` unless user code has a view of it."""
        if self.is_current:
            self.is_current = False
            for i, gradient in self.objects.items():
                shape = torch.Size(self.flat.layout.slots[i].shape)
                sharded_gradient.take_elements(gradient, shape, self._placeholder, self._sources[i])
                self._versions[i] = version_of(gradient)  # the writes so far were to its elements, and have been taken
        if self.full is not None and (self._has_leavers or storage_users(self.full) <= self._own_users):
            self.full, self._views, self.owned_before = None, [], None
            self._has_leavers = False

    def flush(self) -> None:
        """Copy what user code has written into the averages. Not collective."""
        flat = self.flat
        if self.full is not None and self.owned_before is not None:
            for i, gradient in self.objects.items() if self.is_current else ():
                if gradient.numel() and gradient.data_ptr() != self._views[i].data_ptr():
                    self._views[i].copy_(gradient)  # user code has moved it (``p.grad.data = other``)
            mine = self.full[slice(*flat.owned)]
            differs = differing(mine, self.owned_before)
            for i, piece in enumerate(flat.pieces):
                if not self.used[i] or i in self.given:
                    differs[piece.start : piece.stop] = False
            if bool(differs.any()):
                self.flat.averages.put(0, mine, differs)
                self.owned_before = mine.clone()
        for i, value in self.given.items():
            if version_of(value) != self._versions[i]:
                self._versions[i] = version_of(value)
                piece = flat.pieces[i]
                own = value.detach().reshape(-1)[piece.param_start : piece.param_start + piece.numel]
                self.flat.averages.put(piece.start, own.to(flat.average_dtype))
        flat.averages.renew_sums()

    # called by the engine --------------------------------------------------------------------------------------------

    def late_writes(self) -> bool:
        """Return whether given tensors were written to since the last `take`. The answer is the same on all ranks.

        Raises:
            StateError: an outdated view was written to, from before the engine changed the gradients.
        """
        if not self.is_current and self.owned_before is None:
            for i, gradient in self.objects.items():
                if version_of(gradient) != self._versions.get(i, version_of(gradient)):
                    self._refuse(i)
        late = [i for i, value in self.given.items() if version_of(value) != self._versions[i]]
        for i in late:
            if self._versions[i] != -1 and self._generation != self.flat.averages.generation:
                self._refuse(i)
        return bool(late)

    def _refuse(self, i: int) -> None:
        raise StateError(
            f"a view of {self.flat.layout.slots[i].name}.grad, or the tensor that it was set to, was written to after "
            "the gradients had been clipped, unscaled or added to, which the view does not show. Write to p.grad "
            "itself, and read it again in every hook."
        )

    def take(self) -> bool:
        """Copy changes into the averages, and return whether anything may have changed. Not collective."""
        flat = self.flat
        self.flush()
        self.let_go()
        self.owned_before = None
        self._versions.update({i: version_of(gradient) for i, gradient in self.objects.items()})
        self._generation = flat.averages.generation
        self.norms.clear()
        changed, self.changed = self.changed, False
        if changed:
            flat.averages.note_edit()
            flat.local.match_used(self.used)
            # Make this rank's ``p.grad`` show whether there is a gradient (stage 1).
            for i, used in enumerate(self.used) if not flat.policy.gradients else ():
                if not used:
                    flat.local.drop_sent(i)
                elif grad_of(flat.params[i]) is None:
                    flat.local.allocate(flat.params[i].dtype)
                    flat.local.views[i].zero_()
                    flat.local.show(i)
        return changed


@dataclass(frozen=True)
class _Source:
    """The `Source` of one parameter's gradient."""

    shown_of: weakref.ref[UserGradients]
    index: int

    @property
    def _shown(self) -> UserGradients:
        shown = self.shown_of()
        if shown is None:
            raise StateError("a gradient was used after the strategy that held its elements was freed. Keep a clone.")
        return shown

    def gather(self) -> None:
        self._shown.owner.gather(self._shown)

    def used(self) -> None:
        self._shown.owner.used(self._shown)

    def norm(self, order: float) -> Tensor:
        return self._shown.owner.norm(self._shown, self.index, order)

    def edit(self, change: Callable[[Tensor], Any], *, linear: bool) -> None:
        shown = self._shown
        with torch.no_grad():
            shown.owner.average(shown.flat)
            shown.edit(self.index, change, linear=linear)
