"""Gradients that can be read and changed anywhere: after backward ``p.grad`` is what it is under DDP, at every stage.

======  ============================================================================================================
stage   ``p.grad`` between backward and `zero_grad`
======  ============================================================================================================
0       the buffer that was averaged in place: nothing is done here
1 to 3  the averaged gradient in full, gathered per flat buffer when somebody asks; what is written there, replaced or
        set to None is what the optimizer sees
======  ============================================================================================================

Inside backward, and in micro-batches whose gradients stages 0 and 1 keep on their rank, ``p.grad`` is this rank's own.
A look is collective: every rank takes it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ls_strategy._compat import current_backward_pass
from ls_strategy.errors import StateError
from ls_strategy.zero.parameters import grad_of, set_grad
from ls_strategy.zero.units import Flat
from ls_strategy.zero.writes import bits


@dataclass
class Shown:
    """The averaged gradients of one buffer, in full."""

    whole: Tensor
    views: list[Tensor]
    """Of ``whole``, in the parameters' shapes."""

    used: list[bool]
    """Which parameters have a gradient."""

    mine: Tensor
    """This rank's part of them as it was, so that what was only read is not taken back."""

    used_before: list[bool]


class Gradients:
    """What user code sees as ``p.grad`` of an engine's parameters."""

    def __init__(self, flats: list[Flat], complete: Callable[[int], list[bool]], *, parallel: str = "") -> None:
        """Look at ``flats``.

        Args:
            flats: of the engine.
            complete: averages what is left of an optimizer's gradients, collectively; one flag per parameter of its
                flats: whether any rank has a gradient.
            parallel: kinds of parallelism that leave a rank with a part of the model, for the message.
        """
        self._complete = complete
        self._parallel = parallel
        self._of = {n: [f for f in flats if f.optimizer_index == n] for n in {f.optimizer_index for f in flats}}
        self._shown: dict[int, tuple[Flat, Shown]] = {}
        self.local = False
        """Whether the gradients of the last backward stay on their rank: for now, or since training has ended."""

        for flat in flats:
            if flat.trainable and (flat.policy.optimizer or parallel):
                flat.gradients = self

    # what user code does ---------------------------------------------------------------------------------------------

    def read(self, flat: Flat, index: int) -> Tensor | None:
        """``p.grad``. Collective, the first time after a backward."""
        if self._is_local():
            return grad_of(flat.params[index])
        if self._parallel:
            raise StateError(
                f"{flat.layout.slots[index].name}.grad was read under {self._parallel} parallelism, where a rank has a "
                "part of the model, so that norms over what it has differ from rank to rank. Use "
                "trainer.strategy.grad_norm() and Trainer(gradient_clip_val=...) or self.clip_gradients(...); to "
                "change gradients element by element, change those of optimizer.param_groups in "
                "on_before_optimizer_step."
            )
        shown = self._show(flat)
        return shown.views[index] if shown.used[index] else None

    def write(self, flat: Flat, index: int, value: Tensor | None) -> None:
        """``p.grad = value``. Collective, the first time after a backward."""
        if self._is_local() or not flat.policy.optimizer:
            set_grad(flat.params[index], value)
            return
        shown = self._show(flat)
        shown.used[index] = value is not None
        if value is None:
            shown.views[index].zero_()
        elif value is not shown.views[index]:
            shown.views[index].copy_(value)

    def _is_local(self) -> bool:
        return self.local or current_backward_pass() >= 0

    def _show(self, flat: Flat) -> Shown:
        found = self._shown.get(id(flat))
        if found is not None:
            return found[1]
        neighbours = self._of[flat.optimizer_index]
        used = self._complete(flat.optimizer_index)
        start = sum(len(f.params) for f in neighbours[: neighbours.index(flat)])
        shown = self._gather(flat, used[start : start + len(flat.params)])
        self._shown[id(flat)] = (flat, shown)
        return shown

    @staticmethod
    def _gather(flat: Flat, used: list[bool]) -> Shown:
        flat.wait_updated()
        if flat.averages.gone:
            raise StateError(
                f"the gradients of {flat.name!r} and its neighbours are gone: their update began while backward ran. "
                "Read them before the step, with overlap_step=False on the strategy."
            )
        whole = torch.zeros(flat.layout.numel, dtype=flat.average_dtype, device=flat.full.device)
        if flat.averages.hold_values:
            lo, hi = flat.owned
            if flat.averages.on_drive:
                flat.rest.read_into("grad", whole[lo:hi])
            else:
                whole[lo:hi].copy_(flat.averages.owned())
            flat.comm.all_gather(whole, flat.name, flat.layout.sizes).wait()
        views = [whole[s.offset : s.end].view(s.shape).detach() for s in flat.layout.slots]
        return Shown(whole, views, used, whole[slice(*flat.owned)].clone(), list(used))

    # what the engine does --------------------------------------------------------------------------------------------

    def take(self, index: int, used: list[bool] | None = None) -> bool:
        """What became of an optimizer's gradients counts from here on. Not collective.

        Args:
            index: of the optimizer.
            used: one flag per parameter of its flats, agreed on before: kept up to date.

        Returns:
            Whether this rank's part of anything has changed.
        """
        changed, start = False, 0
        for flat in self._of.get(index, []):
            found = self._shown.pop(id(flat), None)
            if found is not None and _take(flat, found[1]):
                changed = True
                if used is not None:
                    used[start : start + len(flat.params)] = found[1].used
            start += len(flat.params)
        return changed

    def take_all(self) -> None:
        """Of every optimizer."""
        for index in self._of:
            self.take(index)

    def zero(self, params: set[int], *, set_to_none: bool) -> None:
        """``module.zero_grad()`` has dropped those of the parameters with these ``id``."""
        for flat, shown in self._shown.values():
            for i, param in enumerate(flat.params):
                if id(param) in params:
                    shown.views[i].zero_()
                    shown.used[i] = shown.used[i] and not set_to_none

    def forget(self, index: int) -> None:
        """An optimizer's gradients were dropped."""
        for flat in self._of.get(index, []):
            self._shown.pop(id(flat), None)


def _take(flat: Flat, shown: Shown) -> bool:
    averages = flat.averages
    now = shown.whole[slice(*flat.owned)]
    differs = bits(now) != bits(shown.mine)
    if shown.used == shown.used_before and not bool(differs.any()):
        return False
    if averages.on_drive:
        averages.hold_values = True
        flat.rest.write("grad", 0, now)
        averages.change(lambda _: None)  # takes the sums anew
    else:
        averages.widen()
        values = averages.tensor()
        if not averages.hold_values:  # made by hand, without a backward
            averages.hold_values = True
            values.zero_()
        values.copy_(torch.where(differs.to(values.device), now.to(values.device), values))
    for i, used in enumerate(shown.used):
        flat.used_here[i] = used
        if not flat.policy.gradients:
            _agree_here(flat, i, used=used)
    return True


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
