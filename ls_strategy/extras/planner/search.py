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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ls_strategy.config import RecomputeConfig
from ls_strategy.config.parallel import Schedule
from ls_strategy.distributed.mesh import ranks_of_group
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.block_steps import Known, NotUniform
from ls_strategy.extras.planner.candidates import Candidate, ladder
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.forecast import EFFICIENCY, lacks_of
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.parallelism import Job, Parallelism, stack_of, stages_of
from ls_strategy.extras.planner.partitioned import PartitionedModel, partitioned
from ls_strategy.extras.planner.pieces import SHORT
from ls_strategy.extras.planner.replay import Peak
from ls_strategy.extras.planner.sizes import aligned, show_bytes
from ls_strategy.extras.planner.step import length_of, rows_of
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.parallel.pipeline.schedules import make_table, stages_per_rank_of
from ls_strategy.parallel.pipeline.simulate import simulate

# Only what the strategy accepts is yielded: groups of ranks by node require nodes that the ranks fill evenly, and do
# not work with experts, whose states are sharded over fewer ranks. Quantized gathers and gradients are never tried,
# because they change the numbers; a recipe that sets them keeps them in every combination.

FULL, SELECTIVE = RecomputeConfig(policy="full"), RecomputeConfig(policy="selective")

_MOST_TENSOR, _MOST_CONTEXT, _MOST_STAGES, _MOST_SAMPLES = 16, 64, 64, 64
_MOST_MICRO_BATCHES = 512  # of a pipeline, whose table is simulated
_LEAST_TOKENS = 512
"""Of a sequence on one rank. With fewer, products of matrices read weights for longer than they compute: an H100 does
295 16-bit operations per byte that it reads, and a product with 512 tokens and wide layers has about 400."""

_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved_1f1b")


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def layer_shardings(question: Question, hardware: Hardware) -> list[Parallelism]:
    """Return combinations of tensor, context and expert parallelism: one axis before two, whole sequences first."""
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
        return (p.ring, axes, p.context, p.tensor * p.expert, p.expert)

    return sorted(result, key=together)


def jobs_of(
    parallel: Parallelism, hardware: Hardware, *, blocks: int, batch: int, policies: Sequence[RecomputeConfig | None]
) -> Iterator[Job]:
    """Yield every pipeline, micro-batch, recomputation, stage, tier and group of ranks for layers that are sharded so.

    Those that need the same trace follow one another.

    Args:
        parallel: how layers and sequences are sharded.
        hardware: ranks, and what is known of it.
        blocks: of the model.
        batch: samples per step of all ranks.
        policies: recomputation to try.
    """
    micro_batches = list(_micro_batches(parallel, hardware, blocks=blocks, batch=batch))
    for several in (False, True):
        for policy in policies:
            for piped, samples, count in micro_batches:
                if (samples > 1) is several:
                    for candidate in candidates_of(piped, hardware, policy, alone=len(policies) == 1):
                        yield Job(
                            candidate=candidate, parallel=piped, ranks=hardware.ranks, node_size=hardware.on_a_node,
                            samples=samples, micro_batches=count,
                        )  # fmt: skip


def _micro_batches(
    parallel: Parallelism, hardware: Hardware, *, blocks: int, batch: int
) -> Iterator[tuple[Parallelism, int, int]]:
    """Yield pipelines with the samples of a micro-batch, and the micro-batches per step and replica."""
    ranks = hardware.ranks
    for size in _powers(min(_MOST_STAGES, blocks, ranks // (parallel.tensor * parallel.context))):
        for schedule in _SCHEDULES if size > 1 else _SCHEDULES[:1]:
            piped = replace(parallel, pipeline=size, schedule=schedule)
            if ranks % piped.replica or (ranks // size) % parallel.expert or batch % (ranks // piped.replica):
                continue
            if size > 1 and stages_of(piped) > blocks:
                continue
            share = batch // (ranks // piped.replica)
            whole_layers = parallel.tensor == parallel.context == 1
            for samples in _powers(min(_MOST_SAMPLES, share)) if whole_layers else (1,):
                if share % samples or (size > 1 and not size <= share // samples <= _MOST_MICRO_BATCHES):
                    continue
                yield piped, samples, share // samples


def candidates_of(
    parallel: Parallelism, hardware: Hardware, policy: RecomputeConfig | None, *, alone: bool = False
) -> Iterator[Candidate]:
    """Yield strategies with the numbers of DDP and one choice of recomputation.

    Args:
        parallel: of one combination, with its pipeline.
        hardware: tiers are tried if the speed of the bus, and for NVMe that of the device, is known.
        policy: what is recomputed; selectively only with data parallelism alone.
        alone: whether no other choice is tried. Otherwise NVMe and offload of activations are tried with full
            recomputation only, which needs less of both.
    """
    offloads, plain = hardware.bus_gbs is not None, parallel == Parallelism()
    if policy == SELECTIVE and not plain:
        return
    for candidate in ladder(
        ranks=parallel.zero(hardware.ranks),
        recompute=policy,
        recomputable=False,
        drive=hardware.drive != 0 and hardware.drive_gbs is not None,
        by_node=can_group(parallel, hardware),
    ):
        is_tier = candidate.optimizer is not None
        if is_tier and (not offloads or policy == SELECTIVE):
            continue
        last_resort = candidate.activation_offload is not None or "nvme" in candidate.strategy
        if last_resort and not (alone or policy == FULL):
            continue
        yield candidate


def can_group(parallel: Parallelism, hardware: Hardware) -> bool:
    """Return whether groups of ranks by node are tried: several groups of several ranks send less between nodes."""
    if hardware.node_gbs is None or parallel.expert > 1 or hardware.ranks <= hardware.on_a_node:
        return False
    zero = parallel.zero(hardware.ranks)
    try:
        size = ranks_of_group(
            "shard_size", "node", node_size=hardware.on_a_node, replicated=zero, tensor=parallel.tensor
        )
    except PlanError:
        return False
    return 1 < size < zero


@dataclass(frozen=True)
class Costs:
    """Costs of one step on the busiest rank: FLOPs, traffic and seconds."""

    flops: int
    sent: dict[str, int]  # bytes to other ranks, by axis: ``zero tensor context expert pipeline``
    # Those that go to other nodes. For NCCL, as if every part went straight to its owner.
    between_nodes: dict[str, int]
    bubble: float  # share of the time in which ranks of a pipeline wait, by the schedule's table
    # Lower and upper bound: everything overlapped at peak speed, or nothing at usual speed.
    seconds: tuple[float, float]
    parts: dict[str, float]  # seconds of the upper bound, by what takes them

    @property
    def total_between_nodes(self) -> int:
        """All bytes to ranks of other nodes."""
        return sum(self.between_nodes.values())

    @property
    def total_in_node(self) -> int:
        """All bytes to other ranks of the same node."""
        return sum(self.sent.values()) - self.total_between_nodes


def costs_of(model: PartitionedModel, job: Job, hardware: Hardware) -> Costs:
    """Return the costs of a job. ``hardware`` must have ``tflops`` and ``link_gbs``."""
    zero = model.traffic(job)
    spent = model.spent(job)
    flops = spent.pop("flops")
    sent = {"zero": zero.sent, **spent}
    far = {"zero": zero.between_nodes, **{axis: _far(axis, nbytes, job) for axis, nbytes in spent.items()}}
    bubble = bubble_of(job.parallel.schedule, job.parallel.pipeline, job.micro_batches)
    assert hardware.tflops is not None
    compute = flops / (hardware.tflops * 1e12) / (1 - bubble)
    parts = {"computation": compute / EFFICIENCY}
    for axis, nbytes in sent.items():
        parts[f"traffic of {axis}"] = _seconds(nbytes, far[axis], hardware)
    for what, nbytes, speed in (("bus", zero.bus, hardware.bus_gbs), ("drive", zero.drive, hardware.drive_gbs)):
        if nbytes and speed is not None:
            parts[f"traffic of the {what}"] = nbytes / (speed * 1e9)
    links = sum(parts.values()) - parts["computation"]
    return Costs(flops, sent, far, bubble, (max(compute, links), sum(parts.values())), parts)


def _seconds(nbytes: int, far: int, hardware: Hardware) -> float:
    assert hardware.link_gbs is not None
    if hardware.node_gbs is None:
        return nbytes / (hardware.link_gbs * 1e9)
    inside = (nbytes - far) / (hardware.link_gbs * 1e9)
    return inside + far * hardware.on_a_node / (hardware.node_gbs * 1e9)  # the ranks of a node share its link


def _far(axis: str, nbytes: int, job: Job) -> int:
    """Return the bytes of an axis that leave the node: groups are neighbours, in the order of the mesh."""
    parallel = job.parallel
    size, stride = {
        "tensor": (parallel.tensor, 1),
        "context": (parallel.context, parallel.tensor),
        "expert": (parallel.expert, 1),
        "pipeline": (parallel.pipeline, job.ranks // parallel.pipeline),
    }[axis]
    if size == 1 or job.ranks <= job.node_size:
        return 0
    if axis == "pipeline":  # to the next stage only
        return nbytes if stride >= job.node_size else nbytes * stride // job.node_size
    here = parallel.on_a_node(job.node_size, size, stride)
    return nbytes * (size - here) // (size - 1)


@cache
def bubble_of(schedule: Schedule, ranks: int, micro_batches: int) -> float:
    """Return the share of the time in which the ranks of a pipeline wait, by the schedule's table.

    With blocks of equal times, a rank works on every micro-batch once per stage that it holds, and waits for the other
    ranks once: Narayanan et al., arXiv:2104.04473, section 2.2. Other schedules are simulated.
    """
    if schedule in ("1f1b", "interleaved_1f1b"):
        return (ranks - 1) / (stages_per_rank_of(schedule) * micro_batches + ranks - 1)
    return simulate(make_table(schedule, ranks, micro_batches)).bubble if ranks > 1 else 0.0


SECONDS = 9.0
"""After this time, nothing more is begun; after most of it, see `_SHARE_OF_TRACES`, no further step is traced."""

NO_TIME = "no time was left"  # the reason for which a combination was not tried
_SHARE_OF_TRACES = 3 / 4  # of the time: then the memory of the fastest combinations is replayed
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

    options: list[Option] = field(default_factory=list)  # those that were replayed and fit, the fastest first
    closest: Option | None = None  # the one that needs least, of those that do not fit
    # Combinations of tensor, context and expert parallelism that were tried.
    traced: list[str] = field(default_factory=list)
    covered: list[str] = field(default_factory=list)  # longer rings than the heads of the model require
    # Combinations that the model does not support, or for which there was no time, with the reason.
    skipped: dict[str, str] = field(default_factory=dict)
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
    least: int  # bytes that it needs at least


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


# --- show what a search found: memory against time as a table, and the fastest option in a few lines ------------------


def front_table(found: Found) -> str:
    """Return the Pareto front, one line per option, the fastest first."""
    rows = [["", "device", "s per step", "sent in node", "between nodes", "bubble"]]
    for option in found.front:
        low, high = option.costs.seconds
        bubble = f"{option.costs.bubble:.1%}" if option.costs.bubble else "-"
        sent = [show_bytes(n) if n else "-" for n in (option.costs.total_in_node, option.costs.total_between_nodes)]
        rows.append([option.name, show_bytes(option.peak.device), f"{low:.3g} to {high:.3g}", *sent, bubble])
    head = f"memory against time, with a global batch of {found.global_batch:,} samples:"
    return "\n".join([head, *aligned(rows)])


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
