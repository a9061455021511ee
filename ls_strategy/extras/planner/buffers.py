"""Simulate the engine's flat buffers, buffer pool and reducer: bytes instead of memory.

The rules repeat those of `zero.reduce.Reducer`, `zero.averages.Averages`, `comm.Comm` and `quantized_reduce`. A test
compares the result with the storages of real ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ls_strategy.config import ActivationOffloadConfig
from ls_strategy.distributed.comm import SUM_CHUNK, ranks_by_node
from ls_strategy.distributed.wire_format import FORMATS
from ls_strategy.ops.quantized import TILE
from ls_strategy.plan import FlatPlan, Plan
from ls_strategy.zero.flat.states import UpdateState
from ls_strategy.zero.passes import reduce


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Inputs of a replay besides the trace and the plan."""

    optimizer_bytes: tuple[float, ...]  # bytes per element of each optimizer, see `states.moment_bytes`
    micro_batches: int = 1
    prefetch_units: int = 1
    # Updates start in backward: offload, one optimizer, no clipping, no loss scale, no code that reads gradients.
    early_step: bool = True
    native: bool = False  # NCCL: the transport reduces, and has its own buffers
    wire_fp32: bool = True  # NCCL: gradients are reduced in fp32
    cuda: bool = False  # the device has its own memory: states are copied from the host
    step_temporaries: bool = False  # some optimizer's step needs temporaries as large as the stepped shards
    activation_offload: ActivationOffloadConfig | None = None
    node_size: int | None = None  # ranks per node. None: all are on one.
    buffers: int = 0  # bytes of the module's buffers


class SimulatedLedger:
    """Bytes on the device by kind, now and at the peak."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.total = 0
        self.relief = 0  # bytes of activations that are currently offloaded
        self.peak = 0
        self.at_peak: dict[str, int] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Allocate, or free if negative."""
        self.now[kind] += nbytes
        self.total += nbytes
        self._note(0)

    def add_run(self, high: int, net: int) -> None:
        """Allocate and free activations: ``net`` bytes in the end, at most ``high`` in between."""
        self._note(high)
        self.now["activations"] += net
        self.total += net

    def _note(self, more: int) -> None:
        """Remember a peak, with ``more`` bytes of activations than now."""
        now = self.total + more - self.relief
        if now > self.peak:
            self.peak = now
            self.at_peak = dict(self.now)
            self.at_peak["activations"] = self.now["activations"] + more - self.relief


class SimulatedPool:
    """Simulates `buffer_pool.BufferPool`."""

    def __init__(self, ledger: SimulatedLedger) -> None:
        self._ledger = ledger
        self._free: Counter[tuple[int, int]] = Counter()

    def take(self, numel: int, itemsize: int) -> tuple[int, int]:
        """See `BufferPool`."""
        key = (numel, itemsize)
        if self._free[key]:
            self._free[key] -= 1
        else:
            self._ledger.add("communication", numel * itemsize)
        return key

    def give(self, keys: Sequence[tuple[int, int]]) -> None:
        """See `BufferPool`."""
        self._free.update(keys)


_DEVICE_CHUNK = 16 * SUM_CHUNK  # elements that are worked on at a time on a device, see `quantized_reduce.CHUNK`
_REFERENCE_BYTES = 13  # temporary bytes per element of `quantize_reference`: three numbers in fp32 and a level


class SimulatedHops:
    """Simulates `quantized_reduce.QuantizedReduce`: the first hop is in flight."""

    def __init__(
        self, flat: FlatPlan, plan: Plan, setting: Setting, pool: SimulatedPool, ledger: SimulatedLedger
    ) -> None:  # fmt: skip
        assert flat.reduced_as is not None
        self._form = FORMATS[flat.reduced_as]
        self._layout = flat.layout
        self._replicas = plan.group[1]
        first = plan.group[0] * flat.layout.world_size
        self._nodes = ranks_by_node(range(first, first + flat.layout.world_size), setting.node_size)
        self._cuda, self._pool, self._ledger = setting.cuda, pool, ledger  # without CUDA, a kernel needs less
        self._borrowed: list[tuple[int, int]] = []
        self._hops = self._run()
        self.advance()

    def advance(self) -> bool:
        """Start the next hop, if there is one, and return whether there was."""
        return next(self._hops, None) is not None

    def finish(self) -> None:
        """Make the other hops, add the last terms, and return all buffers."""
        while self.advance():
            pass
        self._sum_parts([self._layout.shard])
        self._pool.give(self._borrowed)

    def _run(self) -> Iterator[str]:
        layout, nodes = self._layout, self._nodes
        here = next(node for node in nodes if layout.rank in node)
        cuts = [layout.cuts[r + 1] - layout.cuts[r] for r in range(layout.world_size)]
        self._exchange([[cuts[node[i]] for node in nodes] for i in range(len(here))], here.index(layout.rank))
        yield "inside the nodes"
        place = here.index(layout.rank)
        if len(nodes) > 1:
            self._sums([cuts[node[place]] for node in nodes])
            self._exchange([[cuts[node[place]]] for node in nodes], nodes.index(here))
            yield "between the nodes"
        if self._replicas > 1:
            part = layout.shard // self._replicas
            self._sums([layout.shard])
            self._exchange([[part]] * self._replicas, 0)
            yield "between replicas"
            self._sums([part])
            self._pack([part])
            self._borrow(self._form.nbytes(part) * self._replicas, 1)
            yield "totals"

    def _exchange(self, parts: Sequence[Sequence[int]], mine: int) -> None:
        for peer, theirs in enumerate(parts):
            if peer != mine:
                self._pack(theirs)
                self._borrow(sum(self._form.nbytes(n) for n in parts[mine]), 1)

    def _pack(self, parts: Sequence[int]) -> None:
        self._borrow(sum(self._form.nbytes(n) for n in parts), 1)
        for numel in parts:
            at_once = min(numel, _DEVICE_CHUNK)
            self._for_a_while(at_once * _REFERENCE_BYTES if self._cuda else numel // TILE * 8)

    def _sums(self, parts: Sequence[int]) -> None:
        before, self._borrowed = self._borrowed, []
        self._borrow(sum(parts), 4)
        self._sum_parts(parts)
        self._pool.give(before)

    def _sum_parts(self, parts: Sequence[int]) -> None:
        chunk = _DEVICE_CHUNK if self._cuda else SUM_CHUNK
        for numel in parts:
            self._for_a_while(2 * 4 * min(numel, chunk))

    def _for_a_while(self, nbytes: int) -> None:
        self._ledger.add("communication", nbytes)
        self._ledger.add("communication", -nbytes)

    def _borrow(self, numel: int, itemsize: int) -> None:
        self._borrowed.append(self._pool.take(numel, itemsize))


@dataclass
class SimulatedFlat:
    """Simulates the parts of one flat buffer that `Gatherer` and the reducer use."""

    plan: FlatPlan
    ledger: SimulatedLedger
    reads_ahead: bool
    sharded: bool = True  # whether a gather sends something (stage 3)
    pool: SimulatedPool | None = None  # of the ranks that shard it
    is_fetched: bool = False
    gathering: bool | None = None
    on_demand: None = None
    reading: bool | None = None
    held: bool = False
    held_packed: bool = False
    publish_due: bool = False
    update: UpdateState = UpdateState.NONE
    users: int = 0
    # gradients
    grad: tuple[int, int] | None = None
    pooled: list[tuple[int, int]] = field(default_factory=list)
    hops: SimulatedHops | None = None
    wire: int = 0
    used: set[str] = field(default_factory=set)
    wide: bool = False
    landed: bool = False  # whether a micro-batch of this step has left averages

    def __post_init__(self) -> None:
        self.is_fetched |= self.plan.replicated and self.plan.quantized is None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.plan.layout.numel * (self.plan.cast_to or self.plan.dtype).itemsize

    @property
    def resident(self) -> bool:
        """See `FlatBuffer`."""
        return not self.sharded and self.plan.quantized is None

    @property
    def reads_shard(self) -> bool:
        """See `FlatBuffer`."""
        return self.plan.param_tier != "device"

    def _hold(self) -> None:
        if not self.held:
            self.held = True
            self.ledger.add("parameters", self.gathered_bytes)

    def _hold_wire(self) -> None:
        """Allocate what a gather fills."""
        if self.plan.wire_format is None:
            self._hold()
        elif self.sharded and not self.held_packed:
            self.held_packed = True
            self.ledger.add("parameters", self._packed_bytes)

    def _free_packed(self) -> None:
        if self.held_packed:
            self.held_packed = False
            self.ledger.add("parameters", -self._packed_bytes)

    @property
    def _packed_bytes(self) -> int:
        assert self.plan.wire_format is not None
        return FORMATS[self.plan.wire_format].nbytes(self.plan.layout.numel)

    def start_gather(self) -> None:
        """See `FlatBuffer`."""
        self._hold_wire()
        encodes = self.plan.gathered_as is not None or self.plan.cast_to is not None
        if encodes and self.sharded and self.pool is not None:
            # This rank's shard before it is rounded.
            self.pool.give([self.pool.take(self.plan.layout.shard, self.plan.dtype.itemsize)])
        self.reading = None
        self.gathering = True

    def start_read(self) -> None:
        """See `FlatBuffer`."""
        if self.reads_ahead and not self.is_fetched and self.gathering is None and self.reading is None:
            self._hold_wire()
            self.reading = True

    def release_cast(self) -> None:
        """See `FlatBuffer`: what is resident, or in use, has no second copy here."""

    def finish_gather(self) -> None:
        """See `FlatBuffer`, and `QuantizedFlat`."""
        if self.gathering and self.plan.wire_format is not None:
            self._hold()
            self._free_packed()
        self.gathering = None
        self.is_fetched = True

    def release(self) -> None:
        """See `FlatBuffer`."""
        self.gathering = self.reading = None
        self.is_fetched = False
        self._free_packed()
        if self.held:
            self.held = False
            self.ledger.add("parameters", -self.gathered_bytes)

    def owe_gather(self) -> None:
        """See `FlatBuffer`."""
        self.publish_due = True

    def outdate_secondary(self) -> None:
        """See `FlatBuffer`. The second copy keeps its memory."""

    def take_writes(self) -> bool:
        """See `FlatBuffer`. Nothing is written in a simulation."""
        return False


class SimulatedUnit:
    """Simulates a unit."""

    def __init__(self, flats: list[SimulatedFlat], *, is_root: bool) -> None:
        self.flats = flats
        self.is_root = is_root
        self.pinned = False
        self.trainable_flats = [f for f in flats if f.plan.trainable]
        self.waiting_for = 0
        self.launched = False

    def unpin(self) -> None:
        """See `Unit`."""
        self.pinned = False


class SimulatedReducer:
    """Simulates `Reducer`: which buffers hold gradients, and when they are sent."""

    def __init__(
        self, units: list[SimulatedUnit], plan: Plan, setting: Setting, ledger: SimulatedLedger, trained: set[str]
    ) -> None:
        self.order = [u for u in reversed(units) if u.trainable_flats]
        self.plan, self.policy, self.setting, self.ledger = plan, plan.policy, setting, ledger
        self.pool = SimulatedPool(ledger)
        self.eager = True
        self.holds = False
        self._early_step = False  # whether updates start in this backward: only in the last one before the step
        self._trained = trained
        self._next = 0
        self._in_flight: deque[SimulatedFlat] = deque()
        self._hopping: list[SimulatedHops] = []

    def begin_backward(self, *, eager: bool) -> None:
        """See `Reducer`."""
        self.finish_in_flight()
        self.eager = eager or (self.policy.gradients and not self.holds)
        self._early_step = self.setting.early_step and eager
        self._next = 0
        for unit in self.order:
            unit.launched = False
            unit.waiting_for = sum(
                s.name in self._trained and s.numel > 0 for f in unit.trainable_flats for s in f.plan.layout.slots
            )
            for flat in unit.trainable_flats if not self.policy.gradients else ():
                self._widen(flat)

    def _widen(self, flat: SimulatedFlat) -> None:
        """At stages 0 and 1, accumulate in fp32 from the second micro-batch on, and keep the buffer."""
        size = flat.plan.gradient_dtype.itemsize
        if flat.used and self.policy.optimizer and size < 4 and not flat.wide:
            numel = flat.plan.layout.numel
            self.ledger.add("gradients", numel * 4)
            self.ledger.add("gradients", -numel * size)
            flat.wide = True

    def on_grad(self, unit: SimulatedUnit, flat: SimulatedFlat, name: str, numel: int) -> None:
        """See `Reducer`; ``numel`` elements of the parameter ``name``."""
        if self.policy.gradients:
            if not unit.launched:
                self._hold(flat)
        elif flat.wide and name in flat.used:  # cast to fp32 for accumulation
            self.ledger.add("gradients", numel * 4)
            self.ledger.add("gradients", -numel * 4)
        flat.used.add(name)
        if numel == 0:
            return
        unit.waiting_for -= 1
        if unit.waiting_for == 0 and self.eager:
            while self._next < len(self.order) and self.order[self._next].waiting_for <= 0:
                self._launch(self.order[self._next])
                self._next += 1

    def _hold(self, flat: SimulatedFlat) -> None:
        if flat.grad is None:
            size = flat.plan.gradient_dtype.itemsize
            flat.grad = self.pool.take(flat.plan.layout.numel, max(size, 4) if self.holds else size)

    def end_backward(self) -> None:
        """See `Reducer`."""
        if not self.eager:
            return
        for unit in self.order[self._next :]:
            self._launch(unit)
        self._next = len(self.order)
        if not self.policy.gradients or self._early_step:
            self.finish_in_flight()

    def send_held(self) -> None:
        """See `Reducer`."""
        if any(not unit.launched for unit in self.order):
            self.eager = True
            self.end_backward()

    def _launch(self, unit: SimulatedUnit) -> None:
        unit.launched = True
        for flat in unit.trainable_flats:
            if self.plan.world_size == 1 and not self.policy.optimizer:
                continue
            if self.policy.gradients:
                self._hold(flat)
            self._send(flat)
            self._in_flight.append(flat)
            while self._too_much():
                self._finish(self._in_flight.popleft())

    def _sent_itemsize(self, flat: SimulatedFlat) -> int:
        if not self.policy.optimizer or flat.wide:
            return 4
        return flat.plan.gradient_dtype.itemsize if flat.grad is None else flat.grad[1]

    def _send(self, flat: SimulatedFlat) -> None:
        world, shard, size = flat.plan.layout.world_size, flat.plan.layout.shard, self._sent_itemsize(flat)
        self._advance_hops()
        if flat.plan.reduced_as is not None:
            flat.hops = SimulatedHops(flat.plan, self.plan, self.setting, self.pool, self.ledger)
            self._hopping.append(flat.hops)
            return
        if world == 1:
            return
        if not self.setting.native:
            flat.pooled = [self.pool.take(shard, size) for _ in range(world - 1)]
            return
        wire = max(size, 4) if self.setting.wire_fp32 else size
        if wire != size:
            flat.wire = flat.plan.layout.numel * wire
            self.ledger.add("communication", flat.wire)
        flat.pooled = [self.pool.take(shard, wire)]

    def _advance_hops(self) -> None:
        self._hopping = [hops for hops in self._hopping if hops.advance()]

    def _too_much(self) -> bool:
        if self._early_step:
            return len(self._in_flight) > 1
        flying = sum(f.plan.layout.numel * self._sent_itemsize(f) for f in self._in_flight)
        bounded = self.policy.gradients or self.setting.native
        return bounded and len(self._in_flight) > 2 and flying > reduce.IN_FLIGHT_BYTES

    def _finish(self, flat: SimulatedFlat) -> None:
        shard = flat.plan.layout.shard
        if not self.policy.optimizer or self._is_copied(flat):
            self.pool.give([self.pool.take(shard, self._landing_itemsize(flat))])
        if flat.hops is not None:
            flat.hops.finish()
            flat.hops = None
        elif self.plan.group[1] > 1 and not self.setting.native:  # the sums that groups pass on
            self.pool.give([self.pool.take(shard, 4)])
        flat.landed = True
        self.pool.give(flat.pooled)
        flat.pooled = []
        if flat.wire:
            self.ledger.add("communication", -flat.wire)
            flat.wire = 0
        if flat.grad is not None:
            self.pool.give([flat.grad])
            flat.grad = None

    def _landing_itemsize(self, flat: SimulatedFlat) -> int:
        """Return the bytes per element of averages: a single rank does not widen its first ones, see `Averages`."""
        fused = self.setting.early_step and not self.setting.step_temporaries
        exact = self.policy.optimizer and self.plan.world_size == 1 and fused and not flat.landed
        return min(flat.plan.gradient_dtype.itemsize, 4) if exact else 4

    def _is_copied(self, flat: SimulatedFlat) -> bool:
        """Return whether averages are reduced on the device and then copied to their tier."""
        if flat.plan.gradient_tier == "nvme" and not self._early_step:
            return True
        return flat.plan.gradient_tier != "device" and self.setting.cuda

    def finish_in_flight(self) -> None:
        """See `Reducer`."""
        while self._in_flight:
            self._advance_hops()
            self._finish(self._in_flight.popleft())
