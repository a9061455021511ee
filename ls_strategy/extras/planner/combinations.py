"""List the combinations that a search tries: kinds of parallelism, micro-batches, stages, tiers, groups of ranks.

Only what the strategy accepts is yielded: groups of ranks by node require nodes that the ranks fill evenly, and do not
work with experts, whose states are sharded over fewer ranks. Quantized gathers and gradients are never tried, because
they change the numbers; a recipe that sets them keeps them in every combination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ls_strategy.config import RecomputeConfig
from ls_strategy.config.parallel import Schedule
from ls_strategy.distributed.mesh import ranks_of_group
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.batch import length_of
from ls_strategy.extras.planner.candidates import Candidate, ladder
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.job import Job, stages_of
from ls_strategy.extras.planner.parallelism import Parallelism
from ls_strategy.moe.sparse import SparseLayer

FULL, SELECTIVE = RecomputeConfig(policy="full"), RecomputeConfig(policy="selective")

_MOST_TENSOR, _MOST_CONTEXT, _MOST_STAGES, _MOST_SAMPLES = 16, 64, 64, 64
_MOST_MICRO_BATCHES = 512
"""Of a pipeline, whose table is simulated."""

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
