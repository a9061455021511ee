"""What a search tries: tiers and groups of ranks with every kind of parallelism that the strategy allows them with."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.mesh import MeshShape
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.parallelism import Parallelism
from ls_strategy.extras.planner.search import FULL, SELECTIVE, can_group, candidates_of, jobs_of

PLAIN = Hardware(ranks=64, ranks_per_node=8, tflops=300, link_gbs=100)
WITH_ALL = replace(PLAIN, node_gbs=12.5, bus_gbs=25, drive=10**12, drive_gbs=2)

KINDS = [
    Parallelism(),
    Parallelism(tensor=2),
    Parallelism(context=4, ring=2),
    Parallelism(expert=8),
    Parallelism(pipeline=4),
    Parallelism(pipeline=2, context=2, tensor=2),
]


def tried(parallel: Parallelism, hardware: Hardware) -> list[Candidate]:
    return [c for policy in (None, FULL) for c in candidates_of(parallel, hardware, policy)]


@pytest.mark.parametrize("parallel", KINDS, ids=lambda p: p.name or "data")
def test_every_kind_of_parallelism_is_tried_with_offload(parallel):
    names = [candidate.strategy for candidate in tried(parallel, WITH_ALL)]
    assert {"zero2_offload", "zero3_offload_optimizer", "zero3_offload"} <= set(names)
    assert "zero3_nvme" in names
    assert not any(candidate.optimizer for candidate in tried(parallel, PLAIN))
    on_host = tried(parallel, replace(WITH_ALL, drive=0))
    assert {candidate.optimizer.tier for candidate in on_host if candidate.optimizer} == {"cpu"}


@pytest.mark.parametrize("parallel", KINDS, ids=lambda p: p.name or "data")
def test_what_is_tried_is_what_the_strategy_accepts(parallel):
    """Every combination is a valid configuration and a valid mesh, and none changes the numbers."""
    for candidate in tried(parallel, WITH_ALL):
        options = {**candidate.arguments(), "parallel": parallel.arguments(micro_batches=8)}
        config = ZeROConfig.of(options.pop("stage"), **options)
        assert config.sharding.quantized_gathers is config.sharding.quantized_gradients is None
        shape = MeshShape.of(
            64, tensor=parallel.tensor, sequence=parallel.context, pipeline=parallel.pipeline, expert=parallel.expert,
            shard=config.sharding.shard_size, hpz=config.sharding.hpz, node_size=8,
        )  # fmt: skip
        assert shape.shard == (None if candidate.by_node != "shard_size" else 8 // parallel.tensor)
        assert shape.node == (None if candidate.by_node != "hpz" else 8 // parallel.tensor)


@pytest.mark.parametrize("parallel", KINDS, ids=lambda p: p.name or "data")
def test_groups_of_ranks_are_tried_where_they_send_less_between_nodes(parallel):
    groups = {(c.stage, c.by_node) for c in tried(parallel, WITH_ALL) if c.by_node is not None}
    expected = {(1, "shard_size"), (2, "shard_size"), (3, "shard_size"), (3, "hpz")}
    if parallel.expert > 1:
        expected = set()
    assert groups == expected
    assert can_group(parallel, WITH_ALL) == bool(expected)
    assert not can_group(parallel, PLAIN)


def test_groups_of_one_rank_or_of_all_are_not_tried():
    assert not can_group(Parallelism(), replace(WITH_ALL, ranks_per_node=1))
    assert not can_group(Parallelism(), replace(WITH_ALL, ranks=8))  # all are on one node
    assert not can_group(Parallelism(), replace(WITH_ALL, ranks=12))  # one node and a half


@pytest.mark.parametrize("kind", [Parallelism(), Parallelism(context=2), Parallelism(tensor=2, expert=2)], ids=str)
def test_jobs_that_need_one_trace_follow_one_another(kind):
    jobs = list(jobs_of(kind, WITH_ALL, blocks=8, batch=512, policies=[None, FULL, SELECTIVE]))
    keys = [(job.candidate.recompute, job.samples > 1) for job in jobs]
    assert len(list(itertools.groupby(keys))) == len(set(keys))
    assert {job.parallel.pipeline for job in jobs} == {1, 2, 4, 8}
    assert len(jobs) == len({(job.candidate, job.parallel, job.samples) for job in jobs})
    for job in jobs:
        assert job.samples * job.micro_batches * (64 // job.parallel.replica) == 512
