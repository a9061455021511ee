"""Model states and traffic per rank for large numbers of ranks, by the planner's rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ls_strategy.config import ZeroStage
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import Forecaster
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.sizes import aligned, show_bytes

RANKS = (8, 64, 512, 4096)
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class Scaled:
    """One stage on one number of ranks."""

    stage: ZeroStage
    ranks: int
    state_bytes: int
    """Per rank, between two steps."""

    sent_bytes: int
    """Per rank and step."""


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
