"""Shards by weights, for ranks of unequal memory: the same bits as equal shards, in other proportions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import distributed as dist

from ls_strategy.config import TierConfig
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from ls_strategy.zero.setup import weights as by_memory
from tests.dist.ranks import on_ranks
from tests.models import (
    Case,
    Net,
    assert_same_bits,
    changed_in_between,
    loader,
    quiet,
    refused,
    trainer_of,
)

pytestmark = pytest.mark.wide

NORM: dict[str, Any] = {"clip": "norm", "clip_at": 0.05}
VALUE: dict[str, Any] = {"clip": "value", "clip_at": 0.01}
CPU = (("offload.optimizer", "cpu"),)
BOTH = (("offload.optimizer", "cpu"), ("offload.parameters", "cpu"))
NVME = (("offload.optimizer", "nvme"), ("offload.nvme_allow_ram", True))

FIRST = [
    Case(stage=stage, steps=5, traits=("uneven", "frozen", "tied"), accumulate=2, **NORM) for stage in (1, 2, 3)
] + [
    Case(stage=3, steps=4, precision="bf16-mixed", options=BOTH),
    Case(stage=2, steps=4, precision="bf16-true", options=NVME, **VALUE),
]
MORE = [
    Case(stage=stage, steps=6, precision=precision, optimizer=optimizer, traits=traits, accumulate=accumulate, **clip)
    for stage in (1, 2, 3)
    for precision in ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
    for optimizer, traits, accumulate, clip in (
        ("adamw", ("uneven", "frozen"), 1, NORM),
        ("adamw", ("unused_here", "empty"), 3, VALUE),
        ("two", ("uneven", "tied"), 2, {}),
        ("sgd", ("buffers",), 1, {}),
    )
] + [
    Case(stage=stage, steps=6, options=options, accumulate=accumulate, **clip)
    for stage, options in (
        (1, CPU),
        (2, CPU),
        (3, BOTH),
        (1, NVME),
        (3, NVME),
        (3, (*NVME, ("offload.parameters", "nvme"))),
    )
    for accumulate, clip in ((1, NORM), (3, {}))
]


def weighted(case: Case, *weights: float) -> Case:
    return replace(case, options=(*case.options, ("sharding.rank_weights", list(weights))))


def compare(world_size: int, cases: list[Case], weights: tuple[float, ...], folder: Path) -> None:
    assert_same_bits(world_size, [(case, weighted(case, *weights)) for case in cases], folder, timeout_s=400)


def test_the_bits_are_those_of_equal_shards(tmp_path: Path) -> None:
    compare(2, FIRST, (2, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("world_size", "weights"), [(2, (1, 3)), (3, (1, 2.5, 1)), (4, (1, 1, 40, 1))])
def test_every_case_has_the_bits_of_equal_shards(world_size: int, weights: tuple[float, ...], tmp_path: Path) -> None:
    compare(world_size, FIRST + MORE, weights, tmp_path)


# --- bytes -----------------------------------------------------------------------------------------------------------


def measure(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Of every case: what is sent in a step, counted where it leaves, and bytes of states on this rank."""
    quiet()
    sent = [0]
    exchange = dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> Any:
        sent[0] += sum(o.tensor.numel() for o in operations if o.op is dist.isend)
        return exchange(operations)

    dist.batch_isend_irecv = counting
    found: list[dict[str, Any]] = []

    class Counts(pl.Callback):
        """What was sent after each step, and what the engine holds after the last."""

        def __init__(self) -> None:
            self.after: list[int] = []
            self.memory: dict[str, int] = {}

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.after.append(sent[0])
            strategy: Any = trainer.strategy
            self.memory = strategy.memory_bytes()

    for case in BYTES:
        counts = Counts()
        trainer: Any = trainer_of(case, world_size, callbacks=[counts])
        trainer.fit(Net(case), loader(case, world_size))
        engine = trainer.strategy.require_engine()
        found.append(
            {
                "sent": counts.after[-1] - counts.after[-2],
                "planned": engine.plan.elements_sent(),
                "memory": counts.memory,
                "masters": sum(f.master.numel() for f in engine.flats),
                "numel": sum(f.layout.numel for f in engine.flats),
                "state_bytes": engine.plan.state_bytes(),
                "text": engine.plan.describe(),
            }
        )
    dist.batch_isend_irecv = exchange
    return found


BYTES = [
    weighted(Case(stage=stage, steps=3, width=64, blocks=4, precision=precision), 2, 1)
    for stage in (1, 2, 3)
    for precision in ("32-true", "bf16-true")
]


def test_bytes_per_rank_are_in_proportion() -> None:
    """Two thirds and one third, of what the stage shards; and the formulas of traffic, of each rank."""
    for case, ours, its in zip(BYTES, *spawn(measure, 2, init_process_group=False, timeout_s=120), strict=True):
        for rank, found in enumerate((ours, its)):
            assert found["sent"] == found["planned"]
            for kind in ("masters", "optimizer"):
                assert math.isclose(found["memory"][kind], found["state_bytes"][kind], rel_tol=0.05)
            assert f"shards by weights 2 : 1; this is rank {rank}, with {(66.7, 33.3)[rank]} %" in found["text"]
        assert ours["masters"] + its["masters"] == ours["numel"] == its["numel"]
        kinds = {1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "masters")}[case.stage]
        for kind in kinds:
            assert math.isclose(ours["state_bytes"][kind] / its["state_bytes"][kind], 2, rel_tol=0.05), kind
        assert math.isclose(ours["masters"] / its["masters"], 2, rel_tol=0.05)
        assert math.isclose(ours["memory"]["optimizer"] / its["memory"]["optimizer"], 2, rel_tol=0.05)
        # A reduction sends the other's shard, a gather one's own. Blocks are gathered twice but for the last, root
        # units once, at stage 3; at stages 1 and 2 what is sent is the same on both.
        assert (ours["sent"] > its["sent"]) if case.stage == 3 else (ours["sent"] == its["sent"] == ours["numel"])


# --- checkpoints -----------------------------------------------------------------------------------------------------


@on_ranks(2, timeout_s=120)
def test_checkpoints_do_not_know_the_weights(rank: int, world_size: int, tmp_path: Path) -> None:
    """A run of 6 steps against 3 steps saved with one cut and 3 more with another."""
    found: dict[str, bool] = {}
    for stage in (1, 3):
        case = Case(stage=stage, steps=6)
        changes = {
            "with, then without": (weighted(case, 2, 1), case),
            "without, then with": (case, weighted(case, 1, 3)),
            "with, then otherwise": (weighted(case, 2, 1), weighted(case, 1, 5)),
        }
        found |= changed_in_between(rank, world_size, tmp_path, case, changes)
    assert len(found) == 6
    assert all(found.values()), found


# --- moments in fewer bits -------------------------------------------------------------------------------------------


@on_ranks(2, timeout_s=120)
def test_moments_in_fewer_bits(rank: int, world_size: int) -> None:
    """Random bits of the rounding belong to places in the full buffer, so another cut rounds in the same way."""
    found = []
    for moments in ("bf16", "int8"):
        for weights in ((), (3, 1)):
            case = Case(stage=3, steps=20, width=32, options=(("precision.moments", moments),))
            case = weighted(case, *weights) if weights else case
            net = Net(case)
            trainer: Any = trainer_of(case, world_size)
            trainer.fit(net, loader(case, world_size))
            flats = trainer.strategy.require_engine().flats
            found.append((net.result.losses, [cut % f.layout.align for f in flats for cut in f.layout.cuts]))
    for (equal, _), (unequal, rests) in (found[:2], found[2:]):
        assert set(rests) == {0}
        assert equal == unequal


# --- by memory, and what is refused ----------------------------------------------------------------------------------


def auto(rank: int, world_size: int) -> list[tuple[int, str]]:
    quiet()
    found = []
    for sizes in ((80, 40), (80, 80)):
        by_memory.memory_bytes = lambda device, sizes=sizes: sizes[rank] << 31  # two ranks share their host's
        case = Case(stage=3, steps=2, width=32, options=(("sharding.rank_weights", "auto"),))
        trainer: Any = trainer_of(case, world_size)
        trainer.fit(Net(case), loader(case, world_size))
        engine = trainer.strategy.require_engine()
        found.append((sum(f.master.numel() for f in engine.flats), engine.plan.describe()))
    return found


def test_weights_by_memory() -> None:
    (ours, equal), (its, _) = spawn(auto, 2, init_process_group=False, timeout_s=60)
    assert math.isclose(ours[0] / its[0], 2, rel_tol=0.05)
    assert "weights" not in equal[1]


@on_ranks(2)
def test_weights_that_do_not_fit_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    wrong = ([1.0, 2.0, 3.0], [2.0, 1.0] if rank else [1.0, 2.0])
    length, differ = [refused(weighted(Case(stage=2, steps=2), *mine), world_size) for mine in wrong]
    assert "with 3 weights, but there are 2 ranks" in length
    assert "the ranks were started with different options" in differ


def test_offload_config_and_weights_go_together() -> None:
    strategy = ZeROStrategy(
        stage=1, sharding={"rank_weights": [2, 1]}, offload={"optimizer": TierConfig(tier="cpu", ratio=0.5)}
    )
    assert strategy.config.sharding.rank_weights == (2, 1)
