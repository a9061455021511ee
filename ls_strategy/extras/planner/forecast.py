"""Forecast every candidate for one model, batch and machine; the table, and the lightest candidate that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ls_strategy.config import RecomputeConfig, TierName, ZeROConfig, ZeroStage
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.buffers import Setting
from ls_strategy.extras.planner.candidates import Candidate, ladder
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.replay import Peak, replay
from ls_strategy.extras.planner.simulated import Simulated
from ls_strategy.extras.planner.sizes import aligned, show_bytes
from ls_strategy.extras.planner.states import ModelStates, matrix_flops
from ls_strategy.extras.planner.trace import Step, Trace, Tracer
from ls_strategy.extras.planner.traffic import StepTraffic, saved_bytes, traffic, with_activations
from ls_strategy.extras.planner.work import StepWork
from ls_strategy.plan import FlatPlan, Plan
from ls_strategy.precision import PrecisionPolicy

EFFICIENCY = 0.4  # fraction of peak FLOP/s that training of large models reaches, for the upper bound of a step's time
_HOST_BYTES_OF_NVME = 80 << 20  # staging buffers of the NVMe tier on each rank


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a run that all candidates share."""

    config: ZeROConfig = field(default_factory=ZeROConfig)
    """Options that no candidate changes: units, prefetch, precision of the states."""

    micro_batches: int = 1
    clips: bool = False
    """Gradients are clipped, or read between backward and step, so no update starts before backward ends."""

    recompute: RecomputeConfig | None = None
    """The user's choice, which candidates keep."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory, traffic and time of one candidate."""

    candidate: Candidate
    peak: Peak
    traffic: StepTraffic
    flops: int  # per rank and step
    # Lower and upper bound of a step: all overlapped at peak speed, or nothing at usual speed. None: unknown.
    seconds: tuple[float, float] | None
    lacks: tuple[str, ...]  # what it needs more of than is available
    work: StepWork = field(default_factory=StepWork)
    assumed: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether the candidate can run, as far as is known."""
        return not self.lacks

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast for JSON, in bytes and seconds."""
        return {
            "name": self.candidate.name,
            "arguments": self.candidate.arguments(),
            "device_bytes": self.peak.device,
            "device_bytes_at_peak": self.peak.at_peak,
            "host_bytes": self.peak.cpu,
            "drive_bytes": self.peak.nvme,
            "states": self.peak.states,
            "sent_bytes_per_step": self.traffic.sent,
            "sent_bytes_between_nodes_per_step": self.traffic.between_nodes,
            "bus_bytes_per_step": self.traffic.bus,
            "drive_bytes_per_step": self.traffic.drive,
            "flops_per_step": self.flops,
            "seconds_per_step": self.seconds,
            "fits": self.fits,
            "lacks": list(self.lacks),
        }


class Forecaster:
    """Forecasts for one simulated model."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        fakes: Simulated,
        precision: PrecisionPolicy,
        step: Step,
        batch: Any,
        run: Run,
    ) -> None:
        """Partition the model into units. Steps are traced on demand.

        ``model``, ``optimizers`` and ``step`` use the fake tensors of ``fakes``, which `simulated` yields.

        Raises:
            PlanError: model, optimizers and options are incompatible.
        """
        self._states = ModelStates(model, optimizers, precision)
        self._run = run
        self.batch = batch
        specs = self._states.draft(Candidate(0).config(run.config), 1).specs
        self._names = [[name for name, _ in spec.params] for spec in specs]
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._buffers = sum(b.nbytes for b in model.buffers())
        self.numel = sum(p.numel() for p in model.parameters())
        classes = run.config.precision.fp32_modules
        self._tracer = Tracer(model, specs, step, precision, classes, torch.device("cpu"), fakes.mode)
        self._traces: dict[RecomputeConfig | None, Trace] = {}
        self._plans: dict[Any, Plan] = {}
        self._optimizer_bytes = self._states.optimizer_bytes(run.config)
        self._matrix_flops = sum(map(matrix_flops, optimizers))

    @property
    def recomputable(self) -> bool:
        """Return whether there are blocks to recompute."""
        try:
            self.trace(RecomputeConfig(policy="full"))
        except PlanError:
            return False
        return True

    def trace(self, recompute: RecomputeConfig | None = None) -> Trace:
        """Return the step with this recompute policy; traced once.

        Raises:
            PlanError: the step cannot run on fake tensors, or there is nothing to recompute.
        """
        if recompute not in self._traces:
            self._traces[recompute] = self.trace_of(self.batch, recompute)
        return self._traces[recompute]

    def trace_of(self, batch: Any, recompute: RecomputeConfig | None = None) -> Trace:
        """Return the step on another batch.

        Raises:
            PlanError: the step cannot run on fake tensors, or there is nothing to recompute.
        """
        return self._tracer.run(batch, recompute)

    def plan(self, config: ZeROConfig, ranks: int, node_size: int | None = None) -> Plan:
        """Return the engine's plan; created once."""
        key = (config.stage, config.sharding, config.precision, config.offload, ranks, node_size)
        if key not in self._plans:
            self._plans[key] = self._states.plan(config, ranks, node_size)
        return self._plans[key]

    def setting(self, config: ZeROConfig, candidate: Candidate, device: str, node_size: int | None = None) -> Setting:
        """Return what a replay depends on."""
        scales = self._states.precision.loss_scaling
        single = len(self._states.optimizers) == 1
        return Setting(
            optimizer_bytes=self._optimizer_bytes,
            micro_batches=self._run.micro_batches,
            prefetch_units=config.sharding.prefetch_units,
            early_step=config.updates_in_backward and single and not self._run.clips and not scales,
            native=device == "cuda",
            wire_fp32=self._states.precision.reduce_in_fp32,
            cuda=device == "cuda",
            step_temporaries=self._states.has_temporaries,
            activation_offload=candidate.activation_offload,
            node_size=node_size,
            buffers=self._buffers,
        )

    def peak(
        self, candidate: Candidate, ranks: int, device: str, node_size: int | None = None, *, trace: Trace | None = None
    ) -> Peak:
        """Return the peak memory of one rank; ``trace``: of a step on another batch."""
        config = candidate.config(self._run.config)
        setting = self.setting(config, candidate, device, node_size)
        plan = self.plan(config, ranks, node_size)
        trace = self.trace(candidate.recompute) if trace is None else trace
        return replay(trace, plan, setting, trained=self._trained, names=self._names)

    def states(self, candidate: Candidate, ranks: int) -> dict[TierName, dict[str, int]]:
        """Return the bytes of model states of one rank between two steps, by tier and kind."""
        return self.plan(candidate.config(self._run.config), ranks).bytes_by_tier(self._optimizer_bytes)

    def traffic(self, candidate: Candidate, ranks: int, device: str, node_size: int | None = None) -> StepTraffic:
        """Return the bytes that one rank moves in one step."""
        config, offload = candidate.config(self._run.config), candidate.activation_offload
        moved = traffic(
            self.plan(config, ranks, node_size),
            self._optimizer_bytes,
            micro_batches=self._run.micro_batches,
            native_fp32=device == "cuda" and self._states.precision.reduce_in_fp32,
            cuda=device == "cuda",
            gradients_stored=not self.setting(config, candidate, device).early_step,
            node_size=node_size,
        )
        if offload is None:
            return moved
        saved = saved_bytes(self.trace(candidate.recompute).events, offload.min_bytes)
        return with_activations(
            moved, offload, saved=saved, micro_batches=self._run.micro_batches, cuda=device == "cuda"
        )

    def forecast(self, candidate: Candidate, hardware: Hardware) -> Forecast:
        """Return memory, traffic and time of one candidate."""
        where = (hardware.ranks, hardware.device, hardware.on_a_node)
        peak, moved = self.peak(candidate, *where), self.traffic(candidate, *where)
        trace = self.trace(candidate.recompute)
        flops = trace.flops * self._run.micro_batches
        return Forecast(
            candidate, peak, moved, flops, _seconds(moved, flops, hardware), lacks_of(peak, hardware),
            work=self._work(candidate, hardware, moved), assumed=trace.assumed,
        )  # fmt: skip

    def _work(self, candidate: Candidate, hardware: Hardware, moved: StepTraffic) -> StepWork:
        """Return what a step does, which `speeds.Speeds` turns into seconds."""
        count, trace, recompute = self._run.micro_batches, self.trace(candidate.recompute), candidate.recompute
        plan = self.plan(candidate.config(self._run.config), hardware.ranks, hardware.on_a_node)
        selective = recompute if recompute is not None and recompute.policy == "selective" else None
        full = self.trace(None if selective is None else replace(selective, policy="full"))
        in_blocks = full.backward.operations - self.trace().backward.operations
        flats = [f for unit in plan.units for f in unit.flats if f.trainable] if candidate.optimizer is not None else []
        masters = sum(f.layout.shard * (4 + f.dtype.itemsize) for f in flats)
        return StepWork(
            trace.forward.times(count),
            trace.backward.times(count),
            blocks=trace.recomputed * count,
            contexts=trace.recomputed * count if selective else 0,
            policed=2 * in_blocks * count,
            copied=masters + 2 * moved.activations if hardware.device == "cpu" else 0,  # there is no bus
            handovers=len(flats),
            sent=moved.sent,
            messages=plan.count_sent(count, gathered=_one, regathered=_one, reduced=_one),
            waits=self._waits(candidate, plan),
            bus=moved.bus,
            stepped=plan.bytes_per_update(self._optimizer_bytes),
            step_flops=self._matrix_flops // (hardware.ranks if plan.policy.optimizer else 1),
            steps_on_host=candidate.optimizer is not None,
            gathers=plan.policy.parameters,
        )

    def _waits(self, candidate: Candidate, plan: Plan) -> int:
        """Return how many gathers and reductions a step waits for while it computes: see `Gatherer` and `Reducer`.

        Stage 3 waits for each gather. Updates of offloaded states begin when a reduction is over, and what they have
        changed is sent when the next forward needs it.
        """
        count, offloads = self._run.micro_batches, candidate.optimizer is not None
        early = self.setting(candidate.config(self._run.config), candidate, "cpu").early_step
        gathers = plan.count_sent(count, gathered=_one, regathered=_one, reduced=_none)
        reductions = plan.count_sent(1, gathered=_none, regathered=_none, reduced=_one)
        return (gathers if offloads or plan.policy.parameters else 0) + (reductions if early else 0)

    def all(self, hardware: Hardware, progress: Callable[[str, int, int], None] | None = None) -> list[Forecast]:
        """Return the forecast of every candidate, the lightest first.

        ``progress`` gets the candidate that begins, how many are done, and how many there are.
        """
        forecasts: list[Forecast] = []
        candidates = self.candidates(hardware)
        for candidate in candidates:
            if progress is not None:
                progress(candidate.name, len(forecasts), len(candidates))
            forecasts.append(self.forecast(candidate, hardware))
        return forecasts

    def candidates(self, hardware: Hardware) -> list[Candidate]:
        """Return every candidate, the lightest first."""
        ways = ladder(
            ranks=hardware.ranks,
            recompute=self._run.recompute,
            recomputable=self._run.recompute is not None or self.recomputable,
            drive=hardware.drive != 0,
            by_node=hardware.node_gbs is not None and hardware.ranks > hardware.on_a_node > 1,
        )
        return list(ways)


def _one(_flat: FlatPlan) -> int:
    return 1


def _none(_flat: FlatPlan) -> int:
    return 0


def _seconds(moved: StepTraffic, flops: int, hardware: Hardware) -> tuple[float, float] | None:
    if hardware.tflops is None:
        return None
    compute = flops / (hardware.tflops * 1e12)
    between = 0 if hardware.node_gbs is None else moved.between_nodes  # of each of the ranks that share the link
    ways = (
        (moved.sent - between, hardware.link_gbs),
        (between * hardware.on_a_node, hardware.node_gbs),
        (moved.bus, hardware.bus_gbs),
        (moved.drive, hardware.drive_gbs),
    )
    others = [nbytes / (speed * 1e9) for nbytes, speed in ways if speed is not None]
    return max(compute, *others, 0.0), compute / EFFICIENCY + sum(others)


def lacks_of(peak: Peak, hardware: Hardware) -> tuple[str, ...]:
    """Return what a run needs more of than the hardware has, in words; empty if it fits."""
    host = peak.cpu + (_HOST_BYTES_OF_NVME if peak.nvme else 0)
    if hardware.device == "cpu":
        memory = [("host memory", peak.device + host, hardware.device_room)]
    else:
        memory = [("device memory", peak.device, hardware.device_room), ("host memory", host, hardware.host_room)]
    needs = [*memory, ("NVMe", peak.nvme, hardware.drive_room)]
    return tuple(
        f"{show_bytes(need)} of {show_bytes(max(room, 0))} {what}"
        for what, need, room in needs
        if room is not None and need > room
    )


def lightest(forecasts: Sequence[Forecast]) -> Forecast | None:
    """Return the first that fits."""
    return next((f for f in forecasts if f.fits), None)


def fastest(forecasts: Sequence[Forecast]) -> Forecast | None:
    """Return the candidate that fits with the least predicted time, without any overlap; None if no time is known."""
    timed = [(f.seconds[1], i) for i, f in enumerate(forecasts) if f.fits and f.seconds is not None]
    return forecasts[min(timed)[1]] if timed else None


def table(
    forecasts: Sequence[Forecast],
    hardware: Hardware,
    chosen: Forecast | None = None,
    mark: str = "<- first that fits",
) -> str:
    """Return one line per candidate, in order of the time that each costs.

    ``chosen`` is marked, or the first that fits.
    """
    chosen = chosen or lightest(forecasts)
    has_times = any(f.seconds for f in forecasts)
    has_nodes = hardware.node_gbs is not None
    head = ["", "device", "of that: states", "activations", "other", "host", "NVMe", "sent per step"]
    head += ["between nodes"] if has_nodes else []
    rows = [[*head, *(["s per step"] if has_times else []), "fits"]]
    for f in forecasts:
        at = f.peak.at_peak
        states = sum(at.get(kind, 0) for kind in ("parameters", "masters", "gradients", "optimizer"))
        activations = at.get("activations", 0)
        sizes = (f.peak.device, states, activations, f.peak.device - states - activations, f.peak.cpu, f.peak.nvme)
        bounds = [f"{each:.3g}" for each in dict.fromkeys(f.seconds or ())]
        seconds = [" to ".join(bounds)] if has_times else []
        verdict = mark if f is chosen else "yes" if f.fits else "no: needs " + "; ".join(f.lacks)
        sent = (f.traffic.sent, f.traffic.between_nodes) if has_nodes else (f.traffic.sent,)
        cells = [show_bytes(n) if n else "-" for n in (*sizes, *sent)]
        rows.append([f.candidate.name, *cells, *seconds, verdict])
    lines = (f"{line}  {row[-1]}" for line, row in zip(aligned([row[:-1] for row in rows]), rows, strict=True))
    return "\n".join([f"per rank, {hardware.describe()}:", *lines])


def reason(forecasts: Sequence[Forecast]) -> str:
    """Explain the choice in one or two sentences."""
    chosen = lightest(forecasts)
    if chosen is None:
        closest = min(forecasts, key=lambda f: f.peak.device)
        return (
            f"nothing fits. {closest.candidate.name} comes closest and needs {'; '.join(closest.lacks)}. Use a smaller "
            "batch or more ranks. For long sequences set parallel.context, and for single layers that are too large "
            "parallel.tensor."
        )
    lighter = forecasts[: list(forecasts).index(chosen)]
    if not lighter:
        return f"{chosen.candidate.name}: the first of all, so nothing has to be saved."
    last = lighter[-1]
    return (
        f"{chosen.candidate.name}: the first that fits, in order of the time that each costs. {last.candidate.name} "
        f"needs {'; '.join(last.lacks)}."
    )


def assumptions(forecasts: Sequence[Forecast]) -> list[str]:
    """Return a sentence on the lines of code whose branch a step without values could not know; none without any."""
    lines = dict.fromkeys(line for f in forecasts for line in f.assumed)
    if not lines:
        return []
    return [
        f"Decided by values of tensors, which were taken to be False here: {', '.join(lines)}. If they are True in "
        "training, a step may take more memory and time than this plan says."
    ]


def next_lighter_in_memory(forecasts: Sequence[Forecast], device_bytes: int) -> Forecast | None:
    """Return the lightest candidate that fits and needs at least 10 % less device memory than ``device_bytes``."""
    return next((f for f in forecasts if f.peak.device < 0.9 * device_bytes and f.fits), None)


# --- model states and traffic per rank for large numbers of ranks, by the planner's rules -----------------------------


RANKS = (8, 64, 512, 4096)
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class Scaled:
    """One stage on one number of ranks."""

    stage: ZeroStage
    ranks: int
    state_bytes: int  # per rank, between two steps
    sent_bytes: int  # per rank and step


def scale(forecaster: Forecaster, hardware: Hardware, ranks: Sequence[int] = RANKS) -> list[Scaled]:
    """Count every stage on every number of ranks, on ``hardware.device``, as `Forecaster.forecast` does for one."""
    rows: list[Scaled] = []
    for stage in STAGES:
        for n in ranks:
            candidate = Candidate(stage)
            states = forecaster.states(candidate, n)
            sent = forecaster.traffic(candidate, n, hardware.device).sent
            rows.append(Scaled(stage, n, sum(sum(kinds.values()) for kinds in states.values()), sent))
    return rows


def scaling_table(rows: Sequence[Scaled]) -> str:
    """Return one line per stage, with one column per number of ranks."""
    ranks = sorted({row.ranks for row in rows})
    lines = [["", *(f"{n:,} ranks" for n in ranks)]]
    for stage in sorted({row.stage for row in rows}):
        by_ranks = {row.ranks: row for row in rows if row.stage == stage}
        cells = (f"{show_bytes(by_ranks[n].state_bytes)}, {show_bytes(by_ranks[n].sent_bytes)}" for n in ranks)
        lines.append([f"zero{stage}", *cells])
    return "\n".join(["per rank: model states, sent per step", *aligned(lines)])
