"""Replay a traced step under the engine's rules: what is in memory when, on each tier.

Gathering uses `zero.gather.Gatherer` itself; buffers and reduction are those of `planner.buffers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ls_strategy.config import TierName
from ls_strategy.extras.planner.buffers import Setting, SimulatedFlat, SimulatedLedger, SimulatedReducer, SimulatedUnit
from ls_strategy.extras.planner.trace import Event, Trace, condensed
from ls_strategy.plan import FlatPlan, Plan
from ls_strategy.zero.passes.gather import Gatherer

_STEPS = 2
"""Steps that are replayed. In the second one, everything that the first one allocated exists."""


@dataclass(frozen=True)
class Peak:
    """Bytes on one rank."""

    device: int
    """Peak on the device."""

    at_peak: dict[str, int]
    """Its parts: ``parameters masters gradients optimizer activations communication buffers``."""

    cpu: int
    """In host memory: offloaded states, gradients and activations, and staging buffers."""

    nvme: int
    """On the NVMe device."""

    states: dict[TierName, dict[str, int]]
    """Between two steps, by tier and kind, as `Plan.bytes_by_tier`."""


class Replay:
    """One replay."""

    def __init__(self, trace: Trace, plan: Plan, setting: Setting, trained: set[str]) -> None:
        self.trace, self.plan, self.setting = trace, plan, setting
        self.ledger = SimulatedLedger()
        self.units: list[Any] = [SimulatedUnit([self._flat(f) for f in u.flats], is_root=u.is_root) for u in plan.units]
        self.gatherer = Gatherer(self.units, sharded=plan.policy.parameters, prefetch_units=setting.prefetch_units)
        self.reducer = SimulatedReducer(self.units, plan, setting, self.ledger, trained)
        for flat in (flat for unit in self.units for flat in unit.flats):
            flat.pool = self.reducer.pool
        self.slots = [{s.name: (f, s.numel) for f in u.flats for s in f.plan.layout.slots} for u in self.units]
        self.saved: dict[int, int] = {}
        self.saved_bytes = 0
        self.sizes: defaultdict[int, int] = defaultdict(int)
        self.most_away = 0

    def _flat(self, plan: FlatPlan) -> SimulatedFlat:
        ahead = plan.param_tier == "nvme" or (plan.param_tier == "cpu" and self.setting.cuda)
        return SimulatedFlat(plan, self.ledger, ahead, sharded=plan.policy(self.plan.policy).parameters)

    def begin(self) -> dict[TierName, dict[str, int]]:
        """Count the states, and return them."""
        states = self.plan.bytes_by_tier(self.setting.optimizer_bytes)
        for kind, nbytes in states["device"].items():
            self.ledger.add(kind, nbytes)
        self.ledger.add("buffers", self.setting.buffers)
        return states

    def end(self, states: dict[TierName, dict[str, int]]) -> Peak:
        """Return the peak."""
        at_peak = {k: v for k, v in self.ledger.at_peak.items() if v}
        cpu = self._host_bytes(states["cpu"])
        return Peak(self.ledger.peak, at_peak, cpu, sum(states["nvme"].values()), states)

    def run(self, names: Sequence[Sequence[str]]) -> Peak:
        """Replay two steps."""
        states = self.begin()
        trace = self.trace
        casts = trace.casts if any(flat.cast_to for unit in self.plan.units for flat in unit.flats) else frozenset()
        events = self.condense(e for e in trace.events if e.kind not in ("bytes", "saved") or e.number not in casts)
        for _ in range(_STEPS):
            for micro_batch in range(self.setting.micro_batches):
                last = micro_batch == self.setting.micro_batches - 1
                for event in events:
                    self._on(event, names, last=last)
                self._forget_activations()
            self._step()
        return self.end(states)

    def condense(self, events: Iterable[Event]) -> tuple[Event, ...]:
        """Return what is left to replay. Where activations are offloaded, it matters which storage grows."""
        return condensed(events) if self.setting.activation_offload is None else tuple(events)

    def _on(self, event: Event, names: Sequence[Sequence[str]], *, last: bool) -> None:
        kind, number, amount = event
        if kind == "run":
            self.ledger.add_run(number, amount)
        elif kind == "bytes":
            self.sizes[number] += amount
            if number in self.saved:
                self.saved[number] += amount
                self._relieve(amount)
            self.ledger.add("activations", amount)
        elif kind == "saved":
            self._save(number)
        elif kind in ("fetch", "refetch"):
            self.gatherer.fetch(self.units[number], backward=kind == "refetch")
        elif kind == "release":
            self.gatherer.release(self.units[number])
        elif kind in ("into", "back", "spent"):
            pass
        elif kind == "grad":
            name = names[number][amount]
            flat, numel = self.slots[number][name]
            self.reducer.on_grad(self.units[number], flat, name, numel)
        else:
            self._on_phase(kind, last=last)

    def _on_phase(self, kind: str, *, last: bool) -> None:
        if kind == "begin":
            self.gatherer.fetch_root()
        elif kind == "end_forward":
            self.gatherer.end_forward()
            self.reducer.begin_backward(eager=last)
        else:
            self.reducer.end_backward()
            for unit in self.units:
                if not unit.is_root:
                    self.gatherer.release(unit)

    def _save(self, number: int) -> None:
        offload = self.setting.activation_offload
        if offload is not None and number not in self.saved and self.sizes[number] >= offload.min_bytes:
            self.saved[number] = self.sizes[number]
            self._relieve(self.sizes[number])

    def _relieve(self, change: int) -> None:
        assert self.setting.activation_offload is not None
        self.saved_bytes += change
        away = max(self.saved_bytes - self.setting.activation_offload.in_flight_bytes, 0)
        self.ledger.relief = away
        self.most_away = max(self.most_away, away)

    def _forget_activations(self) -> None:
        self.ledger.add("activations", -self.ledger.now["activations"])
        self.saved.clear()
        self.saved_bytes = 0
        self.sizes.clear()
        self.ledger.relief = 0

    def _step(self) -> None:
        self.reducer.finish_in_flight()
        if self.setting.step_temporaries:
            shards = [
                (f.layout.shard if self.plan.policy.optimizer else f.layout.numel) * f.master_dtype.itemsize
                for u in self.plan.units for f in u.flats if f.trainable and f.optimizer_tier == "device"
            ]  # fmt: skip
            temporary = 2 * (sum(shards) if self.setting.cuda else max(shards, default=0))
            self.ledger.add("optimizer", temporary)
            self.ledger.add("optimizer", -temporary)
        self.gatherer.release_all()
        for unit in self.units:
            for flat in unit.flats:
                flat.used.clear()
                flat.landed = False

    def _host_bytes(self, states: dict[str, int]) -> int:
        away = self.most_away
        offload = self.setting.activation_offload
        if offload is not None and offload.tier == "nvme":
            away = min(away, offload.staging_bytes)
        return sum(states.values()) + away


def replay(trace: Trace, plan: Plan, setting: Setting, *, trained: set[str], names: Sequence[Sequence[str]]) -> Peak:
    """Return the peak bytes of a run.

    ``trained`` names the parameters with gradients, ``names`` the parameters of every unit in the trace's order.
    """
    return Replay(trace, plan, setting, trained).run(names)
