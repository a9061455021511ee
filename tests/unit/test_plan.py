"""Buffers, tiers, bytes and traffic of a plan: integers over shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ls_strategy.config import OffloadConfig, PrecisionConfig, TierConfig, ZeROConfig
from ls_strategy.layout import ALIGN, TensorPart
from ls_strategy.plan import FROZEN, Plan
from ls_strategy.resolve import ParamFacts, resolve_plan
from ls_strategy.zero_stages import POLICIES

NUMEL = 1024


def fact(name: str, **options: Any) -> ParamFacts:
    options.setdefault("optimizer", 0)
    return ParamFacts(name, options.pop("shape", (NUMEL,)), options.pop("dtype", torch.float32), **options)


def plan_of(stage: Any = 3, *, ranks: int = 4, units: Any = None, **options: Any) -> Plan:
    units = units or [("root.0", True, [fact("embed")]), *((f"{n}", False, [fact(f"w{n}")]) for n in range(3))]
    groups = {k: options.pop(k) for k in ("offload", "precision") if k in options}
    dtypes = {"master_dtype": torch.float32, "compute_dtype": torch.float32, **options}
    return resolve_plan(
        units, policy=POLICIES[stage], world_size=ranks, config=ZeROConfig(stage=stage, **groups), **dtypes
    )


def test_parameters_are_split_by_optimizer_dtype_and_axis() -> None:
    half = TensorPart.cut((NUMEL,), 0, 0, 2)
    members = [
        fact("a"),
        fact("b", optimizer=1),
        fact("c", dtype=torch.bfloat16),
        fact("d", part=half, shape=half.shape),
        fact("e", optimizer=FROZEN),
        fact("f"),
    ]
    (unit,) = plan_of(units=[("0", False, members)], tensor_size=2).units
    assert [[slot.name for slot in flat.layout.slots] for flat in unit.flats] == [
        ["a", "f"],
        ["b"],
        ["c"],
        ["d"],
        ["e"],
    ]
    assert [flat.copies for flat in unit.flats] == [2, 2, 2, 1, 2]
    assert [flat.trainable for flat in unit.flats] == [True, True, True, True, False]


def test_groups_of_one_optimizer_are_adjacent() -> None:
    members = [fact("a"), fact("b", group=1), fact("c")]
    (unit,) = plan_of(units=[("0", False, members)]).units
    assert [slot.name for slot in unit.flats[0].layout.slots] == ["a", "c", "b"]


@pytest.mark.parametrize(("moments", "align"), [("int8", 256), ("fp32", ALIGN)])
def test_slots_of_8_bit_moments_do_not_share_a_block(moments: Any, align: int) -> None:
    members = [fact("a", shape=(3,)), fact("b", shape=(3,))]
    plan = plan_of(units=[("0", False, members)], precision=PrecisionConfig(moments=moments))
    assert plan.units[0].flats[0].layout.slots[1].offset == align


@pytest.mark.parametrize(("stage", "buffers"), [(0, 4 + 4), (1, 4 + 4), (2, 4 + 4), (3, 4 + 6)])
def test_traffic_of_one_micro_batch(stage: int, buffers: int) -> None:
    """All 4 buffers are reduced, and gathered; stage 3 gathers the first two blocks twice."""
    assert plan_of(stage).elements_sent() == buffers * NUMEL * 3 // 4


def test_gathers_of_two_micro_batches() -> None:
    assert plan_of(3).gathers_per_step(2) == [1, 4, 4, 2]
    assert plan_of(2).gathers_per_step(2) == [0, 0, 0, 0]


def test_a_ratio_keeps_the_first_buffers_on_the_device() -> None:
    plan = plan_of(1, offload=OffloadConfig(optimizer=TierConfig(tier="cpu", ratio=0.5)))
    tiers = [(f.optimizer_tier, f.gradient_tier, f.param_tier) for u in plan.units for f in u.flats]
    assert tiers == [("device", "device", "device")] * 2 + [("cpu", "cpu", "device")] * 2


def test_frozen_buffers_follow_the_parameters() -> None:
    units = [("0", False, [fact("a"), fact("b", optimizer=FROZEN)])]
    plan = plan_of(3, units=units, offload=OffloadConfig(optimizer="cpu"))
    assert [f.optimizer_tier for f in plan.units[0].flats] == ["cpu", "device"]


@pytest.mark.parametrize(
    ("offload", "compute", "own"),
    [
        (OffloadConfig(), torch.bfloat16, False),
        (OffloadConfig(optimizer="cpu"), torch.bfloat16, True),
        (OffloadConfig(optimizer="cpu", parameters="cpu"), torch.bfloat16, False),
        (OffloadConfig(optimizer="nvme", parameters="nvme"), torch.bfloat16, True),
        (OffloadConfig(optimizer="nvme", parameters="nvme"), torch.float32, False),
    ],
)
def test_a_shard_of_its_own_is_where_masters_are_not_fit_for_a_gather(
    offload: OffloadConfig, compute: torch.dtype, own: bool
) -> None:
    units = [("0", False, [fact("a", dtype=compute)])]
    plan = plan_of(3, units=units, offload=offload, compute_dtype=compute)
    assert plan.units[0].flats[0].has_own_shard(plan.policy) is own


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, {"parameters": 4, "masters": 0, "gradients": 4, "optimizer": 8}),
        (1, {"parameters": 4, "masters": 0, "gradients": 4 + 1, "optimizer": 2}),
        (2, {"parameters": 4, "masters": 0, "gradients": 1, "optimizer": 2}),
        (3, {"parameters": 0, "masters": 1, "gradients": 1, "optimizer": 2}),
    ],
)
def test_bytes_on_one_of_four_ranks(stage: int, expected: dict[str, int]) -> None:
    """In bytes per parameter of the model, fp32."""
    assert plan_of(stage).state_bytes() == {kind: n * 4 * NUMEL for kind, n in expected.items()}


def test_bytes_are_on_the_tiers_of_the_options() -> None:
    by_tier = plan_of(3, offload=OffloadConfig(optimizer="nvme", gradients="cpu")).bytes_by_tier()
    shard = 4 * NUMEL  # bytes of a quarter of 4 buffers in fp32
    assert by_tier["nvme"] == {"parameters": 0, "masters": shard, "gradients": 0, "optimizer": 2 * shard}
    assert by_tier["cpu"] == {"parameters": 0, "masters": 0, "gradients": shard, "optimizer": 0}
    assert by_tier["device"]["parameters"] == shard, "a shard of its own, to gather from"


def test_bytes_of_a_drive_per_step() -> None:
    plan = plan_of(1, offload=OffloadConfig(optimizer="nvme"))
    shard = 4 * NUMEL
    assert plan.drive_bytes_per_step(gradients_stored=True) == (4 * shard, 4 * shard)
    assert plan.drive_bytes_per_step(gradients_stored=False) == (4 * shard, 3 * shard), "masters are read once more"
    assert plan_of(1, offload=OffloadConfig(optimizer="cpu")).drive_bytes_per_step(gradients_stored=True) == (0, 0)


def test_an_update_of_masters_of_24_bits_also_reads_the_parameters_that_they_complete() -> None:
    units = [("0", False, [fact("a", dtype=torch.bfloat16)])]

    def moved(masters: Any) -> tuple[int, int]:
        offload, precision = OffloadConfig(optimizer="nvme", parameters="nvme"), PrecisionConfig(master_weights=masters)
        plan = plan_of(3, units=units, offload=offload, compute_dtype=torch.bfloat16, precision=precision)
        return plan.drive_bytes_per_step(gradients_stored=True)

    (read, written), (less_read, less_written) = moved(True), moved("24")
    assert (read - less_read, written - less_written) == ((4 - 1 - 2) * NUMEL // 4, (4 - 1) * NUMEL // 4)


def test_the_table_joins_equal_blocks() -> None:
    lines = plan_of(3).describe().splitlines()
    assert lines[0] == "4,096 parameters in 4 units over 4 ranks; sharded: optimizer, gradients, parameters"
    assert lines[1].split(maxsplit=1) == ["root.0", "1,024 parameters, gathered for the whole step"]
    assert lines[2].split(maxsplit=3) == ["0", "...", "2", "3 x 1,024 parameters"]
