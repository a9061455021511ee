"""The ``p.grad`` that user code sees: after backward it is the averaged gradient, as under DDP, at every stage.

======  ============================================================================================================
stage   ``p.grad`` between backward and `zero_grad`
======  ============================================================================================================
0       the flat buffer, which is averaged in place when ``p.grad`` is first read, if backward has not averaged it
1 to 3  the averaged gradient. Its elements stay sharded for norms and scalings and are gathered per flat buffer for
        anything else. The optimizer sees what user code writes there, replaces or sets to None
======  ============================================================================================================

Only the last `KEPT` gathered buffers stay in memory, so that reading all gradients does not take memory for all of
them. A buffer that a view uses stays as long as the view. An object that ``p.grad`` returned stays valid until
`zero_grad`. If the engine has changed the gradients since (clipping, another backward), it is gathered again.

Inside backward, and in micro-batches whose gradients stages 0 and 1 keep on their rank, ``p.grad`` is this rank's own.
Reading gradients is collective: every rank does it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy._torch import current_backward_pass, foreach_function, storage_key
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import grad_of, set_grad
from ls_strategy.zero.user_code import sharded_gradient
from ls_strategy.zero.user_code.on_demand import OnDemandGather
from ls_strategy.zero.user_code.user_gradients import UserGradients

_EXTREMES = {0.0: dist.ReduceOp.SUM, float("inf"): dist.ReduceOp.MAX, float("-inf"): dist.ReduceOp.MIN}
"""Orders of norms that need no powers, with the reduction of the shards' norms."""

KEPT = 2
"""Gathered buffers that stay in memory when another one is gathered."""


class Gradients:
    """Provides ``p.grad`` of an engine's parameters that are in optimizers."""

    def __init__(
        self,
        flats: list[FlatBuffer],
        complete: Callable[[int], list[bool]],
        unfold: Callable[[int], None],
        on_demand: OnDemandGather,
        *,
        parallel: str = "",
    ) -> None:
        """Provide the gradients of ``flats``.

        Args:
            flats: flat buffers of the engine.
            complete: averages the gradients of an optimizer that were not sent yet (collective). Returns one flag per
                parameter of its flats: whether any rank has a gradient.
            unfold: applies the factors to an optimizer's averages that were left to its fused update.
            on_demand: refuses threads other than the training thread.
            parallel: kinds of parallelism that give a rank a part of the model, for the error message.
        """
        self._complete = complete
        self._unfold = unfold
        self._on_demand = on_demand
        self._parallel = parallel
        self._of = {n: [f for f in flats if f.optimizer_index == n] for n in {f.optimizer_index for f in flats}}
        self._shown: dict[int, UserGradients] = {}
        self._averaged: set[int] = set()
        """Optimizers with all gradients averaged since the last backward."""
        self._gathered: list[UserGradients] = []
        """Gathered buffers in the order of their last use."""
        self._given_in_place: list[tuple[FlatBuffer, int]] = []
        """Stage 0: parameters whose ``p.grad`` user code has set after it was averaged."""
        self.averaged = False
        """Whether the last backward has sent all gradients, so that stage 0 has nothing left to average."""
        self.were_read = False
        """Whether user code has read or changed averaged gradients. From stage 1 on the same on all ranks.

        Until then there is nothing to `take` or to `forget`, but for what clipping has left to `take_all` at stage 1.
        """
        self.local = False
        """Whether the gradients of the last backward stay on their rank: for now, or because training has ended."""

        self.hides_scale = False
        """Whether user code sees gradients without their loss scale also before the step; see `LossScaler.is_shown`."""

        self.admit: Callable[[list[FlatBuffer]], None] = lambda _: None
        """Lets frozen buffers train, because they are given gradients."""
        for flat in flats:
            if flat.has_optimizer:
                flat.show_by(gradients=self)

    # called by user code ---------------------------------------------------------------------------------------------

    def read(self, flat: FlatBuffer, index: int) -> Tensor | None:
        """Return ``p.grad``. Collective the first time after a backward."""
        if self._is_local():
            self._unscale_local(flat)
            return _local_gradient(flat, index)
        if self._parallel:
            raise StateError(
                f"{flat.layout.slots[index].name}.grad was read under {self._parallel} parallelism, where a rank has a "
                "part of the model, so that norms over its parameters differ from rank to rank. Use "
                "trainer.strategy.grad_norm() and Trainer(gradient_clip_val=...) or self.clip_gradients(...); to "
                "change gradients element by element, change those of optimizer.param_groups in "
                "on_before_optimizer_step."
            )
        if not flat.policy.optimizer:
            self._average_in_place(flat)
            # Also where only another rank has produced a gradient.
            if grad_of(flat.params[index]) is None and flat.averages.hold_values and flat.local.views[index].any():
                flat.local.show(index)
            return grad_of(flat.params[index])
        shown = self.average(flat)
        return shown.object_of(index) if shown.used[index] else None

    def write(self, flat: FlatBuffer, index: int, value: Tensor | None) -> None:
        """Set ``p.grad``. Collective the first time after a backward."""
        if value is not None and not self._is_local():
            self.admit([flat])
        if not flat.policy.optimizer and not self._is_local():
            self._average_in_place(flat)
            if value is None and flat.local.buffer is not None:
                flat.local.give_back([index])
                flat.local.views[index].zero_()
        if not flat.policy.optimizer or self._is_local():
            self._unscale_local(flat)
            if value is not None and self.holds(sharded_gradient.as_plain(value)):
                value = value.clone()
            set_grad(flat.params[index], value)
            if value is not None and not self._is_local():
                self._given_in_place.append((flat, index))
            return
        shown = self.average(flat)
        if value is None:
            shown.edit(index, torch.Tensor.zero_, linear=True)
            shown.drop(index)
        elif value is not shown.objects.get(index) and value is not shown.given.get(index):
            shown.give(index, value)

    def holds(self, value: Tensor) -> bool:
        """Return whether ``value`` is a view of a buffer of gathered gradients, which is reused."""
        key = storage_key(value)
        return any(shown.full is not None and storage_key(shown.full) == key for shown in self._shown.values())

    def _is_local(self) -> bool:
        return self.local or current_backward_pass() >= 0

    def _unscale_local(self, flat: FlatBuffer) -> None:
        """Undo the loss scale of gradients that stay on this rank; inside a backward, more with the scale follow."""
        if self.hides_scale and current_backward_pass() < 0:
            flat.local.rescale(1.0)

    def average(self, flat: FlatBuffer) -> UserGradients:
        """Average the gradients of the optimizer of ``flat`` that were not sent yet.

        Collective the first time after a backward.
        """
        if self._is_local():
            raise StateError(
                f"a gradient in the buffer of {flat.name!r} that was kept from an earlier backward was used where "
                "gradients are not averaged: inside a backward, in a micro-batch whose gradients stay on their rank, "
                "or after the fit. Keep p.grad.clone() instead of p.grad."
            )
        self._on_demand.refuse_other_threads(flat.name)
        index = flat.optimizer_index
        if index not in self._averaged:
            self.were_read = True
            self._note_used(index, self._complete(index))
            self._unfold(index)
            self._averaged.add(index)
        flat.wait_updated()
        flat.averages.require_here()
        return self._shown[id(flat)]

    def _average_in_place(self, flat: FlatBuffer) -> None:
        """Average the gradients that were not sent yet in the buffer itself (stage 0).

        Collective, except after a backward that has averaged all gradients: then one rank may read alone, as under DDP.
        """
        if not self.averaged and flat.comm.averaged_ranks > 1 and flat.optimizer_index not in self._averaged:
            self._complete(flat.optimizer_index)
            self._averaged.add(flat.optimizer_index)
        self.were_read = True
        self._unfold(flat.optimizer_index)

    def _note_used(self, index: int, used: list[bool]) -> None:
        start = 0
        for flat in self._of[index]:
            if id(flat) not in self._shown:
                self._shown[id(flat)] = UserGradients(self, flat)
            shown = self._shown[id(flat)]
            for i, now in enumerate(used[start : start + len(flat.params)]):
                if shown.used[i] and not now:
                    shown.drop(i)
                shown.used[i] = now
            start += len(flat.params)

    def gather(self, shown: UserGradients) -> None:
        """Gather one buffer, and keep it until `used`. Collective."""
        self.average(shown.flat)
        shown.users += 1
        shown.gather()
        if shown in self._gathered:
            self._gathered.remove(shown)
        self._gathered.append(shown)

    def used(self, shown: UserGradients) -> None:
        """End an operation that needed the elements. Release all idle buffers but the last `KEPT`."""
        shown.users -= 1
        for other in [each for each in self._gathered if not each.users][:-KEPT]:
            self._gathered.remove(other)
            other.flush()
            other.let_go()

    def norm(self, shown: UserGradients, index: int, order: float) -> Tensor:
        """Return the norm of one parameter's gradient, ``()``.

        Collective unless it is cached: the norms of all gradients of the optimizer are summed together.
        """
        self.average(shown.flat)
        if index not in shown.norms.get(order, {}):
            group = [self._shown[id(flat)] for flat in self._of[shown.flat.optimizer_index]]
            take_norms([each for each in group if not each.is_current], order)
        return shown.norms[order][index].clone()

    # called by the engine --------------------------------------------------------------------------------------------

    def take(self, index: int, used: list[bool] | None = None) -> bool:
        """Copy user code's changes to an optimizer's gradients into the averages. Collective.

        Args:
            index: number of the optimizer.
            used: one flag per parameter of its flats, as agreed on before; updated in place.

        Returns:
            Whether anything may have changed, the same on all ranks.
        """
        if not self._shown and not self._given_in_place:  # user code has not looked at any
            self._averaged.discard(index)
            return False
        shown = [s for flat in self._of.get(index, []) if (s := self._shown.get(id(flat))) is not None]
        if any([each.late_writes() for each in shown]) and not self._is_local():
            self.average(shown[0].flat)
            for each in shown:
                each.changed |= each.late_writes()
        changed = any([each.take() for each in shown])
        if changed and used is not None:
            used[:] = [u for each in shown for u in each.used]
        changed |= self._take_given_in_place(index, used)
        self._gathered = [each for each in self._gathered if each.is_current]
        self._averaged.discard(index)
        return changed

    def _take_given_in_place(self, index: int, used: list[bool] | None) -> bool:
        """Count parameters that got a gradient from user code alone as used (stage 0). Return whether there are any."""
        mine = [(flat, i) for flat, i in self._given_in_place if flat.optimizer_index == index]
        self._given_in_place = [(flat, i) for flat, i in self._given_in_place if flat.optimizer_index != index]
        changed = False
        for flat, i in mine:
            number = sum(len(f.params) for f in takewhile(lambda f, end=flat: f is not end, self._of[index])) + i
            if used is None or used[number] or grad_of(flat.params[i]) is None:
                continue
            flat.local.allocate(flat.average_dtype)
            if not flat.averages.hold_values:
                flat.local.take_all_replaced()
            flat.local.take_replaced(i)
            flat.averages.note_values()
            used[number] = changed = True
        return changed

    def take_all(self) -> None:
        """Call `take` for every optimizer before a backward pass. Collective.

        Backward adds to the gradients as user code and clipping have left them. At stage 1 it adds to ``p.grad`` of
        each rank, which is sent once more; so ``p.grad`` becomes the average first, as it is under DDP.
        """
        for index, flats in self._of.items():
            self.take(index)
            for flat in flats:
                averages, local = flat.averages, flat.local
                if not averages.edited or not flat.policy.optimizer or flat.policy.gradients:
                    continue
                averages.end_edits()
                if not averages.hold_values or averages.gone:
                    continue
                local.allocate(flat.average_dtype)
                local.widen()
                for i, average in enumerate(flat.split(averages.gather().mul_(local.scale * averages.unscale))):
                    if local.mask[i]:
                        local.views[i].copy_(average)
                        local.show(i)

    def let_go(self) -> None:
        """Free gathered buffers that no view uses, after taking changes. Not collective."""
        for shown in self._shown.values():
            shown.flush()
            shown.let_go()
        self._gathered = [each for each in self._gathered if each.is_current]

    def zero(self, params: set[int], *, set_to_none: bool) -> None:
        """Drop or zero the gradients of the parameters with these ``id`` (``module.zero_grad()``). Not collective."""
        for shown in self._shown.values():
            wanted = [i for i, param in enumerate(shown.flat.params) if id(param) in params]
            if wanted:
                shown.zero(wanted, set_to_none=set_to_none)

    def forget(self, index: int, *, set_to_none: bool) -> None:
        """Drop or zero the gradients of an optimizer. Not collective."""
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
        self._averaged.discard(index)


def _local_gradient(flat: FlatBuffer, index: int) -> Tensor | None:
    """Return this rank's own gradient: ``.grad`` as autograd set it, or the copy that the engine is to send."""
    found = grad_of(flat.params[index])
    if found is not None or current_backward_pass() < 0:
        return found
    local = flat.local
    if flat.policy.gradients and local.filled[index] and local.reducing is None and local.buffer is not None:
        return local.shown_view(index)
    if local.mask[index]:
        raise StateError(
            f"{flat.layout.slots[index].name}.grad was read inside backward after it had been sent to the other ranks "
            "(a hook that was registered after the fit had begun). Register such hooks in __init__ or configure_model, "
            "or read the averaged gradient in on_after_backward."
        )
    return None


def take_norms(group: list[UserGradients], order: float) -> None:
    """Compute the norms of all gradients of ``group`` from their shards: one all-reduce, a number per parameter."""
    parts: list[Tensor] = []
    for shown in group:
        shown.flat.wait_updated()
        shown.flat.averages.require_here()
        shown.flush()
        parts.append(_norms_of_shard(shown.flat, order))
    norms, comm = torch.cat(parts), group[0].flat.comm
    if order in _EXTREMES:
        values = comm.reduce_numbers(norms, _EXTREMES[order])
    else:
        values = comm.reduce_numbers(norms.pow(order), dist.ReduceOp.SUM).pow(1.0 / order)
    for shown, part in zip(group, values.split([len(s.flat.params) for s in group]), strict=True):
        found = part.to(device=shown.flat.full.device, dtype=shown.flat.average_dtype)
        shown.norms[order] = dict(enumerate(found.unbind()))


def _norms_of_shard(flat: FlatBuffer, order: float) -> Tensor:
    """Return the norms of each parameter's elements in this rank's shard, fp64."""
    neutral = float("inf") if order == float("-inf") else 0.0
    result = torch.full((len(flat.params),), neutral, dtype=torch.float64, device=flat.full.device)
    if not flat.averages.hold_values:
        return result.zero_()
    values = flat.averages.owned()
    pieces = [(i, piece) for i, piece in enumerate(flat.pieces) if piece.numel]
    if pieces:
        norms = foreach_function("norm")([values[p.start : p.stop].to(flat.average_dtype) for _, p in pieces], order)
        result[[i for i, _ in pieces]] = torch.stack(list(norms)).to(result)
    return result
