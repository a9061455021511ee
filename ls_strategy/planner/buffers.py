"""The engine's flat buffers, pool and reducer on paper: bytes in place of memory.

The rules are those of `zero.reduce.Reducer`, `zero.averages.Averages` and `comm.Comm`, written down once more. A test
holds them against what real ranks hold, storage by storage.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ls_strategy.config import ActivationOffloadConfig
from ls_strategy.plan import FlatPlan, Plan
from ls_strategy.zero import reduce


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a replay depends on beside trace and plan."""

    optimizer_bytes: tuple[float, ...]
    """Of each optimizer, per element, see `states.moment_bytes`."""

    micro_batches: int = 1
    """Batches whose gradients are added up before a step."""

    prefetch_units: int = 1
    early_step: bool = True
    """Updates begin while backward runs: offload, no clipping, no loss scale, one optimizer, nobody reads gradients."""

    native: bool = False
    """NCCL: the transport sums, in ``wire_bytes`` per element, and has buffers of its own."""

    wire_fp32: bool = True
    """NCCL: gradients are summed in fp32."""

    cuda: bool = False
    """The device has memory of its own: states come from the host by copies."""

    step_temporaries: bool = False
    """Some optimizer's own step needs temporaries as large as what it steps."""

    activation_offload: ActivationOffloadConfig | None = None
    buffers: int = 0
    """Bytes of the module's buffers."""


class PaperLedger:
    """Bytes on the device now, by kind, and at the worst moment."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.total = 0
        self.relief = 0
        """Of the activations, elsewhere now."""

        self.peak = 0
        self.at_peak: dict[str, int] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Take, or give back."""
        self.now[kind] += nbytes
        self.total += nbytes
        self.look()

    def look(self) -> None:
        """Is this the worst moment so far?"""
        if self.total - self.relief > self.peak:
            self.peak = self.total - self.relief
            self.at_peak = dict(self.now)
            self.at_peak["activations"] = self.now["activations"] - self.relief


class PaperPool:
    """`comm.BufferPool` on paper."""

    def __init__(self, ledger: PaperLedger) -> None:
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


@dataclass
class SimulatedFlat:
    """One flat buffer, as far as `Gatherer` and the reducer ask."""

    plan: FlatPlan
    ledger: PaperLedger
    reads_ahead: bool
    is_gathered: bool = False
    gathering: bool | None = None
    reading: bool | None = None
    held: bool = False
    publish_due: bool = False
    hidden: bool = False
    is_on_its_way: bool = False
    updated_early: bool = False
    # gradients
    grad: tuple[int, int] | None = None
    borrowed: list[tuple[int, int]] = field(default_factory=list)
    wire: int = 0
    used: set[str] = field(default_factory=set)
    wide: bool = False

    @property
    def whole_bytes(self) -> int:
        """Of the gathered buffer."""
        return self.plan.layout.numel * self.plan.dtype.itemsize

    def _hold(self) -> None:
        if not self.held:
            self.held = True
            self.ledger.add("parameters", self.whole_bytes)

    def start_gather(self) -> None:
        """See `Flat`."""
        self._hold()
        self.reading = None
        self.gathering = True

    def start_read(self) -> None:
        """See `Flat`."""
        if self.reads_ahead and not self.is_gathered and self.gathering is None and self.reading is None:
            self._hold()
            self.reading = True

    def finish_gather(self) -> None:
        """See `Flat`."""
        self.gathering = None
        self.is_gathered = True

    def release(self) -> None:
        """See `Flat`."""
        self.gathering = self.reading = None
        self.is_gathered = False
        if self.held:
            self.held = False
            self.ledger.add("parameters", -self.whole_bytes)

    def take_writes(self) -> bool:
        """See `Flat`: nobody writes on paper."""
        return False


class PaperUnit:
    """A unit on paper."""

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


class PaperReducer:
    """`Reducer` on paper: which buffers gradients are in, and when they are sent."""

    def __init__(
        self, units: list[PaperUnit], plan: Plan, setting: Setting, ledger: PaperLedger, trained: set[str]
    ) -> None:
        self.order = [u for u in reversed(units) if u.trainable_flats]
        self.plan, self.policy, self.setting, self.ledger = plan, plan.policy, setting, ledger
        self.pool = PaperPool(ledger)
        self.eager = True
        self._trained = trained
        self._next = 0
        self._in_flight: deque[SimulatedFlat] = deque()

    def begin_backward(self, *, eager: bool) -> None:
        """See `Reducer`."""
        self.finish_in_flight()
        self.eager = eager or self.policy.gradients
        self._next = 0
        for unit in self.order:
            unit.launched = False
            unit.waiting_for = sum(
                s.name in self._trained and s.numel > 0 for f in unit.trainable_flats for s in f.plan.layout.slots
            )
            for flat in unit.trainable_flats if not self.policy.gradients else ():
                self._widen(flat)

    def _widen(self, flat: SimulatedFlat) -> None:
        """Stages 0 and 1: from the second micro-batch on gradients add up in fp32, for good."""
        size = flat.plan.dtype.itemsize
        if flat.used and self.policy.optimizer and size < 4 and not flat.wide:
            numel = flat.plan.layout.numel
            self.ledger.add("gradients", numel * 4)
            self.ledger.add("gradients", -numel * size)
            flat.wide = True

    def on_grad(self, unit: PaperUnit, flat: SimulatedFlat, name: str, numel: int) -> None:
        """See `Reducer`; ``numel`` elements of the parameter ``name``."""
        if self.policy.gradients:
            if not unit.launched:
                self._hold(flat)
        elif flat.wide and name in flat.used:  # cast to fp32 to be added
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
            flat.grad = self.pool.take(flat.plan.layout.numel, flat.plan.dtype.itemsize)

    def end_backward(self) -> None:
        """See `Reducer`."""
        if not self.eager:
            return
        for unit in self.order[self._next :]:
            self._launch(unit)
        self._next = len(self.order)
        if not self.policy.gradients or self.setting.early_step:
            self.finish_in_flight()

    def _launch(self, unit: PaperUnit) -> None:
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
        return flat.plan.dtype.itemsize

    def _send(self, flat: SimulatedFlat) -> None:
        world, shard, size = self.plan.world_size, flat.plan.layout.shard, self._sent_itemsize(flat)
        if world == 1:
            return
        if not self.setting.native:
            flat.borrowed = [self.pool.take(shard, size) for _ in range(world - 1)]
            return
        wire = max(size, 4) if self.setting.wire_fp32 else size
        if wire != size:
            flat.wire = flat.plan.layout.numel * wire
            self.ledger.add("communication", flat.wire)
        flat.borrowed = [self.pool.take(shard, wire)]

    def _too_much(self) -> bool:
        if self.setting.early_step and self.eager:
            return len(self._in_flight) > 1
        flying = sum(f.plan.layout.numel * self._sent_itemsize(f) for f in self._in_flight)
        bounded = self.policy.gradients or self.setting.native
        return bounded and len(self._in_flight) > 2 and flying > reduce.IN_FLIGHT_BYTES

    def _finish(self, flat: SimulatedFlat) -> None:
        shard = flat.plan.layout.shard
        if not self.policy.optimizer or self._comes_by_copy(flat):
            self.pool.give([self.pool.take(shard, 4)])
        self.pool.give(flat.borrowed)
        flat.borrowed = []
        if flat.wire:
            self.ledger.add("communication", -flat.wire)
            flat.wire = 0
        if flat.grad is not None:
            self.pool.give([flat.grad])
            flat.grad = None

    def _comes_by_copy(self, flat: SimulatedFlat) -> bool:
        """Whether averages are summed on the device and then copied to where they rest."""
        if flat.plan.gradient_tier == "nvme" and not self.setting.early_step:
            return True
        return flat.plan.gradient_tier != "device" and self.setting.cuda

    def finish_in_flight(self) -> None:
        """See `Reducer`."""
        while self._in_flight:
            self._finish(self._in_flight.popleft())
