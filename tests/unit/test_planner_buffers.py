"""The simulated pool, ledger and flat buffers, event by event."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ls_strategy.extras.planner.buffers import (
    Setting,
    SimulatedFlat,
    SimulatedLedger,
    SimulatedPool,
    SimulatedReducer,
    SimulatedUnit,
)
from ls_strategy.zero_stages import POLICIES


def test_the_peak_names_what_was_there_then() -> None:
    ledger = SimulatedLedger()
    ledger.add("parameters", 10)
    ledger.add("gradients", 5)
    ledger.add("gradients", -5)
    ledger.add("optimizer", 3)
    assert ledger.peak == 15
    assert ledger.at_peak == {"parameters": 10, "gradients": 5, "activations": 0}


def test_offloaded_activations_do_not_count() -> None:
    ledger = SimulatedLedger()
    ledger.relief = 6
    ledger.add("activations", 10)
    assert (ledger.peak, ledger.at_peak["activations"]) == (4, 4)


def test_a_returned_buffer_is_used_again_by_the_same_size_only() -> None:
    ledger = SimulatedLedger()
    pool = SimulatedPool(ledger)
    pool.give([pool.take(8, 4)])
    pool.take(8, 4)
    assert ledger.total == 32
    pool.take(8, 2)
    assert ledger.total == 48


def flat(ledger: SimulatedLedger, numel: int = 8, world: int = 2, **plan: Any) -> Any:
    layout = SimpleNamespace(
        world_size=world, numel=numel, shard=numel // world, slots=[SimpleNamespace(name="w", numel=numel)]
    )
    names = ("quantized", "wire_format", "reduced_as", "gathered_as", "cast_to")
    given = {"dtype": torch.bfloat16, "trainable": True, "gradient_tier": "device", **dict.fromkeys(names), **plan}
    given["gradient_dtype"] = given["dtype"]
    return SimulatedFlat(SimpleNamespace(layout=layout, replicated=False, **given), ledger, reads_ahead=False)  # type: ignore[arg-type]


def test_a_gathered_buffer_is_held_until_it_is_released() -> None:
    ledger = SimulatedLedger()
    one = flat(ledger)
    one.start_gather()
    one.finish_gather()
    assert (ledger.now["parameters"], one.is_fetched) == (16, True)
    one.release()
    assert (ledger.now["parameters"], one.is_fetched) == (0, False)


def reducer(stage: Any, ledger: SimulatedLedger, world: int = 2, **setting: Any) -> tuple[Any, Any, Any]:
    one = flat(ledger, world=world)
    unit = SimulatedUnit([one], is_root=False)
    plan: Any = SimpleNamespace(policy=POLICIES[stage], world_size=world, group=(0, 1))
    made = SimulatedReducer([unit], plan, Setting(optimizer_bytes=(8,), **setting), ledger, {"w"})
    return made, unit, one


def backward(made: Any, unit: Any, one: Any, *, eager: bool = True) -> None:
    made.begin_backward(eager=eager)
    made.on_grad(unit, one, "w", 8)
    made.end_backward()
    made.finish_in_flight()


def test_stage_2_takes_one_gradient_buffer_and_a_shard_from_each_other_rank() -> None:
    ledger = SimulatedLedger()
    made, unit, one = reducer(2, ledger, early_step=False)
    backward(made, unit, one)
    assert ledger.now["communication"] == 8 * 2 + 4 * 2  # 8 bf16 gradients, and a shard of 4 from the other rank
    backward(made, unit, one)
    assert ledger.now["communication"] == 24, "the pool's buffers are used again"


def test_stage_1_widens_gradients_to_fp32_from_the_second_micro_batch_on() -> None:
    ledger = SimulatedLedger()
    made, unit, one = reducer(1, ledger)
    backward(made, unit, one, eager=False)
    assert (one.wide, ledger.now["gradients"]) == (False, 0)
    backward(made, unit, one)
    assert (one.wide, ledger.now["gradients"]) == (True, 8 * (4 - 2))


def test_one_rank_of_stage_0_sends_nothing() -> None:
    ledger = SimulatedLedger()
    backward(*reducer(0, ledger, world=1))
    assert ledger.total == 0


def test_nccl_reduces_in_fp32_through_a_buffer_of_its_own() -> None:
    ledger = SimulatedLedger()
    made, unit, one = reducer(2, ledger, native=True, early_step=False)
    backward(made, unit, one)
    assert ledger.at_peak["communication"] == 8 * 2 + 8 * 4 + 4 * 4  # gradients, their fp32 copy, this rank's shard
    assert ledger.now["communication"] == 8 * 2 + 4 * 4
