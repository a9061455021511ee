"""Replay a traced step under the engine's rules: what is in memory when, on each tier.

Gathering uses `zero.gather.Gatherer` itself; buffers and reduction are those of `planner.buffers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ls_strategy.config import TierName
from ls_strategy.extras.planner.buffers import Setting, SimulatedFlat, SimulatedLedger, SimulatedReducer, SimulatedUnit
from ls_strategy.extras.planner.pieces import Passes
from ls_strategy.extras.planner.trace import Event, Trace, condensed
from ls_strategy.parallel.pipeline.p2p import LOOKAHEAD
from ls_strategy.parallel.pipeline.schedules import Action
from ls_strategy.plan import FlatPlan, Plan
from ls_strategy.zero.passes.gather import Gatherer

_STEPS = 2  # steps that are replayed. In the second one, everything that the first one allocated exists.


@dataclass(frozen=True)
class Peak:
    """Bytes on one rank."""

    device: int  # peak on the device
    at_peak: dict[str, int]  # its parts: ``parameters masters gradients optimizer activations communication buffers``
    cpu: int  # in host memory: offloaded states, gradients and activations, and staging buffers
    nvme: int
    states: dict[TierName, dict[str, int]]  # between two steps, by tier and kind, as `Plan.bytes_by_tier`


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
        away, offload = self.most_away, self.setting.activation_offload
        if offload is not None and offload.tier == "nvme":
            away = min(away, offload.staging_bytes)
        cpu = sum(states["cpu"].values()) + away
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


def replay(trace: Trace, plan: Plan, setting: Setting, *, trained: set[str], names: Sequence[Sequence[str]]) -> Peak:
    """Return the peak bytes of a run.

    ``trained`` names the parameters with gradients, ``names`` the parameters of every unit in the trace's order.
    """
    return Replay(trace, plan, setting, trained).run(names)


# --- replay one rank of a pipeline: its row of the schedule's table, with the events of its stages --------------------

# Its units stay gathered and its gradients stay here until the last micro-batch, see `Engine.begin_micro_batches`.


class StageReplay(Replay):
    """One replay."""

    def __init__(  # noqa: PLR0913  (one table, one by one)
        self,
        plan: Plan,
        setting: Setting,
        trained: set[str],
        *,
        row: Sequence[Action],
        stages: Mapping[int, Passes],
        boundary: int,
        last_stage: int,
        rank_of: Sequence[int],
    ) -> None:
        """Prepare.

        Args:
            plan: of the parameters of this rank.
            setting: see `Setting`.
            trained: names of the parameters with gradients.
            row: actions of this rank.
            stages: the stages of this rank.
            boundary: bytes that pass from one stage to the next.
            last_stage: number of the last stage.
            rank_of: rank of every stage.
        """
        super().__init__(Trace((), 0), plan, setting, trained)
        self._row, self._stages, self._boundary = row, stages, boundary
        self._last_stage, self._rank_of = last_stage, rank_of
        self._posted: set[int] = set()

    def run(self, names: Sequence[Sequence[str]]) -> Peak:
        """Return the peak of two steps."""
        states = self.begin()
        for _ in range(_STEPS):
            self.gatherer.fetch_root()
            self.reducer.holds = True
            for unit in self.units:
                unit.pinned = True
            for i in range(len(self._row)):
                self._act(i, names)
            self.reducer.send_held()
            self.reducer.holds = False
            for unit in self.units:
                unit.unpin()
                if not unit.is_root:
                    self.gatherer.release(unit)
            self._forget_activations()
            self._step()
        return self.end(states)

    def _receives(self, action: Action) -> bool:
        neighbour = action.stage - 1 if action.kind == "F" else action.stage + 1
        return 0 <= neighbour <= self._last_stage and self._rank_of[neighbour] != self._rank_of[action.stage]

    def _act(self, i: int, names: Sequence[Sequence[str]]) -> None:
        for ahead in range(i, min(i + LOOKAHEAD + 1, len(self._row))):
            if ahead not in self._posted and self._receives(self._row[ahead]):
                self._posted.add(ahead)
                self.ledger.add("communication", self._boundary)
        if i in self._posted:  # from here on, the stage's events count it
            self.ledger.add("communication", -self._boundary)
        action = self._row[i]
        passes = self._stages[action.stage]
        if action.kind == "F":
            for event in passes.forward(action.micro_batch):
                self._on(event, names, last=False)
            if i == 0:
                self.gatherer.end_forward()
            return
        last = all(later.stage != action.stage or later.kind == "F" for later in self._row[i + 1 :])
        self.reducer.begin_backward(eager=last and len(self._stages) == 1)
        for event in passes.backward(action.micro_batch):
            self._on(event, names, last=False)
        self.reducer.end_backward()

    def _forget_activations(self) -> None:
        super()._forget_activations()
        self._posted.clear()
