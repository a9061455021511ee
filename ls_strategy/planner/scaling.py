"""Memory and traffic per rank, counted for numbers of ranks that nobody has at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ls_strategy.config import ZeroStage
from ls_strategy.planner.hardware import show_bytes
from ls_strategy.zero_stages import POLICIES

RANKS = (8, 64, 512, 4096)


@dataclass(frozen=True)
class Scaled:
    """One stage on one number of ranks."""

    stage: ZeroStage
    ranks: int
    state_bytes: float
    """Of one rank."""

    sent_bytes: float
    """By one rank in one step."""


def scale(
    numel: int,
    ranks: Sequence[int] = RANKS,
    *,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    state_bytes: int = 12,
    micro_batches: int = 1,
) -> list[Scaled]:
    """By the formulas of ZeRO (Rajbhandari et al., arXiv:1910.02054), figure 1 and section 7, without padding.

    Args:
        numel: parameters.
        ranks: numbers of data-parallel ranks.
        parameter_bytes: per element, of the parameters that the forward reads.
        gradient_bytes: per element. This package averages in fp32: 4, where the paper has 2.
        state_bytes: per element, of masters and moments (the paper's K).
        micro_batches: per step.
    """
    return [
        Scaled(
            stage,
            n,
            policy.bytes_per_rank(
                numel,
                n,
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradient_bytes,
                state_bytes=state_bytes,
            ),
            policy.elements_sent(numel, n, micro_batches=micro_batches) * float(parameter_bytes),
        )
        for stage, policy in POLICIES.items()
        for n in ranks
    ]


def scaling_table(rows: Sequence[Scaled]) -> str:
    """One line per stage, one column per number of ranks."""
    ranks = sorted({row.ranks for row in rows})
    lines = ["per rank: model states, sent per step", f"{'':8}" + "".join(f"{n:>24,} ranks" for n in ranks)]
    for stage in sorted({row.stage for row in rows}):
        by_ranks = {row.ranks: row for row in rows if row.stage == stage}
        cells = (f"{show_bytes(by_ranks[n].state_bytes)}, {show_bytes(by_ranks[n].sent_bytes)}" for n in ranks)
        lines.append(f"zero{stage:<4}" + "".join(f"{cell:>30}" for cell in cells))
    return "\n".join(lines)
