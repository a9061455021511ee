"""Gradients on their way from autograd to fp32 averages: when they are sent, and in which order.

The order is fixed: units in reverse order of registration, on every rank, whatever order their gradients become ready
in. A unit is sent when its last gradient has arrived and all units before it were sent; the end of backward sends the
rest, with zeros for parameters that had no gradient here.

=========  ======================================================  =============================================
stage      gradients of this rank                                  sent
=========  ======================================================  =============================================
0, 1       stay in ``p.grad`` until `zero_grad`, accumulate there  once: in the last micro-batch's backward, or by
                                                                   the step where nobody can know which is the last
2, 3       live in a transient buffer during backward              in every backward, added to the fp32 shard
=========  ======================================================  =============================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import StateError
from ls_strategy.zero.parameters import grad_of, set_grad
from ls_strategy.zero.units import Flat, Unit
from ls_strategy.zero_stages import StagePolicy

IN_FLIGHT_BYTES = 64 << 20
"""Stages 2 and 3, and all on NCCL: gradient buffers under way at a time.

Beyond that, and two units, the oldest is waited for.
"""


class Reducer:
    """Collects gradients of all units and averages them over ranks."""

    def __init__(self, units: list[Unit], *, policy: StagePolicy, comm: Comm, reduce_in_fp32: bool) -> None:
        """Expect gradients.

        Args:
            units: in order of registration.
            policy: what is sharded.
            comm: the ranks that must agree on what has gradients: all with whom some unit is averaged.
            reduce_in_fp32: the dtype of sums, where the transport sums.
        """
        self.order = [u for u in reversed(units) if u.trainable_flats]
        self.policy = policy
        self.comm = comm
        self.wire_dtype = torch.float32 if reduce_in_fp32 else None
        self.holds = False
        """Stages 2 and 3: several micro-batches add up on this rank, in fp32, before they are sent (pipelines)."""
        self.selective = False
        """Several optimizers: ask all ranks which units got gradients, and send only those (stages 2 and 3)."""
        self.eager = True
        """Whether the backward pass under way sends what it completes."""
        self.loss_scale = 1.0
        """What the gradients to come are multiplied by. 1 between passes: who calls ``loss.backward()`` by himself has
        not scaled the loss."""
        self.private = False
        """Nobody but the step looks at averaged gradients: they may be kept in fewer bits where that is exact."""
        self.on_complete: Callable[[Flat], None] | None = None
        """Called with every buffer whose averages are complete before backward is over."""
        self._next = 0
        self._in_flight: deque[Flat] = deque()
        self._gathers: list[Flat] = []
        self._abandoned: list[Any] = []
        self.abandoned = 0
        """Operations that the last `abort` has left in flight."""
        self.reset()

    # one backward pass -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Expect every gradient again."""
        self._next = 0
        for unit in self.order:
            unit.launched = False
            unit.waiting_for = sum(p.requires_grad and p.numel() > 0 for f in unit.trainable_flats for p in f.params)

    def begin_backward(self, *, eager: bool, loss_scale: float = 1.0) -> None:
        """A backward pass starts.

        Args:
            eager: its gradients complete what the next step needs (stages 0 and 1).
            loss_scale: what they are multiplied by.
        """
        self.finish_in_flight()
        self.eager = eager or (self.policy.gradients and not self.holds)
        self.loss_scale = loss_scale
        self.reset()
        for unit in self.order:
            for flat in unit.trainable_flats:
                if any(flat.local_grad_mask) and not self.policy.gradients:
                    flat.widen_grads()
                flat.carry(loss_scale)

    def on_grad(self, unit: Unit, flat: Flat, index: int, param: nn.Parameter) -> None:
        """Autograd finished ``param.grad``."""
        grad = grad_of(param)
        if grad is None:
            return
        if flat.grad_scale != self.loss_scale:
            self._begin_scale(flat, index)
        flat.local_grad_mask[index] = True
        if self.policy.gradients:
            self._take_transient(unit, flat, index, param, grad)
        else:
            self._take_resident(unit, flat, index, grad)
        if param.numel() == 0:
            return  # never waited for
        unit.waiting_for -= 1
        if unit.waiting_for == 0 and self.eager:
            self._advance()

    def _begin_scale(self, flat: Flat, index: int) -> None:
        """The first gradient of a pass that nobody announced says what the others are multiplied by."""
        if flat.holds_gradients(besides=index):
            raise StateError(
                f"loss.backward() was called where the loss scale of fp16 is {flat.grad_scale:g}, and added unscaled "
                f"gradients to scaled ones at {flat.layout.slots[index].name!r}. Call self.manual_backward(loss) "
                "instead."
            )
        flat.grad_scale = self.loss_scale

    def _take_resident(self, unit: Unit, flat: Flat, index: int, grad: Tensor) -> None:
        flat.dirty = True
        if unit.launched and flat.reducing is not None:
            return  # a second gradient in one pass, while the first is under way: kept apart in p.grad until it is back
        flat.hold_grad_buffer(grad.dtype if self.policy.optimizer else flat.average_dtype)
        view = flat.grad_views[index]
        if grad is not view and not flat.has_adopted(index, grad):
            view.copy_(grad)
            flat.show_grad(index)

    def _take_transient(self, unit: Unit, flat: Flat, index: int, param: nn.Parameter, grad: Tensor) -> None:
        if unit.launched:  # a second gradient in one pass (reentrant recompute): kept in p.grad, sent by the step
            flat.dirty = True
            return
        flat.hold_grad_buffer(flat.average_dtype if self.holds else grad.dtype)
        view = flat.grad_views[index]
        if flat.filled[index]:
            view.add_(grad)
        else:
            view.copy_(grad)
            flat.filled[index] = True
        flat.dirty = True
        set_grad(param, None)

    def _advance(self) -> None:
        while self._next < len(self.order) and self.order[self._next].waiting_for <= 0:
            self._launch_unit(self.order[self._next])
            self._next += 1

    def end_backward(self) -> None:
        """The backward pass is over: send what is left, in order. Collective where the pass was eager."""
        self.loss_scale = 1.0
        if not self.eager:
            return
        rest = self.order[self._next :]
        if self.selective and self.policy.gradients:
            touched = torch.tensor([u.launched or any(f.dirty for f in u.trainable_flats) for u in self.order])
            touched = self.comm.agree(touched.to(torch.uint8))
            rest = [u for u, t in zip(self.order, touched.tolist(), strict=True) if t and not u.launched]
        for unit in rest:
            self._launch_unit(unit)
        self._next = len(self.order)
        if not self.policy.gradients or self.on_complete is not None:
            self.finish_in_flight()  # hooks after backward read p.grad; or the last updates are to begin

    def send_held(self) -> None:
        """Send what `holds` has kept and no eager pass has sent. Collective."""
        if any(not unit.launched for unit in self.order):
            self.eager = True
            self.end_backward()

    def _launch_unit(self, unit: Unit) -> None:
        unit.launched = True
        for flat in unit.trainable_flats:
            self._launch(flat)

    # one flat buffer -------------------------------------------------------------------------------------------------

    def _launch(self, flat: Flat) -> None:
        """Start averaging a flat's gradients. Collective."""
        flat.hold_grad_buffer(flat.full.dtype if self.policy.optimizer else flat.average_dtype)
        assert flat.grad is not None
        if self.policy.gradients:
            self._fill_transient(flat)
        else:
            self._fill_resident(flat)
        flat.dirty = False
        if not self.policy.gradients:
            flat.sent_mask = [grad_of(p) is not None for p in flat.params]
        if flat.averages.in_place:
            flat.averages.hold_values = True
            if flat.comm.world_size == 1:  # nothing to average over
                return
        if not self.policy.gradients:
            for p in flat.params:
                set_grad(p, None)  # autograd must not add to what is being sent
        wire = None if self.wire_dtype is None else torch.promote_types(self.wire_dtype, flat.grad.dtype)
        flat.reducing = flat.comm.reduce_scatter(flat.grad, wire, flat.name, flat.layout.sizes)
        self._in_flight.append(flat)
        while self._too_much_in_flight():
            self._finish(self._in_flight.popleft())

    def _too_much_in_flight(self) -> bool:
        if self.on_complete is not None:
            return len(self._in_flight) > 1  # what is complete is waited for: its update can begin
        # Resident gradients are sent from where they are, but NCCL sums copies of them in `wire_dtype`.
        bounded = self.policy.gradients or self.comm.native
        return bounded and len(self._in_flight) > 2 and self._bytes_in_flight() > IN_FLIGHT_BYTES

    def _fill_transient(self, flat: Flat) -> None:
        """Make every slot of the buffer valid: late gradients added, zeros where there was none."""
        for i, (param, view) in enumerate(zip(flat.params, flat.grad_views, strict=True)):
            late = grad_of(param)
            if late is not None:
                view.add_(late) if flat.filled[i] else view.copy_(late)
                set_grad(param, None)
            elif not flat.filled[i]:
                view.zero_()
        flat.filled = [False] * len(flat.params)

    def _fill_resident(self, flat: Flat) -> None:
        """Make every slot of the buffer what ``p.grad`` says, which the user may have changed."""
        for i, view in enumerate(flat.grad_views):
            if flat.take_replaced(i):
                view.zero_()

    def _bytes_in_flight(self) -> int:
        return sum(f.grad.nbytes for f in self._in_flight if f.grad is not None)

    def _finish(self, flat: Flat) -> None:
        assert flat.reducing is not None
        if not self.policy.optimizer:
            assert flat.grad is not None
            shard = flat.comm.pool.take(flat.layout.shard, flat.grad.dtype, flat.grad.device)
            flat.reducing.finish(shard, accumulate=False)
            flat.grad[slice(*flat.owned)].copy_(shard)
            flat.comm.pool.give([shard])
            flat.gathering_grads = flat.comm.all_gather(flat.grad, flat.name)
            self._gathers.append(flat)
        else:
            if not self.policy.gradients:
                flat.averages.forget()  # the resident gradients hold every micro-batch
            complete = self.on_complete is not None and self._complete(flat)
            if flat.updated_early:
                raise StateError(
                    f"{flat.layout.slots[0].name!r} got another gradient after its unit was updated in the same "
                    "backward pass (a reentrant checkpoint, or a second backward). Set sharding.overlap_step=False on "
                    "the strategy."
                )
            flat.averages.land(flat.reducing, exact_16_bit=self.private, at_hand=complete)
            if self.policy.gradients:
                flat.drop_grad_buffer()
            if complete and self.on_complete is not None:
                self.on_complete(flat)
        flat.reducing = None
        if not (self.policy.gradients or flat.averages.in_place):
            self._show_grads(flat)

    def _complete(self, flat: Flat) -> bool:
        """Whether every parameter of the buffer has its gradient, so that nothing more is to come in this step.

        A frozen buffer is not complete: it may be sent before its unit's backward, which still has to gather it.
        """
        return (
            self.eager
            and any(flat.local_grad_mask)
            and all(u or not p.requires_grad for u, p in zip(flat.local_grad_mask, flat.params, strict=True))
        )

    def _show_grads(self, flat: Flat) -> None:
        """Put the resident gradients back into ``p.grad``, with whatever came while they were under way."""
        for i, (param, view, held) in enumerate(zip(flat.params, flat.grad_views, flat.sent_mask, strict=True)):
            late = grad_of(param)
            if late is not None and late is not view:
                view.add_(late) if held else view.copy_(late)
                flat.dirty = True
            if held or late is not None:
                flat.show_grad(i)

    def finish_in_flight(self) -> None:
        """Wait until everything that was sent is averaged."""
        while self._in_flight:
            self._finish(self._in_flight.popleft())
        for flat in self._gathers:
            assert flat.gathering_grads is not None
            flat.gathering_grads.wait()
            flat.gathering_grads = None
            self._show_grads(flat)
        self._gathers.clear()

    # between backward and step ---------------------------------------------------------------------------------------

    def complete(self, flats: list[Flat]) -> list[bool]:
        """Average whatever any rank has left, and agree on which parameters have a gradient. Collective.

        Returns:
            For every parameter of ``flats`` in order: whether some rank produced a gradient since the last `zero_grad`.
        """
        self.finish_in_flight()
        for flat in flats:
            if not self.policy.gradients:
                flat.local_grad_mask = [grad_of(p) is not None for p in flat.params]
        flags = [u for f in flats for u in f.local_grad_mask] + [h for f in flats for h in f.sent_mask]
        flags += [f.dirty for f in flats]
        flags += [f.was_written for f in flats] + [not f.was_written for f in flats]
        agreed = [bool(flag) for flag in self.comm.agree(torch.tensor(flags, dtype=torch.uint8)).tolist()]
        count = (len(agreed) - 3 * len(flats)) // 2
        used, held, rest = agreed[:count], agreed[count : 2 * count], agreed[2 * count :]
        left, written, unwritten = (rest[i * len(flats) : (i + 1) * len(flats)] for i in range(3))
        for flat, here, elsewhere in zip(flats, written, unwritten, strict=True):
            flat.was_written = False
            if here and elsewhere:
                raise StateError(
                    f"a parameter of {flat.name!r} and its neighbours was written to on some ranks and not on others, "
                    "which each hold a shard of it. Run the code that writes weights on every rank."
                )
        for flat, dirty in zip(flats, left, strict=True):
            if dirty:
                self._launch(flat)
        self.finish_in_flight()
        if not self.policy.gradients:
            start = 0
            for flat in flats:
                stop = start + len(flat.params)
                self._match_sent(flat, used[start:stop], held[start:stop])
                start = stop
        self.reset()
        return used

    def _match_sent(self, flat: Flat, used: list[bool], held: list[bool]) -> None:
        """Stages 0 and 1: the averages count what ``p.grad`` says now, whatever was sent.

        Args:
            flat: averaged.
            used: which parameters have a gradient on some rank.
            held: which had one on some rank when they were sent, or asked for last.
        """
        if flat.averages.in_place and any(used) and not flat.averages.hold_values:  # made by hand, without a backward
            flat.hold_grad_buffer(flat.average_dtype)
            self._fill_resident(flat)
            flat.averages.hold_values = True
        for i, piece in enumerate(flat.pieces):
            if held[i] and not used[i]:
                flat.averages.zero(piece.start, piece.stop)
            elif used[i] and flat.averages.in_place and flat.take_replaced(i):
                flat.show_grad(i)  # another rank's
        flat.sent_mask = used

    def zero_grad(self, flats: list[Flat], *, set_to_none: bool) -> None:
        """``optimizer.zero_grad()`` for the optimizer that owns ``flats``."""
        if any(f.reducing is not None or f.gathering_grads is not None for f in flats):
            self.finish_in_flight()
        for flat in flats:
            if set_to_none:
                flat.give_back_grads(range(len(flat.params)))
                flat.local_grad_mask = [False] * len(flat.params)
                flat.averages.forget()
                flat.sent_mask = [False] * len(flat.params)
                flat.dirty = False
                flat.filled = [False] * len(flat.params)
                if self.policy.gradients and flat.grad is not None:
                    flat.drop_grad_buffer()
            else:
                flat.averages.zero()
            for param in flat.params:
                grad = grad_of(param)
                if grad is None:
                    continue
                if set_to_none:
                    set_grad(param, None)
                    if param.grad_dtype != param.dtype:  # type: ignore[attr-defined]
                        param.grad_dtype = param.dtype  # type: ignore[attr-defined]
                else:
                    grad.zero_()

    def zero_params(self, flats: list[Flat], wanted: set[int], *, set_to_none: bool) -> None:
        """Drop the averaged gradients of the parameters whose ``id`` is in ``wanted``, not their ``p.grad``."""
        self.finish_in_flight()
        for flat in flats:
            for i, (param, piece) in enumerate(zip(flat.params, flat.pieces, strict=True)):
                if id(param) not in wanted:
                    continue
                if set_to_none:
                    flat.give_back_grads([i])
                flat.averages.zero(piece.start, piece.stop)
                if set_to_none:
                    flat.local_grad_mask[i] = flat.filled[i] = False

    def abort(self) -> None:
        """Forget a backward pass that an exception ended. Nothing is sent.

        What was under way stays referenced for good: freeing a buffer that is still being received into would be worse.
        """
        self.abandoned = len(self._in_flight) + len(self._gathers)
        self._abandoned.append([(f.reducing, f.gathering_grads, f.grad) for f in (*self._in_flight, *self._gathers)])
        self._in_flight.clear()
        self._gathers.clear()
        for unit in self.order:
            for flat in unit.trainable_flats:
                flat.reducing = None
                flat.gathering_grads = None
        self.loss_scale = 1.0
        self.reset()
