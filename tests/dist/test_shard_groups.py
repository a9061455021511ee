"""States sharded inside groups of ranks and replicated over them: the bits of one group, fewer bytes between nodes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from ls_strategy.extras.planner.traffic import traffic
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks
from tests.marks import few_or_all
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

NORM: dict[str, Any] = {"clip": "norm", "clip_at": 0.05}
VALUE: dict[str, Any] = {"clip": "value", "clip_at": 0.01}
BOTH = (("offload.optimizer", "cpu"), ("offload.parameters", "cpu"))
NVME = (("offload.optimizer", "nvme"), ("offload.nvme_allow_ram", True))

FIRST = [
    Case(stage=3, steps=4, traits=("uneven", "frozen", "tied"), accumulate=2, **NORM),
    Case(stage=2, steps=4, precision="bf16-mixed", **NORM),
]
WIDE = [
    Case(stage=stage, steps=4, traits=("uneven", "frozen", "tied"), accumulate=2, precision=precision, **NORM)
    for stage in (0, 1, 2, 3)
    for precision in ("32-true", "bf16-mixed", "bf16-true")
]
WIDE += [Case(stage=stage, steps=4, options=(("precision.moments", m),)) for stage, m in ((1, "int8"), (3, "bf16"))]
MORE = [
    Case(stage=stage, steps=5, precision=precision, optimizer=optimizer, traits=traits, accumulate=accumulate, **clip)
    for stage in (0, 1, 2, 3)
    for precision in ("32-true", "bf16-true", "16-mixed")
    for optimizer, traits, accumulate, clip in (
        ("adamw", ("unused_here", "empty"), 3, VALUE),
        ("two", ("uneven", "tied"), 2, {}),
        ("sgd", ("buffers", "private"), 1, NORM),
    )
] + [
    Case(stage=stage, steps=5, options=options, accumulate=accumulate, precision=precision, traits=("private",), **clip)
    for stage, options in (
        (1, BOTH[:1]),
        (2, BOTH[:1]),
        (3, BOTH),
        (1, NVME),
        (3, (*NVME, ("offload.parameters", "nvme"))),
    )
    for accumulate, clip, precision in ((1, NORM, "32-true"), (3, {}, "bf16-mixed"))
]


def grouped(case: Case, size: int) -> Case:
    return replace(case, options=(*case.options, ("sharding.shard_size", size)))


def compare(world_size: int, cases: list[Case], sizes: tuple[int, ...], folder: Path | None = None) -> None:
    assert_same_bits(world_size, [(case, *(grouped(case, size) for size in sizes)) for case in cases], folder)


@pytest.mark.parametrize("cases", few_or_all(FIRST[:1], FIRST))
def test_the_bits_are_those_of_one_group(cases: list[Case]) -> None:
    compare(4, cases, (2,))


@pytest.mark.wide
def test_the_bits_at_all_stages() -> None:
    compare(4, WIDE, (2,))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "sizes"), [(2, (1,)), (3, (1,)), (4, (1, 2)), (6, (2, 3))])
def test_every_case_has_the_bits_of_one_group(world_size: int, sizes: tuple[int, ...], tmp_path: Path) -> None:
    compare(world_size, WIDE + MORE if world_size < 6 else WIDE, sizes, tmp_path)  # six ranks take minutes to start


# --- bytes -----------------------------------------------------------------------------------------------------------


def on_nodes(rank: int, per_node: int) -> None:
    """Let this process be a rank of a node with ``per_node`` ranks, as torchrun would start it."""
    os.environ.update(LOCAL_RANK=str(rank % per_node), LOCAL_WORLD_SIZE=str(per_node), GROUP_RANK=str(rank // per_node))


def measure(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Of every case: what is sent in a step, also between nodes of two ranks, and what the plan says."""
    quiet()
    on_nodes(rank, 2)
    found: list[dict[str, Any]] = []

    class Counts(pl.Callback):
        """What the meter has after every step."""

        def __init__(self) -> None:
            self.after: list[dict[str, dict[str, int]]] = []

        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            meter = trainer.strategy.traffic  # type: ignore[attr-defined]
            self.after.append(
                {
                    name: {k: v for k, v in getattr(meter, name).items() if k != "control"}
                    for name in ("elements", "bytes", "bytes_between_nodes")
                }
            )

    for case in cases:
        counts = Counts()
        trainer: Any = trainer_of(case, 2, num_nodes=2, callbacks=[counts])
        trainer.fit(Net(case), loader(case, world_size))
        plan = trainer.strategy.require_engine().plan
        last = {
            name: {k: sent for k, v in each.items() if (sent := v - counts.after[-2][name].get(k, 0))}
            for name, each in counts.after[-1].items()
        }
        sizes = [sum(f.layout.numel for f in u.flats) for u in plan.units]
        gathers = plan.gathers_per_step()
        found.append(
            {
                **last,
                "planned": plan.elements_sent(),
                "numel": sum(sizes),
                "again": sum(size * (n - 1) for size, n in zip(sizes, gathers, strict=True)),
                "last": next(s for s, u in zip(reversed(sizes), reversed(plan.units), strict=True) if not u.is_root),
                "world_size": plan.world_size,
                "traffic": traffic(plan, (8.0,), node_size=2),
                "copy_bytes": plan.bytes_by_tier()["device"]["parameters"],
            }
        )
    return found


@pytest.mark.wide
@pytest.mark.parametrize("of", few_or_all(((2, "bf16-true"),), ((2, "bf16-true"), (3, "32-true"))))
def test_bytes_between_nodes_equal_the_formula(of: tuple[tuple[int, str], ...]) -> None:
    """Two nodes of two ranks. Without groups, stage 2 sends ``P`` elements in the compute dtype for gradients and ``P``
    for parameters, half of them to the other node per rank; in groups by node, only sums of gradients cross: fp32, one
    shard per rank of the first node, and one total back."""
    cases = [Case(stage=stage, steps=3, width=32, precision=precision) for stage, precision in of]
    runs = [each for case in cases for each in (case, replace(case, options=(("sharding.shard_size", "node"),)))]
    for found in spawn(measure, 4, runs, init_process_group=False, timeout_s=120):
        for i, case in enumerate(cases):
            flat, groups = found[2 * i], found[2 * i + 1]
            itemsize = 4 if case.precision == "32-true" else 2
            p = flat["numel"]
            assert groups["numel"] == p
            assert (flat["world_size"], groups["world_size"]) == (4, 2)
            for each in (flat, groups):
                assert sum(each["elements"].values()) == each["planned"]
                assert sum(each["bytes"].values()) == each["traffic"].sent
                assert sum(each["bytes_between_nodes"].values()) == each["traffic"].between_nodes
            assert flat["bytes"]["reduce_scatter"] == 3 * p // 4 * itemsize
            assert flat["bytes_between_nodes"]["reduce_scatter"] == p // 2 * itemsize
            gathered = flat["bytes"]["all_gather"]
            assert flat["bytes_between_nodes"]["all_gather"] == gathered * 2 // 3
            assert groups["bytes_between_nodes"] == {"all_reduce": p // 2 * 4}
            assert groups["bytes"]["reduce_scatter"] == p // 2 * itemsize
            assert groups["bytes"]["all_gather"] == gathered * 2 // 3


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.wide
@on_ranks(4, timeout_s=170)
def test_checkpoints_do_not_know_the_groups(rank: int, world_size: int, tmp_path: Path) -> None:
    """A run of 6 steps against 3 steps saved in groups of one size and 3 more in groups of another."""
    found: dict[str, bool] = {}
    for stage, form in ((1, "file"), (3, "sharded")):
        case = Case(stage=stage, steps=6, options=(("checkpoint.format", form),))
        changes = {
            "two, then all": (grouped(case, 2), case),
            "all, then two": (case, grouped(case, 2)),
            "two, then one": (grouped(case, 2), grouped(case, 1)),
        }
        found |= changed_in_between(rank, world_size, tmp_path, case, changes)
    assert len(found) == 6
    assert all(found.values()), found


# --- refused ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_sizes_that_do_not_divide_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    wrong = ({"sharding.shard_size": 3}, {"sharding.shard_size": 2, "parallel.tensor": 2})
    odd, with_tensor = [
        refused(Case(stage=2, steps=2, options=tuple(options.items())), world_size) for options in wrong
    ]
    assert "shard_size=3, but it must divide the 2 ranks" in odd
    assert "shard_size=2, but it must divide the 1 ranks" in with_tensor
