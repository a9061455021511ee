"""One trace of a step on all ranks, for ui.perfetto.dev: a group of rows per rank, and its memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ls_strategy.spans import COMMUNICATION, COPY, Span, SpanRecord
from ls_strategy.spans.chrome_trace import ChromeTrace

_TRAINING, _WAITS = 0, 1
_LANES = {COMMUNICATION: 100, COPY: 200}  # numbers of the first rows; spans that overlap go into separate rows
_MIB = 1 << 20
_PROCESS = "process"


@dataclass(frozen=True)
class RankTrace:
    """A rank's step and its offset to the system clock, which must be synchronised between hosts."""

    record: SpanRecord
    shift_s: float  # from ``time.perf_counter`` to ``time.time``

    @classmethod
    def of(cls, record: SpanRecord) -> RankTrace:
        """Return the trace of this process."""
        return cls(record, time.time() - time.perf_counter())


def merged(ranks: Sequence[RankTrace]) -> str:
    """Return the trace of all ranks, given in order, as JSON."""
    trace = ChromeTrace(min(r.record.start + r.shift_s for r in ranks))
    for number, rank in enumerate(ranks):
        trace.name_process(number, f"rank {number}")
        _add(trace, number, rank.record, rank.shift_s)
    return trace.json()


def _add(trace: ChromeTrace, rank: int, record: SpanRecord, shift: float) -> None:
    trace.name_row((rank, _TRAINING), "training")
    for span in record.phases:
        trace.slice((rank, _TRAINING), span.name, "phase", span.start + shift, span.end + shift)
    waits = [s for s in record.spans if s.waits]
    if waits:
        trace.name_row((rank, _WAITS), "waits")
    for span in _without_overlap(waits):
        trace.slice((rank, _WAITS), f"{span.category}: {span.name}", "wait", span.start + shift, span.end + shift)
    for category, first in _LANES.items():
        lanes = _lanes([s for s in record.spans if s.category == category and s.moves and s.name != "wait"])
        for lane, spans in enumerate(lanes):
            row = (rank, first + lane)
            trace.name_row(row, category if lane == 0 else f"{category} {lane + 1}")
            for s in spans:
                trace.slice(row, s.name, category, s.start + shift, s.end + shift, bytes=s.nbytes)
    for at, where, held in record.memory:
        states = {name: n / _MIB for name, n in held.items() if name != _PROCESS}
        trace.counter(rank, "memory (MiB)", at + shift, states)
        if _PROCESS in held:
            trace.counter(rank, "process (MiB)", at + shift, {"resident": held[_PROCESS] / _MIB})
        trace.instant((rank, _TRAINING), where, at + shift)


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Split spans into the fewest rows in which no two spans overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.start):
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _without_overlap(waits: Iterable[Span]) -> list[Span]:
    """Return only outer waits: an update that is waited for may itself wait for NVMe."""
    result: list[Span] = []
    for span in sorted(waits, key=lambda s: (s.start, -s.end)):
        if not result or span.start >= result[-1].end:
            result.append(span)
    return result
