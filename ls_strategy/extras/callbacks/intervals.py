"""Break down the time of an interval of steps: as scalars for a logger, and summed over a fit as a table."""

from __future__ import annotations

import datetime
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ls_strategy.extras.plots.charts import ByteUnit, unit_for
from ls_strategy.host.pytorch import Timer, pl, rank_zero_info
from ls_strategy.spans import COMMUNICATION, COPY, PHASES, VALIDATION, SpanRecord

MIB = 1 << 20

OVERLAPPED = {COMMUNICATION: "communication", COPY: "copies"}
"""Categories of spans that overlap with computation, and their names in tags."""

SAMPLED_AFTER = ("forward", "backward", "optimizer")  # phases after which memory is reported


@dataclass(frozen=True)
class Sample:
    """A full recording of one step, or of several steps that one batch took."""

    record: SpanRecord
    steps: int

    def metrics(self) -> dict[str, float]:
        """Return the scalars of communication and copies."""
        record, result = self.record, {}
        for category, name in OVERLAPPED.items():
            total, exposed = record.total_s(category), record.exposed_s(category)
            result[f"zero_time/{name}_ms"] = 1e3 * total / self.steps
            result[f"zero_time/{name}_exposed_ms"] = 1e3 * exposed / self.steps
            result[f"zero_time/{name}_hidden_ms"] = 1e3 * (total - exposed) / self.steps
            result[f"zero_time_share/{name}_exposed"] = exposed / record.seconds
            moved = self.moved(category)
            result[f"zero_traffic/{name}_mib_per_step"] = moved / self.steps / MIB
            if total and moved:
                result[f"zero_traffic/{name}_gb_per_s"] = moved / total / 1e9
        result |= {f"zero_traffic/{kind}_mib_per_step": n / self.steps / MIB for kind, n in record.sent.items()}
        return result

    def memory_metrics(self, unit: ByteUnit) -> dict[str, float]:
        """Return the scalars of memory by phase."""
        return {
            f"zero_memory_after_{where}_{unit.name}/{category}": n / unit.nbytes
            for where, held in self.memory().items()
            for category, n in held.items()
        }

    def moved(self, category: str) -> int:
        """Return the bytes that this rank sent, by its meters, or copied."""
        return sum(self.record.sent.values()) if category == COMMUNICATION else self.record.nbytes(category)

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the most bytes of each category after a forward, a backward, and an optimizer step."""
        result: dict[str, dict[str, int]] = {}
        for _, where, held in self.record.memory:
            if where in SAMPLED_AFTER:
                most = result.setdefault(where, dict(held))
                most |= {category: max(n, most.get(category, 0)) for category, n in held.items()}
        return result


@dataclass(frozen=True)
class Interval:
    """The steps between two logging times on this rank."""

    steps: int
    seconds: Mapping[str, float]  # by phase, and validation, which is not part of a step
    sample: Sample | None
    samples_seen: int = 0  # on all ranks
    tokens_seen: int = 0
    utilisation: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of all steps: the sum of all phases of a step."""
        return sum(self.seconds.get(phase, 0.0) for phase in PHASES)

    def metrics(self) -> dict[str, float]:
        """Return the scalars of the phases and of the full recording."""
        result = {"zero_time/step_ms": 1e3 * self.step_s / self.steps}
        for phase in PHASES:
            seconds = self.seconds.get(phase, 0.0)
            result[f"zero_time/{phase}_ms"] = 1e3 * seconds / self.steps
            result[f"zero_time_share/{phase}"] = seconds / self.step_s if self.step_s else 0.0
        return result | ({} if self.sample is None else self.sample.metrics())


@dataclass
class Sums:
    """The sum of intervals."""

    steps: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Over samples: seconds (total, exposed) and bytes of communication and copies.
    overlapped: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sampled_steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    flops: float = 0.0  # the sum of utilisation times seconds
    memory: Counter[str] = field(default_factory=Counter)  # the most bytes of each category

    def add(self, interval: Interval) -> None:
        """Add an interval."""
        self.steps += interval.steps
        for phase in PHASES:
            self.seconds[phase] += interval.seconds.get(phase, 0.0)
        self.seen.update(samples=interval.samples_seen, tokens=interval.tokens_seen)
        self.flops += (interval.utilisation or 0.0) * interval.step_s
        if interval.sample is not None:
            self._add_sample(interval.sample)

    def _add_sample(self, sample: Sample) -> None:
        self.sampled_steps += sample.steps
        for category, name in OVERLAPPED.items():
            self.overlapped[f"{name} total"] += sample.record.total_s(category)
            self.overlapped[f"{name} exposed"] += sample.record.exposed_s(category)
            self.overlapped[f"{name} bytes"] += sample.moved(category)
        for held in sample.memory().values():
            for category, nbytes in held.items():
                self.memory[category] = max(self.memory[category], nbytes)

    def text(self) -> str:
        """Return a table; empty without intervals."""
        if not self.steps:
            return ""
        total = sum(self.seconds.values())
        lines = [f"Monitor: {self.steps} steps on rank 0", _line("step", 1e3 * total / self.steps, 1.0)]
        lines += [_line(f"  {p}", 1e3 * self.seconds[p] / self.steps, _share(self.seconds[p], total)) for p in PHASES]
        lines += [line for name in OVERLAPPED.values() for line in self._overlapped_lines(name, total)]
        lines += self._speed_lines(total)
        return "\n".join(lines)

    def _overlapped_lines(self, name: str, total: float) -> list[str]:
        in_flight, exposed = self.overlapped[f"{name} total"], self.overlapped[f"{name} exposed"]
        if not in_flight:
            return []
        per_step, moved = 1e3 / self.sampled_steps, self.overlapped[f"{name} bytes"]
        rate = f", {moved / in_flight / 1e9:.2f} GB/s" if moved else ""
        note = (
            f"  + {(in_flight - exposed) * per_step:.1f} ms hidden; "
            f"{moved / self.sampled_steps / MIB:.1f} MiB per step{rate}"
        )
        share = _share(exposed * per_step, 1e3 * total / self.steps)
        return [_line(f"of which waiting for {name}", exposed * per_step, share) + note]

    def _speed_lines(self, total: float) -> list[str]:
        rates = [f"{self.seen[what] / total:.4g} {what}/s" for what in ("samples", "tokens") if self.seen[what]]
        if self.flops:
            rates.append(f"MFU {100 * self.flops / total:.1f} %")
        lines = ["  ".join(rates)] if rates else []
        if self.memory:
            unit = unit_for(max(self.memory.values()))
            held = ", ".join(f"{name} {n / unit.nbytes:.3g}" for name, n in self.memory.items() if n)
            lines.append(f"memory, {unit.name[0].upper()}iB: {held}")
        return [f"  {line}" for line in lines]


class FitTable:
    """The table of a fit: all intervals, without the first one if there are several, because first steps compile."""

    def __init__(self) -> None:
        self._first, self._others = Sums(), Sums()

    def add(self, interval: Interval) -> None:
        """Add an interval."""
        (self._others if self._first.steps else self._first).add(interval)

    def text(self) -> str:
        """Return the table; empty without intervals."""
        return self._others.text() or self._first.text()


def _line(name: str, milliseconds: float, share: float) -> str:
    return f"  {name:<32}{milliseconds:10.2f} ms{100 * share:6.1f} %"


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0


# --- `TimeLeft`: when a fit will end, by its speed now, and by the plan -----------------------------------------------


class TimeLeft:
    """The time that one fit still takes: its steps at the speed of the last interval, and validation as so far."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, planned_step_s: float | None) -> None:
        """Say what the plan expects.

        Args:
            trainer: whose fit begins.
            module: that it trains.
            planned_step_s: seconds per step of the plan. None: there is none.
        """
        self._steps = last_step(trainer, module)
        self._planned_step_s = planned_step_s
        self._timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
        self._validation_s = 0.0
        self._counted = 0
        self._said = False
        if planned_step_s is not None and self._steps is not None:
            left = self._steps - trainer.global_step
            rank_zero_info(
                f"Monitor: the plan expects {planned_step_s:.3g} s per step, {_hours(left * planned_step_s)} for "
                f"{left:,} steps."
            )

    def add(self, interval: Interval, step: int) -> dict[str, float]:
        """Return the scalars after an interval. The second one also logs when the end is, because first steps compile.

        Args:
            interval: the last one.
            step: ``trainer.global_step``.
        """
        self._counted += interval.steps
        self._validation_s += interval.seconds.get(VALIDATION, 0.0)
        if self._steps is None:
            return {}
        left, step_s, plan = max(self._steps - step, 0), interval.step_s / interval.steps, self._planned_step_s
        validation_s = self._validation_s / self._counted
        left_s = self._until_stopped(left * (step_s + validation_s))
        metrics = {"zero/hours_left": left_s / 3600}
        if plan is not None:
            metrics["zero/hours_left_by_plan"] = self._until_stopped(left * (plan + validation_s)) / 3600
            metrics["zero/step_over_plan"] = step_s / plan
        if self._counted > interval.steps and left and not self._said:
            self._said = True
            planned = "" if plan is None else f" The plan expected {plan:.3g} s per step."
            end = datetime.datetime.fromtimestamp(time.time() + left_s).astimezone()
            rank_zero_info(
                f"Monitor: {_hours(left_s)} left after step {step:,} of {self._steps:,} at {step_s:.3g} s per step, "
                f"until {end:%Y-%m-%d %H:%M %Z}.{planned}"
            )
        return metrics

    def _until_stopped(self, seconds: float) -> float:
        """Return ``seconds``, or the time after which ``Trainer(max_time=)`` ends the fit, if that is less."""
        remaining = (timer.time_remaining() for timer in self._timers)
        return min([seconds, *(max(each, 0.0) for each in remaining if each is not None)])


def last_step(trainer: pl.Trainer, module: pl.LightningModule) -> int | None:
    """Return ``trainer.global_step`` at the end of the fit; None if it is not known."""
    if not module.automatic_optimization:  # a batch may take any number of steps
        return trainer.max_steps if trainer.max_steps > 0 else None
    steps = trainer.estimated_stepping_batches
    return int(steps) if math.isfinite(steps) and steps > 0 else None


def _hours(seconds: float) -> str:
    """Return a duration as text, as exact as is of interest."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
