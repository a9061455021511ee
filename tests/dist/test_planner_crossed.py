"""What the planner says of tiers and groups of ranks, with other kinds of parallelism, is what ranks hold and send."""

from __future__ import annotations

import functools

import pytest

from ls_strategy.config import RecomputeConfig, TierConfig
from ls_strategy.planner.candidates import Candidate
from ls_strategy.planner.parallelism import Parallelism
from ls_strategy.planner.partitioned import partitioned
from ls_strategy.testing import spawn
from tests.dist.test_planner_parallel import CP2, CP4, EP2, EP4, PP2, TP2, TP4, Planned, measure, question_of
from tests.dist.test_shard_groups import on_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CPU = TierConfig(tier="cpu")
FULL = RecomputeConfig(policy="full")
TP_CP = Parallelism(context=2, tensor=2)
TP_PP = Parallelism(pipeline=2, tensor=2)
EP_PP = Parallelism(expert=2, pipeline=2)
CP_PP = Parallelism(context=2, pipeline=2)
RING = Parallelism(context=2, ring=2)

RUNS = (
    Planned(TP2, Candidate(2, CPU)),
    Planned(TP4, Candidate(2, CPU), "bf16-true"),
    Planned(TP2, Candidate(3, CPU, CPU, FULL), "bf16-true", micro_batches=2),
    Planned(CP2, Candidate(2, CPU), "bf16-true"),
    Planned(CP4, Candidate(3, CPU), micro_batches=2),
    Planned(RING, Candidate(3, CPU, CPU, FULL)),
    Planned(TP_CP, Candidate(3, CPU, CPU)),
    Planned(EP2, Candidate(2, CPU), experts=True),
    Planned(EP4, Candidate(3, CPU, CPU, FULL), "bf16-true", experts=True),
    Planned(PP2, Candidate(2, CPU), micro_batches=4),
    Planned(PP2, Candidate(3, CPU, CPU, FULL), "bf16-true", micro_batches=4),
    Planned(Parallelism(pipeline=2, schedule="interleaved_1f1b"), Candidate(3, CPU), micro_batches=4),
    Planned(TP_PP, Candidate(2, CPU), micro_batches=4),
    Planned(EP_PP, Candidate(3, CPU, CPU), micro_batches=4, experts=True),
    Planned(CP_PP, Candidate(1), micro_batches=4, samples=1),
    Planned(CP_PP, Candidate(3, recompute=FULL), "bf16-true", micro_batches=4),
    Planned(Parallelism(context=2, ring=2, pipeline=2), Candidate(2), micro_batches=4),
    Planned(CP_PP, Candidate(3, CPU, CPU), micro_batches=4),
    Planned(CP2, Candidate(1, by_node="shard_size"), node_size=2),
    Planned(CP2, Candidate(2, by_node="shard_size"), "bf16-true", micro_batches=2, node_size=2),
    Planned(CP4, Candidate(3, recompute=FULL, by_node="shard_size"), "bf16-true", node_size=2),
    Planned(CP4, Candidate(3, by_node="hpz"), "bf16-true", node_size=2),
    Planned(RING, Candidate(3, by_node="hpz"), micro_batches=2, node_size=2),
)
IDS = [f"{planned},-{planned.ranks}-by-{planned.node_size}" for planned in RUNS]


def measure_on_nodes(rank: int, world_size: int, runs: tuple[Planned, ...]) -> list[tuple[int, dict[str, int]]]:
    """See `measure`. All runs have the same number of ranks on a node."""
    if runs[0].node_size < world_size:
        on_nodes(rank, runs[0].node_size)
    return measure(rank, world_size, runs)


@functools.cache
def measured(ranks: int, node_size: int) -> dict[Planned, list[tuple[int, dict[str, int]]]]:
    """Peak bytes and bytes sent by axis of every rank."""
    runs = tuple(planned for planned in RUNS if (planned.ranks, planned.node_size) == (ranks, node_size))
    found = spawn(measure_on_nodes, ranks, runs, init_process_group=False, timeout_s=570)
    return {planned: [rank[i] for rank in found] for i, planned in enumerate(runs)}


@pytest.mark.parametrize("planned", RUNS, ids=IDS)
def test_the_peak_is_foretold_within_a_twentieth(planned: Planned) -> None:
    with partitioned(question_of(planned), planned.parallel, native=False) as model:
        foretold = [p.device + p.cpu for p in model.peaks(planned.job, range(planned.parallel.pipeline))]
    found = [peak for peak, _ in measured(planned.ranks, planned.node_size)[planned]]
    for rank, peak in enumerate(found):
        assert foretold[rank * len(foretold) // len(found)] == pytest.approx(peak, rel=0.05), (foretold, found)


@pytest.mark.parametrize("planned", RUNS, ids=IDS)
def test_traffic_is_foretold(planned: Planned) -> None:
    """Exactly but for paddings of stages, sums of norms, and routers; with groups, some send their sums to one more."""
    with partitioned(question_of(planned), planned.parallel, native=False) as model:
        foretold, zero = model.spent(planned.job), model.zero_traffic(planned.job).sent
    ranks = [sent for _, sent in measured(planned.ranks, planned.node_size)[planned]]
    most = {axis: max(sent[axis] for sent in ranks) for axis in ranks[0]}
    assert zero == pytest.approx(most["zero"], rel=0.001)
    assert foretold["tensor"] == most["tensor"]
    assert foretold["context"] == most["sequence"]
    if not planned.experts:
        assert foretold["pipeline"] == most["pipeline"]
    assert foretold["expert"] == pytest.approx(most["expert"], rel=0.05)
