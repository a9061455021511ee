"""What the planner says of tiers and groups of ranks, with other kinds of parallelism, is what ranks hold and send."""

from __future__ import annotations

import functools
import os
import tempfile

import pytest

from ls_strategy.config import ActivationOffloadConfig, RecomputeConfig, TierConfig
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.parallelism import Parallelism
from ls_strategy.extras.planner.partitioned import partitioned
from ls_strategy.testing import spawn
from tests.dist.test_planner_parallel import (
    CP2,
    CP4,
    DRIVE,
    EP2,
    EP4,
    PP2,
    TP2,
    TP4,
    Planned,
    measure,
    question_of,
)
from tests.dist.test_shard_groups import on_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CPU, NVME = TierConfig(tier="cpu"), TierConfig(tier="nvme")
ON_HOST = ActivationOffloadConfig(tier="cpu", min_bytes=0, in_flight_bytes=1 << 17)
"""Small activations, too, of which up to 128 KiB stay: some inputs of blocks."""
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
    Planned(TP2, Candidate(1, by_node="shard_size"), ranks=8, node_size=4),
    Planned(TP2, Candidate(2, by_node="shard_size"), "bf16-true", micro_batches=2, ranks=8, node_size=4),
    Planned(TP2, Candidate(3, recompute=FULL, by_node="shard_size"), ranks=8, node_size=4),
    Planned(TP2, Candidate(3, by_node="hpz"), "bf16-true", ranks=8, node_size=4),
    Planned(PP2, Candidate(1, by_node="shard_size"), micro_batches=4, ranks=8, node_size=2),
    Planned(PP2, Candidate(2, by_node="shard_size"), "bf16-true", micro_batches=4, ranks=8, node_size=2),
    Planned(PP2, Candidate(3, recompute=FULL, by_node="shard_size"), micro_batches=4, ranks=8, node_size=2),
    Planned(PP2, Candidate(3, by_node="hpz"), "bf16-true", micro_batches=4, ranks=8, node_size=2),
    Planned(TP_PP, Candidate(3, by_node="hpz"), micro_batches=4, ranks=16, node_size=4),
    Planned(TP2, Candidate(2, NVME)),
    Planned(TP2, Candidate(3, NVME, CPU, FULL), "bf16-true", micro_batches=2),
    Planned(TP2, Candidate(3, NVME, NVME, FULL, ON_HOST), "bf16-true"),
    Planned(CP2, Candidate(3, NVME, NVME, FULL)),
    Planned(EP2, Candidate(2, NVME, recompute=FULL), experts=True),
    Planned(PP2, Candidate(2, NVME), micro_batches=4),
    Planned(PP2, Candidate(3, NVME, NVME, FULL), "bf16-true", micro_batches=4),
    Planned(TP2, Candidate(1, recompute=FULL, activation_offload=ON_HOST)),
    Planned(CP2, Candidate(2, CPU, recompute=FULL, activation_offload=ON_HOST), "bf16-true", samples=8),
    Planned(EP2, Candidate(2, CPU, recompute=FULL, activation_offload=ON_HOST), experts=True),
    Planned(PP2, Candidate(1, recompute=FULL, activation_offload=ON_HOST), micro_batches=4),
    Planned(PP2, Candidate(3, CPU, CPU, FULL, ON_HOST), "bf16-true", micro_batches=4),
)
IDS = [f"{planned},-{planned.ranks}-by-{planned.node_size}" for planned in RUNS]


def measure_on_nodes(
    rank: int, world_size: int, runs: tuple[Planned, ...], folder: str
) -> list[tuple[int, dict[str, int]]]:
    """See `measure`. All runs have the same number of ranks on a node, and NVMe states are in ``folder``."""
    os.environ[DRIVE] = folder
    if runs[0].node_size < world_size:
        on_nodes(rank, runs[0].node_size)
    return measure(rank, world_size, runs)


@functools.cache
def measured(ranks: int, node_size: int) -> dict[Planned, list[tuple[int, dict[str, int]]]]:
    """Peak bytes and bytes sent by axis of every rank."""
    runs = tuple(planned for planned in RUNS if (planned.ranks, planned.node_size) == (ranks, node_size))
    with tempfile.TemporaryDirectory() as folder:
        found = spawn(measure_on_nodes, ranks, runs, folder, init_process_group=False, timeout_s=570)
    return {planned: [rank[i] for rank in found] for i, planned in enumerate(runs)}


def _staged(planned: Planned) -> bool:
    """Whether blocks of states on NVMe are in host memory: as many as threads are reading and writing at the time."""
    return "nvme" in planned.candidate.strategy


@pytest.mark.parametrize("planned", [each for each in RUNS if not _staged(each)], ids=str)
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
        foretold, traffic = model.spent(planned.job), model.traffic(planned.job)
    ranks = [sent for _, sent in measured(planned.ranks, planned.node_size)[planned]]
    most = {axis: max(sent[axis] for sent in ranks) for axis in ranks[0]}
    assert traffic.sent == pytest.approx(most["zero"], rel=0.001)
    assert traffic.between_nodes == pytest.approx(most["zero between nodes"], rel=0.001)
    assert traffic.drive == pytest.approx(most["drive"], rel=0.004 if planned.parallel.pipeline > 1 else 0)
    if planned.parallel.pipeline == 1:  # what stays is a whole number of inputs
        assert abs(traffic.activations - most["activations"]) <= ON_HOST.in_flight_bytes
    else:
        assert most["activations"] <= traffic.activations <= 2.5 * most["activations"]
    assert (traffic.activations > 0) == (planned.candidate.activation_offload is not None)
    assert foretold["tensor"] == most["tensor"]
    assert foretold["context"] == most["sequence"]
    if not planned.experts:
        assert foretold["pipeline"] == most["pipeline"]
    assert foretold["expert"] == pytest.approx(most["expert"], rel=0.05)
