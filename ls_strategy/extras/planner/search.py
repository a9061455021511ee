"""Search every combination of parallelism, ZeRO stage, tier and recompute for one global batch.

A choice never changes what is trained: the samples of an optimizer step are those of the run as it was given, and the
micro-batches follow. Only what the model supports is tried: a tensor-parallel plan, heads that divide, blocks for
stages, layers with experts.

A model is traced once per combination of tensor, context and expert parallelism. Times and a lower bound of the memory
follow from the trace; the memory is then replayed, fastest first, for combinations that may need less than all faster
ones. After three quarters of `SECONDS` no step is tried that others do not tell, soon afterwards none at all, and after
`SECONDS` none is replayed. The result names what was not tried. Layers and sequences are sharded where one sample is
too large, so with tensor and context parallelism micro-batches are of one sample.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ls_strategy.config import RecomputeConfig
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.batch import rows_of
from ls_strategy.extras.planner.block_steps import Known, NotUniform
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.combinations import FULL, SELECTIVE, jobs_of, layer_shardings
from ls_strategy.extras.planner.costs import Costs, costs_of
from ls_strategy.extras.planner.forecast import lacks_of
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.job import Job
from ls_strategy.extras.planner.parallelism import Parallelism, stack_of
from ls_strategy.extras.planner.partitioned import PartitionedModel, partitioned
from ls_strategy.extras.planner.pieces import SHORT
from ls_strategy.extras.planner.replay import Peak

SECONDS = 9.0
"""After this time, nothing more is begun; after most of it, see `_SHARE_OF_TRACES`, no further step is traced."""

NO_TIME = "no time was left"
"""The reason for which a combination was not tried."""

_SHARE_OF_TRACES = 3 / 4
"""Of the time: then the memory of the fastest combinations is replayed."""

_SHARE_OF_TOLD = 0.9
"""Of the time: until then, steps that others tell are tried, which need no trace beyond the first block."""


@dataclass(frozen=True)
class Option:
    """One combination."""

    job: Job
    costs: Costs
    peak: Peak

    @property
    def name(self) -> str:
        """Its parts, in words."""
        job = self.job
        parts = [job.parallel.name, job.candidate.name]
        how = "micro-batches" if job.parallel.pipeline > 1 else "accumulated"
        parts.append(f"{job.micro_batches} {how} of {job.samples}" if job.micro_batches > 1 else f"batch {job.samples}")
        return ", ".join(part for part in parts if part)

    @property
    def settings(self) -> dict[str, Any]:
        """Options to set on the strategy, the loader and the Trainer. They keep the global batch size."""
        job = self.job
        pipeline = job.parallel.pipeline > 1
        strategy: dict[str, Any] = job.candidate.arguments()
        parallel = job.parallel.arguments(job.micro_batches)
        if parallel:
            strategy["parallel"] = parallel
        return {
            "strategy": strategy,
            "batch_size_per_replica": job.samples * (job.micro_batches if pipeline else 1),
            "accumulate_grad_batches": 1 if pipeline else job.micro_batches,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the option for JSON, in bytes and seconds."""
        return {
            "name": self.name,
            **self.settings,
            "device_bytes": self.peak.device,
            "host_bytes": self.peak.cpu,
            "sent_bytes_per_step": self.costs.sent,
            "sent_bytes_between_nodes_per_step": self.costs.between_nodes,
            "bubble": self.costs.bubble,
            "flops_per_step": self.costs.flops,
            "seconds_per_step": self.costs.seconds,
        }


@dataclass
class Found:
    """The result of a search."""

    options: list[Option] = field(default_factory=list)
    """Those that were replayed and fit, the fastest first."""

    closest: Option | None = None
    """The one that needs least, of those that do not fit."""

    traced: list[str] = field(default_factory=list)
    """Combinations of tensor, context and expert parallelism that were tried."""

    covered: list[str] = field(default_factory=list)
    """Longer rings than the heads of the model require."""

    skipped: dict[str, str] = field(default_factory=dict)
    """Combinations that the model does not support, or for which there was no time, with the reason."""

    seconds: float = 0.0
    global_batch: int = 0

    @property
    def front(self) -> list[Option]:
        """The Pareto front: every option that needs less memory than all faster ones."""
        front: list[Option] = []
        for option in sorted(self.options, key=lambda o: (o.costs.seconds[1], o.peak.device)):
            if not front or option.peak.device < front[-1].peak.device:
                front.append(option)
        return front


@dataclass(frozen=True)
class _Timed:
    """A combination whose costs are known, and whose memory is not."""

    model: PartitionedModel
    job: Job
    costs: Costs
    least: int
    """Bytes that it needs at least."""


def search(question: Question, hardware: Hardware, *, seconds: float = SECONDS) -> Found:
    """Search. Not collective; the module is restored on return.

    Args:
        question: what to plan for. The samples of its batch on every rank, times the batches that are accumulated, are
            the global batch.
        hardware: with the number of ranks, and speeds.
        seconds: see `SECONDS`.

    Raises:
        PlanError: the model has no stack of blocks, or the step cannot be traced at all.
    """
    if stack_of(question.module) is None:
        raise PlanError(
            f"Got a search for {type(question.module).__name__}, which has no single ModuleList or Sequential of two "
            "or more blocks with submodules. The search puts steps together from blocks. Plan without --search."
        )
    started = time.perf_counter()
    batch = rows_of(question.batch) * hardware.ranks * question.run.micro_batches
    found = Found(global_batch=batch)
    until = (started + _SHARE_OF_TRACES * seconds, started + _SHARE_OF_TOLD * seconds)
    timed = _all_timed(question, hardware, found, *until)
    _replay_all(timed, hardware, found, started + seconds)
    found.options.sort(key=lambda o: (o.costs.seconds[1], o.peak.device))
    found.seconds = time.perf_counter() - started
    return found


def _all_timed(question: Question, hardware: Hardware, found: Found, until: float, until_told: float) -> list[_Timed]:
    """Return the combinations that the model supports, with their costs.

    Nothing begins after ``until``, or after ``until_told`` if other steps may tell it.

    Raises:
        PlanError: there is none.
    """
    first: PlanError | None = None
    known = Known()
    timed: list[_Timed] = []
    for parallel in layer_shardings(question, hardware):
        label = parallel.name or "data parallelism"
        limit = until_told if known.tells(parallel) else until
        if _is_covered(parallel, found):
            found.covered.append(label)
        elif found.traced and time.perf_counter() > limit:
            found.skipped[label] = NO_TIME
        else:
            try:
                timed += _timed(question, hardware, parallel, known, found, limit)
                found.traced.append(label)
            except PlanError as error:
                first = first or error
                found.skipped[label] = str(error)
    if not found.traced and first is not None:
        raise first
    return timed


def _replay_all(timed: Sequence[_Timed], hardware: Hardware, found: Found, until: float) -> None:
    """Replay what may be on the front: the fastest first, then only what may need less than all faster ones."""
    room = hardware.device_room
    too_large: list[_Timed] = []
    least_found: int | None = None
    queue = sorted(enumerate(timed), key=lambda row: (row[1].costs.seconds[1], row[0]))
    for number, (_, each) in enumerate(queue):
        if least_found is not None and each.least >= least_found:
            continue
        if room is not None and each.least > room:
            too_large.append(each)
            continue
        if found.options and time.perf_counter() > until:
            found.skipped[f"{len(queue) - number} slower ones of those that were traced"] = NO_TIME
            return
        option = Option(each.job, each.costs, each.model.peak(each.job))
        if not lacks_of(option.peak, hardware):
            found.options.append(option)
            least_found = min(option.peak.device, least_found or option.peak.device)
        elif found.closest is None or option.peak.device < found.closest.peak.device:
            found.closest = option
    if found.closest is None and not found.options and too_large:
        nearest = min(too_large, key=lambda each: each.least)
        found.closest = Option(nearest.job, nearest.costs, nearest.model.peak(nearest.job))


def _is_covered(parallel: Parallelism, found: Found) -> bool:
    """Return whether a shorter ring was tried.

    Longer rings send more and need as much memory, so they serve only models with too few heads.
    """
    if parallel.ring == 1:
        return False
    shorter = replace(parallel, ring=parallel.ring // 2)
    return shorter.name in (*found.traced, *found.covered)


def _timed(
    question: Question, hardware: Hardware, parallel: Parallelism, known: Known, found: Found, until: float
) -> list[_Timed]:
    native = hardware.device != "cpu"
    kind = (parallel.context > 1, parallel.ring > 1, parallel.expert > 1)
    lengths = (*SHORT, 0)
    for short in lengths[lengths.index(known.short.get(kind, SHORT[0])) :]:
        try:
            with partitioned(question, parallel, native=native, short=short, known=known) as model:
                timed = _timed_jobs(model, hardware, parallel, found, until)
        except NotUniform:
            continue
        known.short[kind] = short
        return timed
    raise AssertionError  # all blocks are always uniform


def _timed_jobs(
    model: PartitionedModel, hardware: Hardware, parallel: Parallelism, found: Found, until: float
) -> list[_Timed]:
    """Return the jobs of one way to shard layers, as far as there is time to trace what they need."""
    timed: list[_Timed] = []
    begun: set[tuple[RecomputeConfig | None, bool]] = set()
    policies = _policies(model, parallel)
    for job in jobs_of(parallel, hardware, blocks=model.blocks, batch=found.global_batch, policies=policies):
        policy, several = job.candidate.recompute, job.samples > 1
        if (policy, several) not in begun:
            if timed and time.perf_counter() > until:
                what = [parallel.name or "data parallelism"]
                what += [] if policy is None else [f"{policy.policy} recompute"]
                found.skipped[", ".join([*what, *(["several samples"] if several else [])])] = NO_TIME
                continue
            begun.add((policy, several))
        costs = costs_of(model, job, hardware)
        model.prepare(job)
        timed.append(_Timed(model, job, costs, model.least(job)))
    return timed


def _policies(model: PartitionedModel, parallel: Parallelism) -> list[RecomputeConfig | None]:
    """Return what is recomputed; selectively only without tensor, context and expert parallelism."""
    given = model.question.run.recompute
    if given is not None or not model.recomputable:
        return [given]
    return [None, FULL, SELECTIVE] if parallel == Parallelism() else [None, FULL]
