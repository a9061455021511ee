"""Average gradients: when they are sent from autograd to the fp32 averages, and in which order.

The order is fixed on every rank: units in reverse order of registration, independent of the order in which their
gradients are ready. A unit is sent when its last gradient has arrived and all units before it were sent. The end of
backward sends all others, with zeros for parameters without a gradient on this rank.

=========  ======================================================  =============================================
stage      gradients of this rank                                  sent
=========  ======================================================  =============================================
0, 1       stay in ``p.grad`` until `zero_grad`, accumulate there  once: in the last micro-batch's backward, or by
                                                                   the step if it is not known which is the last
2, 3       are in a transient buffer during backward               in every backward, added to the fp32 shard
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
"""Bytes of gradient buffers in flight at a time (stages 2 and 3, and all stages on NCCL).

With more than that and more than two buffers in flight, the reducer waits for the oldest one.
"""


class Reducer:
    """Collects gradients of all units and averages them over ranks."""

    def __init__(self, units: list[Unit], *, policy: StagePolicy, comm: Comm, reduce_in_fp32: bool) -> None:
        """Begin with no gradients.

        Args:
            units: units in order of registration.
            policy: which states are sharded.
            comm: the ranks that agree on which parameters have gradients: all ranks that average some unit together.
            reduce_in_fp32: whether to send fp32 where the transport computes the sums.
        """
        self.order = [u for u in reversed(units) if u.trainable_flats]
        self.policy = policy
        self.comm = comm
        self.wire_dtype = torch.float32 if reduce_in_fp32 else None
        self.holds = False
        """Stages 2 and 3: accumulate several micro-batches on this rank, in fp32, before sending (pipelines)."""
        self.selective = False
        """Several optimizers: agree on which units got gradients, and send only those (stages 2 and 3)."""
        self.eager = True
        """Whether the current backward pass sends complete units."""
        self.loss_scale = 1.0
        """Factor in the next gradients. It is 1 between passes: a direct call of ``loss.backward()`` has no scale."""
        self.private = False
        """Whether only the step reads averaged gradients, so that they may stay in 16 bit where that is exact."""
        self.on_complete: Callable[[Flat], None] | None = None
        """Called with every buffer as soon as its averages are complete, before backward is over."""
        self._next = 0
        self._in_flight: deque[Flat] = deque()
        self._gathers: list[Flat] = []
        self._abandoned: list[Any] = []
        self.abandoned = 0
        """Number of operations that the last `abort` has left in flight."""
        self.reset()

    # one backward pass -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Expect a gradient of every parameter."""
        self._next = 0
        for unit in self.order:
            unit.launched = False
            unit.waiting_for = sum(p.requires_grad and p.numel() > 0 for f in unit.trainable_flats for p in f.params)

    def begin_backward(self, *, eager: bool, loss_scale: float = 1.0) -> None:
        """Begin a backward pass.

        Args:
            eager: send the gradients in this pass, because it is the last one before the step (stages 0 and 1).
            loss_scale: factor in the gradients.
        """
        self.finish_in_flight()
        self.eager = eager or (self.policy.gradients and not self.holds)
        self.loss_scale = loss_scale
        self.reset()
        for unit in self.order:
            for flat in unit.trainable_flats:
                if any(flat.local_grad_mask) and not self.policy.gradients:
                    flat.widen_grads()
                flat.rescale_grads(loss_scale)

    def on_grad(self, unit: Unit, flat: Flat, index: int, param: nn.Parameter) -> None:
        """Take ``param.grad`` from autograd."""
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
        """Adopt the loss scale of a pass that began without `begin_backward`."""
        if flat.has_other_gradients(than=index):
            raise StateError(
                f"loss.backward() was called while the loss scale of fp16 is {flat.grad_scale:g}, and added "
                f"unscaled gradients to scaled ones at {flat.layout.slots[index].name!r}. Call "
                "self.manual_backward(loss) instead."
            )
        flat.grad_scale = self.loss_scale

    def _take_resident(self, unit: Unit, flat: Flat, index: int, grad: Tensor) -> None:
        flat.dirty = True
        if unit.launched and flat.reducing is not None:
            return  # a second gradient in one pass, while the first is in flight: it stays in p.grad until then
        flat.hold_grad_buffer(grad.dtype if self.policy.optimizer else flat.average_dtype)
        view = flat.grad_views[index]
        if grad is not view and not flat.has_adopted(index, grad):
            view.copy_(grad)
            flat.show_grad(index)

    def _take_transient(self, unit: Unit, flat: Flat, index: int, param: nn.Parameter, grad: Tensor) -> None:
        if unit.launched:  # a second gradient in one pass (reentrant recompute): it stays in p.grad for the step
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
        """End the backward pass: send the remaining units, in order. Collective if the pass was eager."""
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
            self.finish_in_flight()  # hooks read p.grad, or the last updates begin

    def send_held(self) -> None:
        """Send the gradients accumulated under `holds` that no eager pass has sent. Collective."""
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
            return len(self._in_flight) > 1  # wait early, so that updates can begin
        # Resident gradients are sent in place, but NCCL sums copies of them in `wire_dtype`.
        bounded = self.policy.gradients or self.comm.native
        return bounded and len(self._in_flight) > 2 and self._bytes_in_flight() > IN_FLIGHT_BYTES

    def _fill_transient(self, flat: Flat) -> None:
        """Add late gradients to the buffer, and zero the slots without a gradient."""
        for i, (param, view) in enumerate(zip(flat.params, flat.grad_views, strict=True)):
            late = grad_of(param)
            if late is not None:
                view.add_(late) if flat.filled[i] else view.copy_(late)
                set_grad(param, None)
            elif not flat.filled[i]:
                view.zero_()
        flat.filled = [False] * len(flat.params)

    def _fill_resident(self, flat: Flat) -> None:
        """Copy every ``p.grad``, which user code may have changed, into its slot."""
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
                    f"{flat.name!r} got another gradient after its unit was updated in the same backward pass (a "
                    "reentrant checkpoint, or a second backward). Set sharding.overlap_step=False on the strategy."
                )
            flat.averages.land(flat.reducing, exact_16_bit=self.private, stay_in_memory=complete)
            if self.policy.gradients:
                flat.drop_grad_buffer()
            if complete and self.on_complete is not None:
                self.on_complete(flat)
        flat.reducing = None
        if not (self.policy.gradients or flat.averages.in_place):
            self._show_grads(flat)

    def _complete(self, flat: Flat) -> bool:
        """Whether every parameter of the buffer has its gradient, so that none follows before the step.

        A frozen buffer is never complete: it may be sent before its unit's backward, which still gathers it.
        """
        return (
            self.eager
            and any(flat.local_grad_mask)
            and all(u or not p.requires_grad for u, p in zip(flat.local_grad_mask, flat.params, strict=True))
        )

    def _show_grads(self, flat: Flat) -> None:
        """Put the resident gradients back into ``p.grad``, and add gradients that came while they were in flight."""
        for i, (param, view, held) in enumerate(zip(flat.params, flat.grad_views, flat.sent_mask, strict=True)):
            late = grad_of(param)
            if late is not None and late is not view:
                view.add_(late) if held else view.copy_(late)
                flat.dirty = True
            if held or late is not None:
                flat.show_grad(i)

    def finish_in_flight(self) -> None:
        """Wait until all gradients that were sent are averaged."""
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
        """Average gradients that any rank has not sent, and agree on which parameters have one. Collective.

        Returns:
            One flag per parameter of ``flats``: whether any rank produced a gradient since the last `zero_grad`.

        Raises:
            StateError: a parameter was written to on some ranks only.
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
                    f"a parameter in the buffer of {flat.name!r} was written to on some ranks and not on others, but "
                    "each rank holds a shard of it. Run the code that writes weights on every rank."
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
        """Make the averages follow ``p.grad``, which may have changed since it was sent (stages 0 and 1).

        Args:
            flat: an averaged buffer.
            used: which parameters have a gradient on any rank.
            held: which had one on any rank when the buffer was sent.
        """
        if (
            flat.averages.in_place and any(used) and not flat.averages.hold_values
        ):  # set by user code without a backward
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
        """Drop or zero the gradients of ``flats`` (``optimizer.zero_grad()``)."""
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
        """Drop the averaged gradients of the parameters with an ``id`` in ``wanted``, but not their ``p.grad``."""
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

        Operations in flight stay referenced for good, because their buffers must not be freed while they receive.
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
