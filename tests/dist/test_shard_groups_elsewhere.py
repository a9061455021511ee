"""Groups that shard states, together with other kinds of parallelism, with Fabric, and what steps whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist import fabric_ranks
from tests.dist.parallel_runs import Outcome, Run, plain, train_all, unequal
from tests.dist.ranks import Net, batches, on_ranks, quiet, trainer_of
from tests.dist.test_virtual_ranks import check_equal
from tests.dist.test_virtual_ranks import train as train_virtual
from tests.native_ranks import on_native_device

pytestmark = pytest.mark.wide

PARALLEL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 3, "parallel.context": 2}, {"sharding.shard_size": 2}),
    ({"stage": 3, "parallel.context": 2}, {"sharding.hpz": 2}),
    ({"stage": 3, "parallel.tensor": 2}, {"sharding.shard_size": 1}),
    (
        {"stage": 1, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2},
        {"sharding.shard_size": 1},
    ),
]
"""Options, and how ranks are grouped."""


def equal(a: Outcome, b: Outcome) -> bool:
    same = a.weights.keys() == b.weights.keys() and all(torch.equal(v, b.weights[k]) for k, v in a.weights.items())
    return same and a.losses == b.losses and a.norms == b.norms


def test_the_bits_with_other_kinds_of_parallelism() -> None:
    runs = [Run(options={**options, **more}, steps=4) for options, groups in PARALLEL for more in ({}, groups)]
    found = spawn(train_all, 4, runs, init_process_group=False, timeout_s=150)
    for results in found:
        for i, (options, _) in enumerate(PARALLEL):
            assert len(results[2 * i].losses) == 4
            assert equal(results[2 * i], results[2 * i + 1]), options


FABRIC = ({"stage": 3, "sharding": {"min_unit_numel": 0}}, {"stage": 2, "sharding": {"min_unit_numel": 0}})


@on_ranks(4, timeout_s=120)
def test_the_bits_with_fabric(rank: int, world_size: int) -> None:
    fabric_ranks.quiet()
    found = []
    for options in FABRIC:
        both = []
        for more in ({}, {"shard_size": 2}, *([{"hpz": 2}] if options["stage"] == 3 else [])):
            fabric_ranks.OPTIONS["groups"] = {**options, "sharding": {**options["sharding"], **more}}
            both.append(fabric_ranks.train(rank, world_size, "groups", {"accumulate": 2, "max_norm": 0.1, "steps": 4}))
        found.append(both)
    for flat, groups in [(each[0], other) for each in found for other in each[1:]]:
        assert flat["losses"] == groups["losses"]
        assert flat["norms"] == groups["norms"]
        assert all(torch.equal(v, groups["weights"][k]) for k, v in flat["weights"].items())


def virtual(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Virtual ranks, and Muon, which steps full matrices."""
    options = {"stage": 3, "parallel.virtual_ranks": 5, "sharding.min_unit_numel": 0}
    return [
        train_virtual(rank, world_size, {**options, **more}, {"gradient_clip_val": 0.5}, kind)
        for kind in ("Habits", "Matrices")
        for more in ({}, {"sharding.shard_size": 2})
    ]


def test_the_bits_with_virtual_ranks_and_whole_tensors() -> None:
    habits, habits_in_groups, matrices, matrices_in_groups = spawn(virtual, 4, init_process_group=False, timeout_s=150)[
        0
    ]
    check_equal(habits_in_groups, habits)
    check_equal(matrices_in_groups, matrices)


def muon(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    quiet()
    found = []
    for more in ({}, {"shard_size": 2}):
        module = Net()
        module.configure_optimizers = lambda module=module: torch.optim.Muon(  # type: ignore[method-assign]
            [p for p in module.parameters() if p.ndim == 2], lr=1e-2
        )
        trainer = trainer_of(ZeROStrategy(stage=3, sharding={"min_unit_numel": 0, **more}), max_steps=4)
        trainer.fit(module, batches(64))
        found.append({k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()})
    return found


def test_the_bits_of_whole_tensors() -> None:
    flat, groups = spawn(muon, 4, init_process_group=False, timeout_s=60)[0]
    assert all(torch.equal(v, groups[k]) for k, v in flat.items())


def test_on_a_native_device() -> None:
    """Where the transport sums by itself, and copies go over streams: the numbers of one process."""
    expected = plain(Run(steps=4))
    runs = [
        Run({"stage": stage, **{f"sharding.{name}": size for name, size in sharding.items()}}, steps=4)
        for stage, sharding in (
            (3, {"shard_size": 2}),
            (1, {"shard_size": 2}),
            (2, {"shard_size": 1}),
            (3, {"hpz": 2}),
            (3, {"quantized_gathers": "int8"}),
            (3, {"quantized_gathers": "int8", "hpz": 2}),
        )
    ]
    found = spawn(on_native_device, 4, train_all, runs, init_process_group=False, timeout_s=170)[0]
    assert not unequal(expected, runs[:4], found[:4])
    assert equal(found[4], found[5])
