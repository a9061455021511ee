"""Find the longest samples and the largest micro-batch that fit with a strategy, and the bytes of one more token.

A tensor's size is a polynomial of the length, of degree two where all pairs of tokens are stored. So steps traced at
three lengths determine those at all others, if they are made of the same operations; otherwise every length that is
tried is traced. The same holds for the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from ls_strategy.config import RecomputeConfig
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import Forecaster, lacks_of
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.sizes import aligned, show_bytes
from ls_strategy.extras.planner.step import length_of, of_length, resized, rows_of
from ls_strategy.extras.planner.trace import Trace

What = Literal["tokens", "samples"]

MOST: dict[What, int] = {"tokens": 1 << 26, "samples": 1 << 20}
"""Where a search ends: what fits then is limited by something else."""

_EXACT = 256  # a length is found up to one part in so many


@dataclass(frozen=True)
class Reach:
    """Longest samples and largest micro-batch of one candidate."""

    candidate: Candidate
    tokens: int  # of the longest samples that fit, with as many in a batch as now; 0: not even one token
    samples: int  # of the largest micro-batch that fits, of samples as long as now; 0: not even one
    token_bytes: float  # device bytes of one more token in the batch, on average from the length now up to the longest

    def to_dict(self) -> dict[str, Any]:
        """Return the reach for JSON."""
        return {
            "name": self.candidate.name,
            "arguments": self.candidate.arguments(),
            "longest_sample_tokens": self.tokens,
            "largest_micro_batch_samples": self.samples,
            "bytes_per_added_token": self.token_bytes,
        }


class _Steps:
    """Steps on batches of other sizes, traced or told."""

    def __init__(self, forecaster: Forecaster, what: What, now: int) -> None:
        self._forecaster, self._what = forecaster, what
        base = max(now // 4, 1)
        self._known = (base, 2 * base, 4 * base)
        self._traces: dict[tuple[RecomputeConfig | None, int], Trace] = {}
        self._told: dict[RecomputeConfig | None, bool] = {}

    def at(self, recompute: RecomputeConfig | None, size: int) -> Trace:
        """Return the step at this size.

        Raises:
            PlanError: it has to be traced, and the model refuses this size.
        """
        key = (recompute, size)
        if key in self._traces:
            return self._traces[key]
        if size > self._known[0] and size not in self._known and self._tells(recompute):
            return _interpolated([self.at(recompute, n) for n in self._known], self._known, size)
        self._traces[key] = self._forecaster.trace_of(self._batch(size), recompute)
        return self._traces[key]

    def _batch(self, size: int) -> Any:
        change = of_length if self._what == "tokens" else resized
        return change(self._forecaster.batch, size)

    def _tells(self, recompute: RecomputeConfig | None) -> bool:
        """Return whether the steps at the known sizes are made of the same operations."""
        if recompute not in self._told:
            try:
                traces = [self.at(recompute, n) for n in self._known]
            except PlanError:
                self._told[recompute] = False
            else:
                kinds = [[(e.kind, e.number, e.kind == "bytes" or e.amount) for e in t.events] for t in traces]
                self._told[recompute] = kinds[0] == kinds[1] == kinds[2]
        return self._told[recompute]


def _interpolated(traces: list[Trace], sizes: tuple[int, int, int], size: int) -> Trace:
    """Return the step at ``size``, with polynomials through the bytes at three sizes."""
    a, b, c = sizes
    weights = (
        Fraction((size - b) * (size - c), (a - b) * (a - c)),
        Fraction((size - a) * (size - c), (b - a) * (b - c)),
        Fraction((size - a) * (size - b), (c - a) * (c - b)),
    )
    found: dict[tuple[int, ...], int] = {}

    def between(numbers: tuple[int, ...]) -> int:
        if numbers not in found:
            found[numbers] = round(sum(w * n for w, n in zip(weights, numbers, strict=True)))
        return found[numbers]

    events = tuple(
        each[0]._replace(amount=between(tuple(e.amount for e in each))) if each[0].kind == "bytes" else each[0]
        for each in zip(*(t.events for t in traces), strict=True)
    )
    return Trace(events, between(tuple(t.flops for t in traces)))


class Reaches:
    """Finds reaches of candidates, with traces that they share."""

    def __init__(self, forecaster: Forecaster, hardware: Hardware) -> None:
        """``forecaster`` is of the batch now, and ``hardware`` has a limit.

        Raises:
            PlanError: the samples of the batch have no length.
        """
        length = length_of(forecaster.batch)
        if length is None:
            raise PlanError(
                "Got a batch with no length of a sequence: no tensor of it has a second dimension, that of the tokens. "
                "Plan without --longest."
            )
        self._forecaster, self._hardware = forecaster, hardware
        self.length, self.samples = length, rows_of(forecaster.batch)
        self._steps: dict[What, _Steps] = {
            "tokens": _Steps(forecaster, "tokens", length),
            "samples": _Steps(forecaster, "samples", 8),
        }

    def of(self, candidate: Candidate) -> Reach:
        """Return how far a candidate reaches.

        Raises:
            PlanError: the step cannot be traced.
        """
        tokens = self._most("tokens", candidate, self.length)
        samples = self._most("samples", candidate, self.samples)
        far = tokens if tokens > self.length else 2 * self.length
        more = self.device_bytes(candidate, far) - self.device_bytes(candidate, self.length)
        return Reach(candidate, tokens, samples, more / (far - self.length) / self.samples)

    def accepts(self, tokens: int) -> bool:
        """Return whether the model, as it is configured, runs on samples of this length."""
        try:
            self._forecaster.trace_of(of_length(self._forecaster.batch, tokens))
        except PlanError:
            return False
        return True

    def device_bytes(self, candidate: Candidate, tokens: int) -> int:
        """Return the peak on the device with samples of so many tokens; on a CPU, with what is offloaded."""
        peak = self._peak("tokens", candidate, tokens)
        return peak.device + (peak.cpu if self._hardware.device == "cpu" else 0)

    def _peak(self, what: What, candidate: Candidate, size: int) -> Any:
        hardware = self._hardware
        where = (hardware.ranks, hardware.device, hardware.on_a_node)
        return self._forecaster.peak(candidate, *where, trace=self._steps[what].at(candidate.recompute, size))

    def _most(self, what: What, candidate: Candidate, now: int) -> int:
        return largest(lambda size: not lacks_of(self._peak(what, candidate, size), self._hardware), now, MOST[what])


def largest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """Return about the largest size up to ``most`` that fits, by bisection from ``start``; 0 if none does."""
    low, high = 0, max(start, 1)
    while high < most and fits(high):
        low, high = high, high * 2
    if low == 0:
        low = high // 2
        while low and not fits(low):
            low, high = low // 2, low
    while high - low > 1 and high - low > low // _EXACT:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def reach_lines(reaches: Sequence[Reach], length: int, samples: int) -> list[str]:
    """Return the table, and its best lines in words."""
    rows = [["", "longest samples", "largest micro-batch", "per added token"]] + [
        [r.candidate.name, f"{r.tokens:,} tokens", f"{r.samples:,} samples", show_bytes(r.token_bytes)] for r in reaches
    ]
    far = max(reaches, key=lambda r: r.tokens)
    wide = max(reaches, key=lambda r: r.samples)
    return [
        f"what fits: longer samples, with {samples:,} in a batch, or more samples, of {length:,} tokens:",
        *aligned(rows),
        f"{far.candidate.name}: the longest samples, {far.tokens:,} tokens in each of {samples:,}. One more token in "
        f"the batch takes {show_bytes(far.token_bytes)}.",
        f"{wide.candidate.name}: the largest micro-batch, {wide.samples:,} samples of {length:,} tokens.",
    ]


class Reached:
    """Longest samples and largest micro-batch that fit, for every candidate, as text or JSON."""

    def __init__(self, forecaster: Forecaster, hardware: Hardware) -> None:
        """Search, while the module of a `ls_strategy.extras.planner.forecast.Forecaster` is simulated."""
        reaches = Reaches(forecaster, hardware)
        self._length, self._samples = reaches.length, reaches.samples
        self._found = [reaches.of(candidate) for candidate in forecaster.candidates(hardware)]
        longest = max(each.tokens for each in self._found)
        self._accepted = longest <= self._length or reaches.accepts(longest)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        lines = reach_lines(self._found, self._length, self._samples)
        if not self._accepted:
            lines.append(
                f"The model does not run on samples of that length as it is configured (now: {self._length:,} tokens). "
                "Raise its limit, and plan again with it: tables of positions then take more."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "tokens_per_sample_now": self._length,
            "samples_now": self._samples,
            "model_accepts_the_longest": self._accepted,
            "strategies": [each.to_dict() for each in self._found],
        }
