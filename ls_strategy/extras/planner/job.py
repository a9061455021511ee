"""Describe how one step is partitioned over the ranks, and the schedule of its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.parallelism import Parallelism
from ls_strategy.parallel.pipeline.schedules import Table, make_table, place, placement_of, stages_per_rank_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """Partitioning of one step: the candidate, the parallelism, and the micro-batches."""

    candidate: Candidate
    parallel: Parallelism
    ranks: int
    node_size: int
    samples: int
    """Per micro-batch."""

    micro_batches: int
    """Per step and replica: accumulated, or of the pipeline."""


def table_of(job: Job) -> Table:
    """Return the schedule of a pipeline."""
    return _table(job.parallel.schedule, job.parallel.pipeline, job.micro_batches)


@cache
def _table(schedule: str, ranks: int, micro_batches: int) -> Table:
    return make_table(schedule, ranks, micro_batches, stages_per_rank_of(schedule))


def ranks_of_stages(parallel: Parallelism) -> Sequence[int]:
    """Return the rank of every stage of a pipeline; of the one stage without a pipeline."""
    if parallel.pipeline == 1:
        return (0,)
    return _placed(parallel.schedule, parallel.pipeline)


@cache
def _placed(schedule: str, ranks: int) -> Sequence[int]:
    return tuple(place(ranks, stages_per_rank_of(schedule), placement_of(schedule)))


def stages_of(parallel: Parallelism) -> int:
    """Return the stages of all ranks of a pipeline."""
    return len(ranks_of_stages(parallel))


def messages_of(rank_of: Sequence[int]) -> int:
    """Return the messages of the busiest rank of a pipeline per micro-batch, activations and gradients."""
    last = len(rank_of) - 1
    sent = dict.fromkeys(rank_of, 0)
    for stage, rank in enumerate(rank_of):
        sent[rank] += stage < last and rank_of[stage + 1] != rank
        sent[rank] += stage > 0 and rank_of[stage - 1] != rank
    return max(sent.values())
