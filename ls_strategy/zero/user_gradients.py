"""The averaged gradients of one flat buffer, as user code sees them: sharded until somebody needs their elements.

Objects that ``p.grad`` gives ask for their elements when they are used (`ls_strategy.zero.sharded_gradient`). Then the
buffer is gathered into one tensor, and what is written there is compared with what it was: elements that differ are
taken into the averages, each by the rank that has them. Tensors that user code sets ``p.grad`` to stay the user's, and
are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ls_strategy._compat import storage_users
from ls_strategy.errors import StateError
from ls_strategy.zero import sharded_gradient
from ls_strategy.zero.parameters import grad_of, set_grad
from ls_strategy.zero.units import Flat
from ls_strategy.zero.writes import bits


class Owner(Protocol):
    """Who decides what is gathered, and when; see `ls_strategy.zero.gradients`."""

    def average(self, flat: Flat) -> UserGradients:
        """Average what is left of the gradients of its optimizer. Collective, the first time after a backward."""
        ...

    def gather(self, shown: UserGradients) -> None:
        """Bring the elements of one buffer, until `used`. Collective."""
        ...

    def used(self, shown: UserGradients) -> None:
        """They are not needed any more."""
        ...

    def norm(self, shown: UserGradients, index: int, order: float) -> Tensor:
        """Norm of one parameter's gradient. Collective, unless it is known."""
        ...

    def holds(self, value: Tensor) -> bool:
        """Whether it is in a buffer of gathered gradients, which is used again."""
        ...


class UserGradients:
    """The averaged gradients of one flat buffer, as user code sees them."""

    def __init__(self, owner: Owner, flat: Flat) -> None:
        self.owner = owner
        self.flat = flat
        self.used = [False] * len(flat.params)
        """Which parameters have a gradient."""
        self.objects: dict[int, Tensor] = {}
        """What ``p.grad`` gave, by parameter."""
        self.given: dict[int, Tensor] = {}
        """What ``p.grad`` was set to."""
        self.full: Tensor | None = None
        """All elements, ``(numel,)``: where they were gathered, and after that as long as somebody has a view."""
        self.views: list[Tensor] = []
        self.is_current = False
        """Whether the objects are at ``full``."""
        self.owned_before: Tensor | None = None
        """This rank's part of ``full`` as it was gathered, so that what was only read is not taken back."""
        self.users = 0
        """Operations under way that need the elements."""
        self.changed = False
        """Whether user code may have changed anything since the engine asked last; the same on all ranks."""
        self.norms: dict[float, dict[int, Tensor]] = {}
        """Order -> parameter -> norm of the sharded gradient."""
        self._sources = [_Source(weakref.ref(self), i) for i in range(len(flat.params))]
        self._nothing = torch.full((1,), float("nan"), dtype=flat.average_dtype, device=flat.full.device)
        self._versions: dict[int, int] = {}
        """Of objects and given tensors when they were looked at last, to see what is written to them later."""
        self._generation = flat.averages.generation
        """Of the averages, when given tensors had what they have."""
        self._sums_due = False
        """NVMe tier: whether the sums of squares that were taken while writing are out of date."""
        self._own_users = 0
        """Of the memory of ``full``, as long as nobody else has a view."""
        self._has_leavers = False
        """Whether somebody may have an object at ``full`` that is no gradient any more, and must keep its elements."""

    # what user code does ---------------------------------------------------------------------------------------------

    def object_of(self, i: int) -> Tensor:
        """What ``p.grad`` is. Collective where it is a tensor that user code gave."""
        given = self.given.get(i)
        if given is not None:
            if self._generation != self.flat.averages.generation:
                self._refresh_given()
            return given
        if i not in self.objects:
            shape = torch.Size(self.flat.layout.slots[i].shape)
            self.objects[i] = sharded_gradient.new_gradient(shape, self._nothing, self._sources[i])
            if self.is_current:
                sharded_gradient.give_elements(self.objects[i], self.views[i])
        return self.objects[i]

    def _refresh_given(self) -> None:
        """Put into given tensors what the engine has done to the gradients since. Collective."""
        self.late_writes()
        self.owner.gather(self)
        for i, given in self.given.items():
            if self._versions[i] != -1:
                given.detach().copy_(self.views[i])
                self._versions[i] = given._version
        self._generation = self.flat.averages.generation
        self.owner.used(self)

    def give(self, i: int, value: Tensor) -> None:
        """``p.grad = value``. Collective."""
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
        """The parameter has no gradient any more."""
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
        """Change this rank's elements of one parameter's gradient. Not collective."""
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
        if flat.averages.on_nvme:
            values = torch.empty(piece.numel, dtype=flat.average_dtype)
            flat.rest.read_into("grad", values, piece.start)
            change(values)
            flat.rest.write("grad", piece.start, values)
            self._sums_due = True
        else:
            flat.averages.widen()
            change(flat.averages.tensor()[piece.start : piece.stop])

    def zero(self, wanted: list[int], *, set_to_none: bool) -> None:
        """The averages of these parameters are set to zero by who calls. Not collective."""
        for i in wanted:
            if set_to_none:
                self.drop(i)
                continue
            if self.full is not None:
                self.views[i].zero_()
            if i in self.given:
                self.given[i].detach().zero_()
                self._versions[i] = self.given[i]._version
            for norms in self.norms.values():
                norms.pop(i, None)

    # elements --------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Fill ``full`` and every object. Collective."""
        if self.is_current:
            return
        self.flush()
        flat = self.flat
        if self.full is None:
            self.full = torch.zeros(flat.layout.numel, dtype=flat.average_dtype, device=flat.full.device)
            self.views = [view.detach() for view in flat.split(self.full)]
            self._own_users = storage_users(self.full)
        flat.averages.gather(self.full)
        self.owned_before = self.full[slice(*flat.owned)].clone()
        for i, gradient in self.objects.items():
            sharded_gradient.give_elements(gradient, self.views[i])
        self.is_current = self.changed = True  # whoever has the elements may write to them
        self.norms.clear()

    def let_go(self) -> None:
        """The objects ask for their elements again; ``full`` goes, unless somebody has a view of it."""
        if self.is_current:
            self.is_current = False
            for i, gradient in self.objects.items():
                shape = torch.Size(self.flat.layout.slots[i].shape)
                sharded_gradient.take_elements(gradient, shape, self._nothing, self._sources[i])
        if self.full is not None and (self._has_leavers or storage_users(self.full) <= self._own_users):
            self.full, self.views, self.owned_before = None, [], None
            self._has_leavers = False

    def flush(self) -> None:
        """Take what user code has written into the averages. Not collective."""
        flat = self.flat
        if self.full is not None and self.owned_before is not None:
            self._take_moved()
            mine = self.full[slice(*flat.owned)]
            differs = bits(mine) != bits(self.owned_before)
            for i, piece in enumerate(flat.pieces):
                if not self.used[i] or i in self.given:
                    differs[piece.start : piece.stop] = False
            if bool(differs.any()):
                self._write(0, mine, differs)
                self.owned_before = mine.clone()
        for i, value in self.given.items():
            if value._version != self._versions[i]:
                self._versions[i] = value._version
                piece = flat.pieces[i]
                own = value.detach().reshape(-1)[piece.param_start : piece.param_start + piece.numel]
                self._write(piece.start, own.to(flat.average_dtype))
        if self._sums_due:
            flat.averages.change(lambda _: None)  # takes them anew
            self._sums_due = False

    def _take_moved(self) -> None:
        """An object whose memory user code has replaced (``p.grad.data = other``)."""
        for i, gradient in self.objects.items() if self.is_current else ():
            if gradient.numel() and gradient.data_ptr() != self.views[i].data_ptr():
                self.views[i].copy_(gradient)

    def _write(self, start: int, values: Tensor, where: Tensor | None = None) -> None:
        """Elements of this rank's shard from ``start`` on, those of ``where``."""
        flat, averages = self.flat, self.flat.averages
        if not averages.hold_values:  # made by hand, without a backward: on every rank, also where it has no part of it
            averages.hold_values = True
            if averages.on_nvme:
                flat.rest.write("grad", 0, torch.zeros(flat.stepped_numel, dtype=flat.average_dtype))
            else:
                averages.tensor().zero_()
        if averages.on_nvme:
            if values.numel():
                flat.rest.write("grad", start, values)  # elements that are not of ``where`` are what they were
            self._sums_due = True
            return
        averages.widen()
        tensor = averages.tensor()
        out = tensor[start : start + values.numel()]
        values = values.to(out.device)
        out.copy_(values if where is None else torch.where(where.to(out.device), values, out))

    # what the engine does --------------------------------------------------------------------------------------------

    def late_writes(self) -> bool:
        """Whether given tensors were written to since, the same on all ranks.

        Raises:
            StateError: a view was, that somebody kept from before the engine changed the gradients.
        """
        if not self.is_current and self.owned_before is None:
            for i, gradient in self.objects.items():
                if gradient._version != self._versions.get(i, gradient._version):
                    self._refuse(i)
        late = [i for i, value in self.given.items() if value._version != self._versions[i]]
        for i in late:
            if self._versions[i] != -1 and self._generation != self.flat.averages.generation:
                self._refuse(i)
        return bool(late)

    def _refuse(self, i: int) -> None:
        raise StateError(
            f"a view of {self.flat.layout.slots[i].name}.grad, or the tensor that it was set to, was written to after "
            "the gradients had been clipped, unscaled or added to, which it does not show. Write to p.grad itself, "
            "read again in every hook."
        )

    def take(self) -> bool:
        """What is in the averages counts from here on. Returns whether anything may have changed. Not collective."""
        flat = self.flat
        self.flush()
        self.let_go()
        self.owned_before = None
        self._versions.update({i: gradient._version for i, gradient in self.objects.items()})
        self._generation = flat.averages.generation
        self.norms.clear()
        changed, self.changed = self.changed, False
        if changed:
            flat.averages.edited = True
            flat.local_grad_mask = list(self.used)
            for i, used in enumerate(self.used) if not flat.policy.gradients else ():
                _agree_here(flat, i, used=used)
        return changed


@dataclass(frozen=True)
class _Source:
    """Of one parameter's gradient."""

    shown_of: weakref.ref[UserGradients]
    index: int

    @property
    def _shown(self) -> UserGradients:
        shown = self.shown_of()
        if shown is None:
            raise StateError("a gradient was used after the strategy that had its elements was gone. Keep a clone.")
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


def _agree_here(flat: Flat, i: int, *, used: bool) -> None:
    """Stage 1, where ``p.grad`` of this rank says whether there is a gradient."""
    param: nn.Parameter = flat.params[i]
    if not used:
        set_grad(param, None)
        flat.sent_mask[i] = False
    elif grad_of(param) is None:
        flat.hold_grad_buffer(param.dtype)
        flat.grad_views[i].zero_()
        flat.show_grad(i)
