"""Gradients that can be read and changed anywhere: after backward ``p.grad`` is what it is under DDP, at every stage.

======  ============================================================================================================
stage   ``p.grad`` between backward and `zero_grad`
======  ============================================================================================================
0       the buffer that is averaged in place, if that has not happened yet; after that an ordinary tensor
1 to 3  the averaged gradient. Its elements stay sharded for norms and scalings and are gathered per flat buffer for
        anything else; what is written there, replaced or set to None is what the optimizer sees
======  ============================================================================================================

Of the gathered buffers the `KEPT` last stay, so that reading all gradients does not take the memory of all of them; a
buffer of which somebody keeps a view stays as long as the view. An object that ``p.grad`` gave stays valid until
`zero_grad`, also when the engine has changed the gradients since (clipping, another backward): then it is gathered
again.

Inside backward, and in micro-batches whose gradients stages 0 and 1 keep on their rank, ``p.grad`` is this rank's own.
Looking at gradients is collective: every rank does it, in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy._compat import current_backward_pass, foreach_function, storage_key, storage_users
from ls_strategy.errors import StateError
from ls_strategy.zero import sharded_gradient
from ls_strategy.zero.lending import Lender
from ls_strategy.zero.parameters import grad_of, set_grad
from ls_strategy.zero.step import reduce_numbers
from ls_strategy.zero.units import Flat
from ls_strategy.zero.writes import bits

KEPT = 2
"""Gathered buffers that stay when another one is gathered."""


class _Shown:
    """The averaged gradients of one flat buffer, as user code sees them."""

    def __init__(self, owner: Gradients, flat: Flat) -> None:
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
        if flat.averages.on_drive:
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
            self.views = [self.full[s.offset : s.end].view(s.shape).detach() for s in flat.layout.slots]
            self._own_users = storage_users(self.full)
        gather_averages(flat, self.full)
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
            if averages.on_drive:
                flat.rest.write("grad", 0, torch.zeros(flat.stepped[1] - flat.stepped[0], dtype=flat.average_dtype))
            else:
                averages.tensor().zero_()
        if averages.on_drive:
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
            flat.used_here = list(self.used)
            for i, used in enumerate(self.used) if not flat.policy.gradients else ():
                _agree_here(flat, i, used=used)
        return changed


@dataclass(frozen=True)
class _Source:
    """Of one parameter's gradient."""

    shown_of: weakref.ref[_Shown]
    index: int

    @property
    def _shown(self) -> _Shown:
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
            shown.owner.settle(shown.flat)
            shown.edit(self.index, change, linear=linear)


class Gradients:
    """What user code sees as ``p.grad`` of an engine's parameters."""

    def __init__(
        self, flats: list[Flat], complete: Callable[[int], list[bool]], lender: Lender, *, parallel: str = ""
    ) -> None:
        """Look at ``flats``.

        Args:
            flats: of the engine.
            complete: averages what is left of an optimizer's gradients, collectively; one flag per parameter of its
                flats: whether any rank has a gradient.
            lender: knows which thread trains.
            parallel: kinds of parallelism that leave a rank with a part of the model, for the message.
        """
        self._complete = complete
        self._lender = lender
        self._parallel = parallel
        self._of = {n: [f for f in flats if f.optimizer_index == n] for n in {f.optimizer_index for f in flats}}
        self._shown: dict[int, _Shown] = {}
        self._settled: set[int] = set()
        """Optimizers whose gradients were averaged to the last since the last backward."""
        self._gathered: list[_Shown] = []
        """In the order of their last use."""
        self.averaged = False
        """Whether the last backward has sent everything, so that at stage 0 nothing is left to do."""
        self.local = False
        """Whether the gradients of the last backward stay on their rank: for now, or since training has ended."""

        for flat in flats:
            if flat.trainable and (flat.policy.optimizer or parallel or flat.comm.world_size > 1):
                flat.gradients = self

    # what user code does ---------------------------------------------------------------------------------------------

    def read(self, flat: Flat, index: int) -> Tensor | None:
        """``p.grad``. Collective, the first time after a backward."""
        if self._is_local():
            return _local_gradient(flat, index)
        if self._parallel:
            raise StateError(
                f"{flat.layout.slots[index].name}.grad was read under {self._parallel} parallelism, where a rank has a "
                "part of the model, so that norms over what it has differ from rank to rank. Use "
                "trainer.strategy.grad_norm() and Trainer(gradient_clip_val=...) or self.clip_gradients(...); to "
                "change gradients element by element, change those of optimizer.param_groups in "
                "on_before_optimizer_step."
            )
        if not flat.policy.optimizer:
            return self._read_in_place(flat, index)
        shown = self.settle(flat)
        return shown.object_of(index) if shown.used[index] else None

    def write(self, flat: Flat, index: int, value: Tensor | None) -> None:
        """``p.grad = value``. Collective, the first time after a backward."""
        if not flat.policy.optimizer and not self._is_local():
            self._average_in_place(flat)
            if value is None and flat.grad is not None:
                flat.give_back_grads([index])
                flat.grad_views[index].zero_()
        if not flat.policy.optimizer or self._is_local():
            if value is not None and self.holds(sharded_gradient.as_plain(value)):
                value = value.clone()
            set_grad(flat.params[index], value)
            return
        shown = self.settle(flat)
        if value is None:
            shown.edit(index, torch.Tensor.zero_, linear=True)
            shown.drop(index)
        elif value is not shown.objects.get(index) and value is not shown.given.get(index):
            shown.give(index, value)

    def holds(self, value: Tensor) -> bool:
        """Whether it is in a buffer of gathered gradients, which is used again."""
        key = storage_key(value)
        return any(shown.full is not None and storage_key(shown.full) == key for shown in self._shown.values())

    def _is_local(self) -> bool:
        return self.local or current_backward_pass() >= 0

    def settle(self, flat: Flat) -> _Shown:
        """Average what is left of the gradients of its optimizer. Collective, the first time after a backward."""
        if self._is_local():
            raise StateError(
                f"a gradient of {flat.name!r}, or of a neighbour, that was kept from an earlier backward was used "
                "where gradients are not averaged: inside a backward, in a micro-batch that stays on its rank, or "
                "after the fit. Keep p.grad.clone() instead of p.grad."
            )
        self._lender.refuse_other_threads(flat.name)
        index = flat.optimizer_index
        if index not in self._settled:
            self._note_used(index, self._complete(index))
            self._settled.add(index)
        _refuse_if_gone(flat)
        return self._shown[id(flat)]

    def _read_in_place(self, flat: Flat, index: int) -> Tensor | None:
        """Stage 0: ``p.grad``, also where only another rank produced one."""
        self._average_in_place(flat)
        if grad_of(flat.params[index]) is None and flat.averages.hold_values and flat.grad_views[index].any():
            flat.show_grad(index)
        return grad_of(flat.params[index])

    def _average_in_place(self, flat: Flat) -> None:
        """Stage 0: what is left is averaged, and ``p.grad`` is the buffer.

        Collective, but not after a backward that has averaged all: there one rank may look alone, as under DDP.
        """
        if not self.averaged and flat.comm.world_size > 1 and flat.optimizer_index not in self._settled:
            self._complete(flat.optimizer_index)
            self._settled.add(flat.optimizer_index)

    def _note_used(self, index: int, used: list[bool]) -> None:
        start = 0
        for flat in self._of[index]:
            if id(flat) not in self._shown:
                self._shown[id(flat)] = _Shown(self, flat)
            shown = self._shown[id(flat)]
            for i, now in enumerate(used[start : start + len(flat.params)]):
                if shown.used[i] and not now:
                    shown.drop(i)
                shown.used[i] = now
            start += len(flat.params)

    def gather(self, shown: _Shown) -> None:
        """Bring the elements of one buffer, until `used`. Collective."""
        self.settle(shown.flat)
        shown.users += 1
        shown.gather()
        if shown in self._gathered:
            self._gathered.remove(shown)
        self._gathered.append(shown)

    def used(self, shown: _Shown) -> None:
        """They are not needed any more: of those of before, all but the last may go."""
        shown.users -= 1
        for other in [each for each in self._gathered if not each.users][:-KEPT]:
            self._gathered.remove(other)
            other.flush()
            other.let_go()

    def norm(self, shown: _Shown, index: int, order: float) -> Tensor:
        """Norm of one parameter's gradient, ``()``, summed with all others'. Collective, unless it is known."""
        self.settle(shown.flat)
        if index not in shown.norms.get(order, {}):
            group = [self._shown[id(flat)] for flat in self._of[shown.flat.optimizer_index]]
            take_norms([each for each in group if not each.is_current], order)
        return shown.norms[order][index].clone()

    # what the engine does --------------------------------------------------------------------------------------------

    def take(self, index: int, used: list[bool] | None = None) -> bool:
        """What became of an optimizer's gradients counts from here on. Collective.

        Args:
            index: of the optimizer.
            used: one flag per parameter of its flats, agreed on before: kept up to date.

        Returns:
            Whether anything may have changed, the same on all ranks.
        """
        shown = [s for flat in self._of.get(index, []) if (s := self._shown.get(id(flat))) is not None]
        if any([each.late_writes() for each in shown]) and not self._is_local():
            self.settle(shown[0].flat)
            for each in shown:
                each.changed |= each.late_writes()
        changed = any([each.take() for each in shown])
        if changed and used is not None:
            used[:] = [u for each in shown for u in each.used]
        self._gathered = [each for each in self._gathered if each.is_current]
        self._settled.discard(index)
        return changed

    def take_all(self) -> None:
        """A backward pass begins: of every optimizer. Collective.

        What backward adds to has to be what user code and clipping have made of it. At stage 1 that is ``p.grad`` of
        each rank, which is sent once more: it becomes the average, as it is under DDP.
        """
        for index, flats in self._of.items():
            self.take(index)
            for flat in flats:
                if flat.averages.edited and flat.policy.optimizer and not flat.policy.gradients:
                    _start_from_averages(flat)

    def zero(self, params: set[int], *, set_to_none: bool) -> None:
        """``module.zero_grad()`` drops those of the parameters with these ``id``. Not collective."""
        for shown in self._shown.values():
            wanted = [i for i, param in enumerate(shown.flat.params) if id(param) in params]
            if wanted:
                shown.zero(wanted, set_to_none=set_to_none)

    def forget(self, index: int, *, set_to_none: bool) -> None:
        """An optimizer's gradients are dropped, or set to zero. Not collective."""
        for flat in self._of.get(index, []):
            shown = self._shown.get(id(flat))
            if shown is None:
                continue
            shown.zero(list(range(len(flat.params))), set_to_none=set_to_none)
            shown.let_go()
            shown.owned_before, shown.changed = None, False
            if set_to_none:
                del self._shown[id(flat)]
        self._gathered = [each for each in self._gathered if each.is_current]
        self._settled.discard(index)


def gather_averages(flat: Flat, out: Tensor) -> None:
    """The averaged gradients of all ranks, times their loss scale, into ``out``: ``(numel,)``. Collective."""
    if not flat.averages.hold_values:
        out.zero_()
        return
    mine = out[slice(*flat.owned)]
    if flat.averages.on_drive:
        flat.rest.read_into("grad", mine)
    else:
        mine.copy_(flat.averages.owned())
    flat.comm.all_gather(out, flat.name, flat.layout.sizes).wait()


def _start_from_averages(flat: Flat) -> None:
    """Stage 1: gradients that are kept for another backward become the averages on every rank. Collective."""
    flat.averages.edited = False
    if not flat.averages.hold_values or flat.averages.gone:
        return
    flat.hold_grad_buffer(flat.average_dtype)
    flat.widen_grads()
    full = torch.zeros(flat.layout.numel, dtype=flat.average_dtype, device=flat.full.device)
    gather_averages(flat, full)
    full.mul_(flat.grad_scale * flat.averages.unscale)
    for i, slot in enumerate(flat.layout.slots):
        if flat.used_here[i]:
            flat.grad_views[i].copy_(full[slot.offset : slot.end].view(slot.shape))
            flat.show_grad(i)


def _refuse_if_gone(flat: Flat) -> None:
    flat.wait_updated()
    if flat.averages.gone:
        raise StateError(
            f"the gradients of {flat.name!r} and its neighbours are gone: their update began while backward ran. "
            "Read them before the step, with overlap_step=False on the strategy."
        )


def _local_gradient(flat: Flat, index: int) -> Tensor | None:
    """This rank's own gradient: what autograd has put there, or the engine has taken from there to send it."""
    found = grad_of(flat.params[index])
    if found is not None or current_backward_pass() < 0:
        return found
    if flat.policy.gradients and flat.filled[index] and flat.reducing is None and flat.grad is not None:
        return flat.grad_views[index]
    if flat.used_here[index]:
        raise StateError(
            f"{flat.layout.slots[index].name}.grad was read inside backward after it had been sent to the other ranks "
            "(a hook that was registered after the fit had begun). Register such hooks in __init__ or configure_model, "
            "or read the averaged gradient in on_after_backward."
        )
    return None


def take_norms(group: list[_Shown], order: float) -> None:
    """Norms of all parameters' gradients, from the shards: one all-reduce of a number per parameter."""
    parts: list[Tensor] = []
    for shown in group:
        _refuse_if_gone(shown.flat)
        shown.flush()
        parts.append(_norms_of_shard(shown.flat, order))
    together = _to_sum(torch.cat(parts), order)
    values = _from_sum(reduce_numbers(together, group[0].flat.comm, _operation(order)), order)
    for shown, part in zip(group, values.split([len(s.flat.params) for s in group]), strict=True):
        found = part.to(device=shown.flat.full.device, dtype=shown.flat.average_dtype)
        shown.norms[order] = dict(enumerate(found.unbind()))


def _norms_of_shard(flat: Flat, order: float) -> Tensor:
    """Of each parameter's elements in this rank's shard, fp64."""
    nothing = float("inf") if order == float("-inf") else 0.0
    result = torch.full((len(flat.params),), nothing, dtype=torch.float64, device=flat.full.device)
    if not flat.averages.hold_values:
        return result.zero_()
    values = flat.rest.read("grad") if flat.averages.on_drive else flat.averages.owned()
    pieces = [(i, piece) for i, piece in enumerate(flat.pieces) if piece.numel]
    if pieces:
        norms = foreach_function("norm")([values[p.start : p.stop].to(flat.average_dtype) for _, p in pieces], order)
        result[[i for i, _ in pieces]] = torch.stack(list(norms)).to(result)
    return result


def _to_sum(norms: Tensor, order: float) -> Tensor:
    return norms if order in (0.0, float("inf"), float("-inf")) else norms.pow(order)


def _from_sum(sums: Tensor, order: float) -> Tensor:
    return sums if order in (0.0, float("inf"), float("-inf")) else sums.pow(1.0 / order)


def _operation(order: float) -> Any:
    extreme = {float("inf"): dist.ReduceOp.MAX, float("-inf"): dist.ReduceOp.MIN}
    return extreme.get(order, dist.ReduceOp.SUM)


def _agree_here(flat: Flat, i: int, *, used: bool) -> None:
    """Stage 1, where ``p.grad`` of this rank says whether there is a gradient."""
    param: nn.Parameter = flat.params[i]
    if not used:
        set_grad(param, None)
        flat.held_here[i] = False
    elif grad_of(param) is None:
        flat.hold_grad_buffer(param.dtype)
        flat.grad_views[i].zero_()
        flat.show_grad(i)
