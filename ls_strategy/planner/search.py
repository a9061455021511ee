"""Search every combination of parallelism, ZeRO stage, tier and recompute for one global batch.

A choice never changes what is trained: the samples of an optimizer step are those of the run as it was given, and the
micro-batches follow. Only what the model supports is tried: a tensor-parallel plan, heads that divide, blocks for
stages, layers with experts.

A model is traced once per combination of tensor, context and expert parallelism. Times and a lower bound of the memory
follow from the trace; the memory is then replayed, fastest first, for combinations that may need less than all faster
ones. After `SECONDS`, nothing more is traced, and a quarter of that is the most that the replays of one trace take. The
result names what was not tried. Layers and sequences are sharded where one sample is too large, so with tensor and
context parallelism micro-batches are of one sample.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ls_strategy.config import RecomputeConfig
from ls_strategy.errors import PlanError
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.planner.batch import length_of, rows_of
from ls_strategy.planner.block_steps import Known, NotUniform
from ls_strategy.planner.candidates import Candidate, ladder
from ls_strategy.planner.choice import Question
from ls_strategy.planner.costs import Costs, costs_of
from ls_strategy.planner.divided import DividedModel, divided
from ls_strategy.planner.forecast import lacks_of
from ls_strategy.planner.hardware import Hardware, show_bytes
from ls_strategy.planner.job import Job, stages_of
from ls_strategy.planner.parallelism import Parallelism, stack_of
from ls_strategy.planner.pieces import SHORT
from ls_strategy.planner.replay import Peak
from ls_strategy.planner.traffic import StepTraffic, traffic

SECONDS = 8.0
"""After this time, no further combination of tensor, context and expert parallelism is traced."""

NO_TIME = "no time was left"
"""The reason for which a combination was not tried."""

_MOST_TENSOR, _MOST_CONTEXT, _MOST_STAGES, _MOST_SAMPLES = 16, 64, 64, 64
_MOST_MICRO_BATCHES = 512
"""Of a pipeline, whose table is simulated."""

_FULL, _SELECTIVE = RecomputeConfig(policy="full"), RecomputeConfig(policy="selective")

_SHARE_OF_TRACES = 0.8
"""Of the time: then the memory of the fastest combinations is replayed."""

_LEAST_TOKENS = 256
"""Of a sequence on one rank. The products of fewer take longer than a device's speed tells."""


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
        """What to set, so that the global batch stays: of the strategy, the loader and the Trainer."""
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

    model: DividedModel
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
    timed = _all_timed(question, hardware, found, started + _SHARE_OF_TRACES * seconds)
    _replay_all(timed, hardware, found, started + seconds)
    found.options.sort(key=lambda o: (o.costs.seconds[1], o.peak.device))
    found.seconds = time.perf_counter() - started
    return found


def _all_timed(question: Question, hardware: Hardware, found: Found, until: float) -> list[_Timed]:
    """Return the combinations that the model supports, with their costs.

    Raises:
        PlanError: there is none.
    """
    first: PlanError | None = None
    known = Known()
    timed: list[_Timed] = []
    for parallel in _layers(question, hardware):
        label = parallel.name or "data parallelism"
        if _is_covered(parallel, found):
            found.covered.append(label)
        elif found.traced and time.perf_counter() > until:
            found.skipped[label] = NO_TIME
        else:
            try:
                timed += _timed(question, hardware, parallel, known, found.global_batch)
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


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _layers(question: Question, hardware: Hardware) -> list[Parallelism]:
    """Return combinations of tensor, context and expert parallelism: one axis before two, then few ranks first."""
    ranks, node = hardware.ranks, hardware.on_a_node
    layers = [m for m in question.module.modules() if isinstance(m, SparseLayer)]
    experts = min((layer.num_experts for layer in layers), default=1)
    contexts = max(min(_MOST_CONTEXT, (length_of(question.batch) or 1) // _LEAST_TOKENS), 1)
    result: list[Parallelism] = []
    for tensor in _powers(min(_MOST_TENSOR, node, ranks)):
        for context in _powers(min(contexts, ranks // tensor)):
            for expert in _powers(min(experts, ranks)):
                if ranks % (tensor * context) or ranks % expert or experts % expert:
                    continue
                result += [
                    Parallelism(tensor=tensor, context=context, ring=ring, expert=expert) for ring in _powers(context)
                ]

    def together(p: Parallelism) -> tuple[int, ...]:
        axes = sum(size > 1 for size in (p.tensor, p.context, p.expert))
        return (p.ring, axes, p.tensor * p.context * p.expert, p.context, p.expert)

    return sorted(result, key=together)


def _is_covered(parallel: Parallelism, found: Found) -> bool:
    """Whether a shorter ring was tried: rings send more and hold as much, so they serve what has too few heads."""
    if parallel.ring == 1:
        return False
    shorter = replace(parallel, ring=parallel.ring // 2)
    return shorter.name in (*found.traced, *found.covered)


def _timed(question: Question, hardware: Hardware, parallel: Parallelism, known: Known, batch: int) -> list[_Timed]:
    native = hardware.device != "cpu"
    kind = (parallel.context > 1, parallel.ring > 1, parallel.expert > 1)
    lengths = (*SHORT, 0)
    for short in lengths[lengths.index(known.short.get(kind, SHORT[0])) :]:
        try:
            with divided(question, parallel, native=native, short=short, known=known) as model:
                timed = _timed_jobs(model, hardware, parallel, batch)
        except NotUniform:
            continue
        known.short[kind] = short
        return timed
    raise AssertionError  # all blocks are always uniform


def _timed_jobs(model: DividedModel, hardware: Hardware, parallel: Parallelism, batch: int) -> list[_Timed]:
    run = model.question.run
    policies: list[RecomputeConfig | None] = [run.recompute]
    if run.recompute is None and model.recomputable:
        policies.append(_FULL)
        if parallel == Parallelism():
            policies.append(_SELECTIVE)
    timed: list[_Timed] = []
    for job in _jobs(model, hardware, parallel, batch, policies):
        costs = costs_of(model, job, hardware, zero_traffic(model, job, hardware))
        model.prepare(job)
        timed.append(_Timed(model, job, costs, model.least(job)))
    return timed


def _jobs(
    model: DividedModel, hardware: Hardware, parallel: Parallelism, batch: int,
    policies: Sequence[RecomputeConfig | None],
) -> Iterator[Job]:  # fmt: skip
    ranks = hardware.ranks
    stages = _powers(min(_MOST_STAGES, model.blocks, ranks // (parallel.tensor * parallel.context)))
    for size in stages if parallel.context == 1 else (1,):  # blocks that partition tokens must be on one rank
        for schedule in ("1f1b", "interleaved_1f1b") if size > 1 else ("1f1b",):
            whole = Parallelism(
                tensor=parallel.tensor, context=parallel.context, ring=parallel.ring, expert=parallel.expert,
                pipeline=size, schedule=schedule,  # type: ignore[arg-type]
            )  # fmt: skip
            if ranks % whole.replica or (ranks // size) % parallel.expert or batch % (ranks // whole.replica):
                continue
            if size > 1 and stages_of(whole) > model.blocks:
                continue
            share = batch // (ranks // whole.replica)
            whole_layers = parallel.tensor == parallel.context == 1
            for samples in _powers(min(_MOST_SAMPLES, share)) if whole_layers else (1,):
                if share % samples or (size > 1 and not size <= share // samples <= _MOST_MICRO_BATCHES):
                    continue
                for candidate in _candidates(whole, hardware, policies):
                    yield Job(
                        candidate=candidate, parallel=whole, ranks=ranks, node_size=hardware.on_a_node,
                        samples=samples, micro_batches=share // samples,
                    )  # fmt: skip


def _candidates(
    parallel: Parallelism, hardware: Hardware, policies: Sequence[RecomputeConfig | None]
) -> Iterator[Candidate]:
    """Yield strategies with the numbers of DDP. Tiers and groups of ranks by node are tried with data parallelism."""
    zero = parallel.zero(hardware.ranks)
    for policy in policies:
        for stage in (0, 1, 2, 3) if zero > 1 and policy != _SELECTIVE else ():
            yield Candidate(stage, recompute=policy)  # type: ignore[arg-type]
        if zero == 1 and policy != _SELECTIVE:
            yield Candidate(0, recompute=policy)
    if parallel != Parallelism():
        return
    plain = ladder(
        ranks=hardware.ranks,
        recompute=policies[0],
        recomputable=len(policies) > 1,
        drive=hardware.drive != 0 and hardware.drive_gbs is not None,
        by_node=hardware.node_gbs is not None and hardware.ranks > hardware.on_a_node > 1,
    )
    for candidate in plain:
        is_tier = candidate.optimizer is not None
        if (is_tier and hardware.bus_gbs is not None) or (
            not is_tier and (candidate.by_node is not None or candidate.recompute == _SELECTIVE)
        ):
            yield candidate


def zero_traffic(model: DividedModel, job: Job, hardware: Hardware) -> StepTraffic:
    """Return what ZeRO moves per rank and step."""
    # A pipeline gathers and reduces once, after all micro-batches, in fp32: stage 3 as stage 2.
    once = job.parallel.pipeline > 1
    candidate = replace(job.candidate, stage=2) if once and job.candidate.stage == 3 else job.candidate
    config = candidate.config(model.question.run.config)
    return traffic(
        model.plans.fullest(config, job),
        model.optimizer_bytes,
        micro_batches=1 if once else job.micro_batches,
        native_fp32=once or (model.native and model.question.precision.reduce_in_fp32),
        cuda=model.native,
        gradients_stored=not model.setting(config, job).early_step,
        node_size=max(hardware.on_a_node // job.parallel.tensor, 1),
    )


def front_table(found: Found) -> str:
    """Return the Pareto front, one line per option, the fastest first."""
    rows = [["", "device", "s per step", "sent in node", "between nodes", "bubble"]]
    for option in found.front:
        low, high = option.costs.seconds
        bubble = f"{option.costs.bubble:.1%}" if option.costs.bubble else "-"
        sent = [show_bytes(n) if n else "-" for n in (option.costs.total_in_node, option.costs.total_between_nodes)]
        rows.append([option.name, show_bytes(option.peak.device), f"{low:.3g} to {high:.3g}", *sent, bubble])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    head = f"memory against time, with a global batch of {found.global_batch:,} samples:"
    return "\n".join([head, *(line.rstrip() for line in lines)])


def explanation(found: Found, hardware: Hardware) -> list[str]:
    """Explain the fastest option that fits in five lines."""
    tried = f"{len(found.traced)} ways to shard the layers in {found.seconds:.1f} s"
    if not found.options:
        closest = found.closest
        needs = "" if closest is None else f" {closest.name} comes closest, with {show_bytes(closest.peak.device)}."
        return [f"nothing fits.{needs} Searched {tried}. Use more ranks, a smaller batch, or offload."]
    best = found.front[0]
    active = best.peak.at_peak.get("activations", 0)
    states = sum(best.peak.at_peak.get(kind, 0) for kind in ("parameters", "masters", "gradients", "optimizer"))
    room = hardware.device_room
    bound = max(best.costs.parts.items(), key=lambda part: part[1])
    chosen = best.settings
    leanest = found.front[-1]
    return [
        f"{best.name}: the fastest of what fits, at most {best.costs.seconds[1]:.3g} s per step; searched {tried}.",
        f"memory: {show_bytes(best.peak.device)}"
        + ("" if room is None else f" of {show_bytes(room)}")
        + f", of that {show_bytes(states)} states and {show_bytes(active)} activations.",
        f"time: mostly {bound[0]} ({bound[1]:.3g} s without overlap), {best.costs.bubble:.1%} bubble.",
        f"least memory: {leanest.name}, {show_bytes(leanest.peak.device)}, at most {leanest.costs.seconds[1]:.3g} s.",
        f"set ZeROStrategy({', '.join(f'{k}={v!r}' for k, v in chosen['strategy'].items())}), "
        f"a batch size of {chosen['batch_size_per_replica']} and "
        f"accumulate_grad_batches={chosen['accumulate_grad_batches']}: the global batch stays "
        f"{found.global_batch:,}.",
    ]
