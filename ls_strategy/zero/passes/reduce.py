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

The reducer knows when a buffer is sent, a `ReductionKind` knows how:

==================  ================================================================================================
`InRankOrder`       one reduce-scatter, of the transport or in the order of the ranks; also over groups of ranks
`Encoded`           in another `WireFormat`, hop by hop: inside the nodes, between them, between replicas
`InTree`            this round's terms of a sum over virtual ranks, in one fixed tree on any number of ranks
==================  ================================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ls_strategy import spans
from ls_strategy.distributed.comm import Comm, PendingReduce
from ls_strategy.distributed.quantized_reduce import Rounding, reduce_quantized
from ls_strategy.distributed.reduction import Reduction
from ls_strategy.distributed.rounds import VirtualRound
from ls_strategy.distributed.tree_sum import RoundInFlight, exchange_leaves
from ls_strategy.distributed.wire_format import FORMATS, WireFormat
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import grad_of, set_grad, unnoticed
from ls_strategy.zero.flat.states import EARLY
from ls_strategy.zero.flat.units import Unit
from ls_strategy.zero_stages import StagePolicy

IN_FLIGHT_BYTES = 64 << 20
"""Bytes of gradient buffers in flight at a time (stages 2 and 3, and all stages on NCCL).

With more than that and more than two buffers in flight, the reducer waits for the oldest one.
"""


# how one buffer is averaged: a seam -----------------------------------------------------------------------------------


class ReductionKind(Protocol):
    """A way to average."""

    def start(self, flat: FlatBuffer, full: Tensor) -> Reduction:
        """Start averaging this rank's gradients ``full``, ``(numel,)``, over ``flat.comm``. Collective.

        ``full`` does not change and stays allocated until `Reduction.finish` or `Reduction.collect`.
        """
        ...


class InRankOrder:
    """A reduce-scatter of the gradients as they are; sums are in the order of the ranks, unless the transport sums."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Record the least dtype of sums of the transport; None: that of the gradients."""
        self._dtype = dtype

    def start(self, flat: FlatBuffer, full: Tensor) -> Reduction:
        """Start. Collective."""
        dtype = None if self._dtype is None else torch.promote_types(self._dtype, full.dtype)
        return flat.comm.reduce_scatter(full, dtype, flat.name, flat.layout.sizes)


class Encoded:
    """A reduce-scatter of encoded terms, see `ls_strategy.distributed.quantized_reduce`."""

    def __init__(self, form: WireFormat, meter: Rounding) -> None:
        """Record the format, and what adds up the rounding error of gradients that no other rank reduces too."""
        self._form, self._meter = form, meter

    def start(self, flat: FlatBuffer, full: Tensor) -> Reduction:
        """Start the first hop. Collective."""
        meter = self._meter if flat.reduces_alone else Rounding()
        return reduce_quantized(flat.comm, full, self._form, of=flat.name, sizes=flat.layout.sizes, meter=meter)


class InTree:
    """One round of a sum over virtual ranks, see `ls_strategy.distributed.tree_sum`."""

    def __init__(self, now: VirtualRound) -> None:
        self.now = now

    def expect(self, flat: FlatBuffer) -> bool:
        """Return whether this rank computes nothing in this round. Then begin to receive the others' terms: collective.

        Nothing waits for them before the next round in which this rank computes something.
        """
        if self.now.leaves[flat.comm.everyone.rank] is not None:
            return False
        flat.averages.tree_sum().expect(self._exchange(flat, None), self.now)
        return True

    def start(self, flat: FlatBuffer, full: Tensor) -> Reduction:
        """Start sending this rank's term to the owners of its shards. Collective."""
        return RoundInFlight(flat.averages.tree_sum(), self._exchange(flat, full), self.now)

    def _exchange(self, flat: FlatBuffer, leaf: Tensor | None) -> PendingReduce:
        return exchange_leaves(flat.comm, leaf, self.now, like=flat.full, of=flat.name, sizes=flat.layout.sizes)


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
        self.reorder(units)
        self._units = units
        self.policy = policy
        self.comm = comm
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
        self.round: InTree | None = None
        """With virtual ranks: the round of the current backward pass. It takes the place of the buffers' own kind."""
        self.on_complete: Callable[[FlatBuffer], None] | None = None
        """Called with every buffer as soon as its averages are complete, before backward is over."""
        self.admit: Callable[[list[FlatBuffer]], None] = lambda _: None
        """Begins to send the gradients of frozen buffers."""
        self.agree_on_tied: Callable[[Tensor], None] | None = None
        """In a pipeline: sets flags that are set on any of the stages that hold the tied parameters."""
        self.check_sparse: Callable[[nn.Parameter], None] = lambda _: None
        """Refuses a parameter whose optimizer must not get a dense gradient in place of a sparse one."""
        self.rounding = Rounding()
        """With ``sharding.quantized_gradients``: what that changes, until it is asked for."""
        self.kinds: dict[str | None, ReductionKind] = {
            None: InRankOrder(torch.float32 if reduce_in_fp32 else None),
            **{name: Encoded(form, self.rounding) for name, form in FORMATS.items()},
        }
        """How buffers are averaged, by the ``reduced_as`` of their plan."""
        self._left_out: LeftOut | None = None
        """Set during a backward pass whose gradients do not count on this rank."""
        self._next = 0
        self._in_flight: deque[FlatBuffer] = deque()
        self._in_flight_bytes = 0
        """Of the gradient buffers in `_in_flight`: a sum over them would be taken once per buffer that is sent."""
        self._hopping: list[Reduction] = []
        """Reductions in flight that have another hop to begin."""
        self._gathers: list[FlatBuffer] = []
        self._abandoned: list[Any] = []
        self.abandoned = 0
        """Number of operations that the last `abort` has left in flight."""
        self.reset()

    def reorder(self, units: list[Unit]) -> None:
        """Send the units whose buffers train, in the order of the last to the first."""
        self.order = [u for u in reversed(units) if u.trainable_flats]

    # one backward pass -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Expect a gradient of every parameter."""
        self._next = 0
        with (
            unnoticed()
        ):  # else each look at a released parameter would pass through `ShardedParameter.__torch_function__`
            for unit in self.order:
                unit.launched = False
                unit.waiting_for = sum([p.requires_grad for f in unit.trainable_flats for p in f.nonempty_params])

    def begin_backward(self, *, eager: bool, loss_scale: float = 1.0, counts: bool = True) -> None:
        """Begin a backward pass with a loss scale.

        Args:
            eager: send the gradients in this pass, because it is the last one before the step (stages 0 and 1).
            loss_scale: factor in the gradients.
            counts: whether this rank's gradients of the pass count. If not, it only takes part in the collectives.
        """
        self.finish_in_flight()
        self.eager = eager or (self.policy.gradients and not self.holds)
        self.loss_scale = loss_scale
        self.reset()
        for unit in self.order:
            for flat in unit.trainable_flats:
                if not self.policy.gradients and any(flat.local.mask):
                    flat.local.widen()
                flat.local.rescale(loss_scale)
        self._left_out = None if counts else LeftOut(self._units)

    def on_grad(self, unit: Unit, flat: FlatBuffer, index: int, param: nn.Parameter) -> None:
        """Take ``param.grad`` from autograd."""
        grad = grad_of(param)
        if grad is None:
            return
        if grad.is_sparse:  # of nn.Embedding(sparse=True): shards and collectives are dense
            self.check_sparse(param)
            grad = grad.to_dense()
            set_grad(param, grad)
        if self._left_out is not None:
            self._left_out.drop(param)
        else:
            self._take(unit, flat, index, grad)
        if flat.is_frozen or grad.numel() == 0:
            return  # never waited for
        unit.waiting_for -= 1
        if unit.waiting_for == 0:
            if spans.SpanRecorder.active is not None:
                spans.at_unit(unit.name)
            if self.eager:
                self._advance()

    def on_rows(self, flat: FlatBuffer, index: int, grad: Tensor) -> None:
        """Note the rows of a gradient that autograd is about to add to ``param.grad``."""
        if self._left_out is None:
            flat.local.note_rows(index, grad)

    def _take(self, unit: Unit, flat: FlatBuffer, index: int, grad: Tensor) -> None:
        if flat.offloaded:
            flat.require_here("gradients")
        local = flat.local
        if local.scale != self.loss_scale:  # of a pass that began without `begin_backward`
            if local.has_others(than=index):
                raise StateError(
                    f"loss.backward() was called while the loss scale of fp16 is {local.scale:g}, and added "
                    f"unscaled gradients to scaled ones at {flat.layout.slots[index].name!r}. Call "
                    "self.manual_backward(loss) instead."
                )
            local.take_scale(self.loss_scale)
        if self.round is not None and unit.launched:
            raise StateError(
                f"{flat.layout.slots[index].name!r} got a second gradient after its unit was sent in the same backward "
                "pass (a reentrant checkpoint, or a second backward), but with parallel.virtual_ranks the order of "
                "all additions is fixed. Use torch.utils.checkpoint with use_reentrant=False."
            )
        # A second gradient in one pass stays in p.grad: until the first one is back (stages 0 and 1), or for the step.
        # That of a frozen buffer stays here for the step, too: it may have come on this rank only.
        if unit.launched and (not flat.is_frozen if self.policy.gradients else local.reducing is not None):
            local.note_late(index)
        elif self.policy.gradients:
            local.add(index, grad, flat.average_dtype if self.holds or flat.is_frozen else flat.gradient_dtype)
        else:
            local.collect(index, grad, grad.dtype if self.policy.optimizer else flat.average_dtype)

    def _advance(self) -> None:
        while self._next < len(self.order) and self.order[self._next].waiting_for <= 0:
            self._launch_unit(self.order[self._next])
            self._next += 1

    def end_backward(self) -> None:
        """End the backward pass: send the remaining units, in order. Collective if the pass was eager."""
        self.loss_scale = 1.0
        if self.eager:
            chosen = self.selective and self.policy.gradients
            for unit in self._unsent_with_gradients() if chosen else self.order[self._next :]:
                self._launch_unit(unit)
            self._next = len(self.order)
            if not self.policy.gradients or self.on_complete is not None:
                self.finish_in_flight()  # hooks read p.grad, or the last updates begin
        if self._left_out is not None:
            self._left_out.put_back([flat for unit in self._units for flat in unit.flats])
            self._left_out = None

    def _unsent_with_gradients(self) -> list[Unit]:
        """Return the units still to be sent that got gradients on any rank, in order. Collective."""
        touched = torch.tensor([u.launched or any(f.local.dirty for f in u.trainable_flats) for u in self.order])
        touched = self.comm.agree(touched.to(torch.uint8))
        return [u for u, t in zip(self.order, touched.tolist(), strict=True) if t and not u.launched]

    def send_held(self) -> None:
        """Send the gradients accumulated under `holds` that no eager pass has sent. Collective."""
        if any(not unit.launched for unit in self.order):
            self.eager = True
            self.end_backward()

    def _launch_unit(self, unit: Unit) -> None:
        unit.launched = True
        if self._left_out is not None:
            self._left_out.put_back(unit.trainable_flats)
        for flat in unit.trainable_flats:
            self._launch(flat)

    # one flat buffer -------------------------------------------------------------------------------------------------

    def _launch(self, flat: FlatBuffer) -> None:
        """Start averaging a flat's gradients. Collective."""
        local = flat.local
        if self.round is not None and self.round.expect(flat):
            return
        # Ranks that have no gradients send as many bytes as those that have some.
        if local.buffer is None:
            local.allocate(flat.average_dtype if self.holds or not self.policy.optimizer else flat.gradient_dtype)
        assert local.buffer is not None
        local.complete()
        if flat.averages.in_place:
            flat.averages.note_values()
            if flat.comm.averaged_ranks == 1:  # nothing to average over
                return
        if not self.policy.gradients:
            for p in flat.params:
                set_grad(p, None)  # autograd must not add to what is being sent
        if self._hopping:
            self._advance_hops()
        kind = self.kinds[flat.plan.reduced_as] if self.round is None else self.round
        reducing = kind.start(flat, local.buffer)
        local.begin_reducing(reducing)
        if reducing.hops:
            self._hopping.append(reducing)
        self._in_flight.append(flat)
        self._in_flight_bytes += local.buffer.nbytes
        while self._too_much_in_flight():
            self._finish_oldest()

    def _advance_hops(self) -> None:
        """Let reductions of several hops begin their next one, instead of when they are waited for. Collective."""
        self._hopping = [reducing for reducing in self._hopping if reducing.advance()]

    def _too_much_in_flight(self) -> bool:
        if self.on_complete is not None:
            return len(self._in_flight) > 1  # wait early, so that updates can begin
        # Resident gradients are sent in place, but NCCL sums copies of them in `wire_dtype`.
        if len(self._in_flight) <= 2 or not (self.policy.gradients or self.comm.native):
            return False
        return self._in_flight_bytes > IN_FLIGHT_BYTES

    def _finish_oldest(self) -> None:
        flat = self._in_flight.popleft()
        local = flat.local
        assert local.buffer is not None
        assert local.reducing is not None
        self._in_flight_bytes -= local.buffer.nbytes
        if not local.reducing.is_last:
            local.reducing.collect(flat.average_dtype)
            local.free()
        elif self.policy.optimizer:
            self._land(flat, local.reducing)
        else:
            shard = flat.comm.pool.take(flat.layout.shard, local.buffer.dtype, local.buffer.device)
            local.reducing.finish(shard, accumulate=False)
            local.buffer[slice(*flat.owned)].copy_(shard)
            flat.comm.pool.give([shard])
            local.begin_gathering(flat.comm.all_gather(local.buffer, flat.name))
            self._gathers.append(flat)
        local.end_reducing()

    def _land(self, flat: FlatBuffer, reducing: Reduction) -> None:
        """Add a reduced buffer to the averages (stages 1 to 3)."""
        if not self.policy.gradients:
            flat.averages.forget()  # the resident gradients hold every micro-batch
        complete = self.on_complete is not None and self._complete(flat)
        if flat.update in EARLY:
            raise StateError(
                f"{flat.name!r} got another gradient after its unit was updated in the same backward pass (a "
                "reentrant checkpoint, or a second backward). Set sharding.overlap_step=False on the strategy."
            )
        flat.averages.land(reducing, exact_16_bit=self.private, stay_in_memory=complete)
        if self.policy.gradients:
            flat.local.free()
        if complete and self.on_complete is not None:
            self.on_complete(flat)

    def _complete(self, flat: FlatBuffer) -> bool:
        """Return whether every parameter of the buffer has its gradient, so that none follows before the step.

        A frozen buffer is never complete: it may be sent before its unit's backward, which still gathers it.
        """
        return (
            self.eager
            and any(flat.local.mask)
            and all(u or not p.requires_grad for u, p in zip(flat.local.mask, flat.params, strict=True))
        )

    def finish_in_flight(self) -> None:
        """Wait until all gradients that were sent are averaged."""
        while self._in_flight:
            if self._hopping:
                self._advance_hops()
            self._finish_oldest()
        for flat in self._gathers:
            flat.local.end_gathering()
        self._gathers.clear()

    # between backward and step ---------------------------------------------------------------------------------------

    def complete(self, flats: list[FlatBuffer]) -> list[bool]:
        """Average gradients that any rank has not sent, and agree on which parameters have one. Collective.

        Returns:
            One flag per parameter of ``flats``: whether any rank produced a gradient since the last `zero_grad`.

        Raises:
            StateError: a parameter was written to on some ranks only.
        """
        self.finish_in_flight()
        for flat in flats:
            if not self.policy.gradients:
                flat.local.match_grads()
        used, sent, left = agree(flats, self.comm)
        if self.agree_on_tied is not None:
            self._use_tied(flats, used, self.agree_on_tied)
        flags_of = iter(used)
        begin = [f for f in flats if any([next(flags_of) for _ in f.params]) and f.is_frozen]
        if begin:
            self.admit(begin)
        for flat, dirty in zip(flats, left, strict=True):
            if dirty:
                self._launch(flat)
        self.finish_in_flight()
        if not self.policy.gradients:
            start = 0
            for flat in flats:
                stop = start + len(flat.params)
                match_sent(flat, used[start:stop], sent[start:stop])
                start = stop
        self.reset()
        return used

    def _use_tied(self, flats: list[FlatBuffer], used: list[bool], agree_on_tied: Callable[[Tensor], None]) -> None:
        """Count a parameter that several stages hold as used if one of them has a gradient: all of them step it."""
        tied = [flat.plan.tied for flat in flats for _ in flat.params]
        if any(tied):
            flags = torch.tensor([u for u, t in zip(used, tied, strict=True) if t], dtype=torch.uint8)
            agree_on_tied(flags)
            found = iter(flags.bool().tolist())
            used[:] = [next(found) if t else u for u, t in zip(used, tied, strict=True)]

    def zero_grad(self, flats: list[FlatBuffer], *, set_to_none: bool) -> None:
        """Drop or zero the gradients of ``flats`` (``optimizer.zero_grad()``)."""
        if any(f.local.reducing is not None or f.local.gathering is not None for f in flats):
            self.finish_in_flight()
        for flat in flats:
            flat.averages.forget() if set_to_none else flat.averages.zero()
            flat.local.zero_grad(set_to_none=set_to_none)

    def zero_params(self, flats: list[FlatBuffer], wanted: set[int], *, set_to_none: bool) -> None:
        """Drop the averaged gradients of the parameters with an ``id`` in ``wanted``, but not their ``p.grad``."""
        self.finish_in_flight()
        for flat in flats:
            for i, (param, piece) in enumerate(zip(flat.params, flat.pieces, strict=True)):
                if id(param) in wanted:
                    if set_to_none:
                        flat.local.drop(i)
                    flat.averages.zero(piece.start, piece.stop)

    def abort(self) -> None:
        """Forget a backward pass that an exception ended. Nothing is sent.

        Operations in flight stay referenced for good, because their buffers must not be freed while they receive.
        """
        self.abandoned = len(self._in_flight) + len(self._gathers)
        self._abandoned += [flat.local.abandon() for flat in (*self._in_flight, *self._gathers)]
        self._in_flight.clear()
        self._hopping.clear()
        self._in_flight_bytes = 0
        self._gathers.clear()
        for unit in self.order:
            for flat in unit.trainable_flats:
                flat.local.abandon()
                if flat.averages.tree is not None:
                    self._abandoned.append(flat.averages.tree.forget())
        self.loss_scale = 1.0
        self._left_out = None
        self.reset()


# which parameters are stepped: those that have a gradient on any rank ------------------------------------------------


def agree(flats: list[FlatBuffer], comm: Comm) -> tuple[list[bool], list[bool], list[bool]]:
    """Return what holds on any of the ranks. Collective.

    Returns:
        For each parameter of ``flats``: whether it got a gradient, and whether it had one when its buffer was sent; and
        for each buffer, whether gradients in it have not been sent.

    Raises:
        StateError: a parameter was written to on some ranks only.
    """
    written = [f.writes.take_detected() for f in flats]
    flags = [
        [used for f in flats for used in f.local.mask],
        [sent for f in flats for sent in f.local.sent_mask],
        [f.local.dirty for f in flats],
        written,
        [not here for here in written],
    ]
    agreed = comm.agree(torch.tensor([flag for each in flags for flag in each], dtype=torch.uint8))
    found = [part.bool().tolist() for part in agreed.split([len(each) for each in flags])]
    used, sent, left, written, unwritten = found
    for flat, here, elsewhere in zip(flats, written, unwritten, strict=True):
        if here and elsewhere:
            raise StateError(
                f"a parameter in the buffer of {flat.name!r} was written to on some ranks and not on others, but "
                "each rank holds a shard of it. Run the code that writes weights on every rank."
            )
    return used, sent, left


def match_sent(flat: FlatBuffer, used: list[bool], sent: list[bool]) -> None:
    """Make the averages follow ``p.grad``, which may have changed since it was sent (stages 0 and 1).

    ``used``: which parameters have a gradient on any rank; ``sent``: which had one when the buffer was sent.
    """
    # Gradients that user code has set without a backward.
    if flat.averages.in_place and any(used) and not flat.averages.hold_values:
        flat.local.allocate(flat.average_dtype)
        flat.local.take_all_replaced()
        flat.averages.note_values()
    for i, piece in enumerate(flat.pieces):
        if sent[i] and not used[i]:
            flat.averages.zero(piece.start, piece.stop)
        elif used[i] and flat.averages.in_place and flat.local.take_replaced(i):
            flat.local.show(i)  # another rank's
    flat.local.note_sent(used)


# backward passes whose gradients do not count: they run for their collectives alone ---------------------------------


class LeftOut:
    """The gradients that this rank had before a backward pass that does not count.

    The one invariant: after the pass they are what they were before it, bit for bit. They are moved aside and put back,
    because multiplying what the pass produces by zero would keep its infinities and NaNs.
    """

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

    def put_back(self, flats: list[FlatBuffer]) -> None:
        """Put the gradients of some buffers back; what the pass has produced there is dropped. Once per buffer."""
        with unnoticed():
            for flat in flats:
                for p, grad in self._held.pop(id(flat), ()):
                    set_grad(p, grad)
