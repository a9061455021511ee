"""A flat buffer and the parameters in it: gathered, released, hidden, and found by their addresses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import ResidentParameter, ShardedParameter, unnoticed, values_of
from ls_strategy.zero.flat.states import UpdateState
from ls_strategy.zero.flat.units import places_of
from tests.unit.flat_buffers import flat_of, sharded

BF16 = torch.bfloat16


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def gather(flat: FlatBuffer) -> None:
    flat.start_gather()
    flat.finish_gather()


def test_masters_come_from_the_values_before_they_are_rounded(layer: nn.Linear) -> None:
    before = layer.weight.detach().clone().flatten()
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    assert torch.equal(flat.master[: before.numel()], before)
    assert layer.weight.dtype == BF16


def test_in_fp32_masters_take_no_memory_of_their_own_and_values_are_kept(layer: nn.Linear) -> None:
    before = layer.weight.detach().clone()
    flat = flat_of(layer, "layer", 1)
    assert flat.master_is_slice
    assert torch.equal(layer.weight, before)


def test_a_released_parameter_keeps_its_shape_reads_nan_and_has_no_memory(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 3)
    assert not flat.is_gathered
    assert flat.full.untyped_storage().size() == 0
    with unnoticed():
        assert values_of(layer.weight).shape == (2, 3)
        assert bool(values_of(layer.weight).isnan().all())


def test_a_buffer_gathered_on_demand_reports_every_further_use_until_it_is_gathered(layer: nn.Linear) -> None:
    before = layer.weight.detach().clone()
    flat = flat_of(layer, "layer", 3)
    flat.start_gather()
    flat.finish_gather(on_demand=True)
    assert type(layer.weight) is ShardedParameter
    flat.finish_gather()
    assert type(layer.weight) is ResidentParameter
    assert torch.equal(layer.weight, before)


def test_after_training_a_released_parameter_is_an_error_with_the_cure(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 3)
    assert flat.on_demand is None
    with pytest.raises(StateError, match=r"'layer.weight' was read while its unit was not gathered.*inside the fit"):
        layer.weight.sum()


def test_a_buffer_that_was_updated_in_backward_is_not_gathered_again(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 3)
    flat.update = UpdateState.UPDATED_EARLY
    with pytest.raises(StateError, match=r"read again in the backward pass.*overlap_step=False"):
        flat.start_gather()


def test_written_masters_reach_the_parameters_with_a_refresh(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 2, dtype=BF16)
    flat.write_master(0, torch.full((6,), 3.0))
    flat.require_refresh()
    gather(flat)
    assert bool((layer.weight == 3).all())


def test_a_required_refresh_happens_once(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 2, dtype=BF16)
    flat.require_refresh()
    flat.refresh_if_due()
    flat.full.zero_()
    flat.refresh_if_due()
    assert not flat.full.any()


def test_exchanged_masters_are_swapped(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1)
    before, other = flat.master.clone(), torch.zeros_like(flat.master)
    flat.exchange_master(other)
    assert torch.equal(other, before)
    assert not flat.master.any()


def test_a_save_in_flight_is_released_before_masters_change(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1)
    seen: list[Tensor] = []

    class Save:
        def release(self) -> None:
            seen.append(flat.master.clone())

    before, flat.hold = flat.master.clone(), Save()
    flat.write_master(0, torch.zeros(2))
    assert torch.equal(seen[0], before)


def test_a_numpy_array_of_a_parameter_keeps_its_memory_and_shows_what_is_gathered_next(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 3)
    gather(flat)
    array = layer.weight.detach().numpy()
    before = array.copy()
    flat.release()
    assert (array == before).all()
    flat.write_master(0, torch.full((6,), 3.0))
    gather(flat)
    assert bool((layer.weight == 3).all())
    assert (array == 3).all()  # as on one device


def test_hidden_parameters_wait_until_they_are_gathered(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 2)
    flat.hide()
    assert type(layer.weight) is ShardedParameter
    flat.finish_gather()
    assert (type(layer.weight), flat.hidden) == (ResidentParameter, False)


@pytest.mark.parametrize("stage", [1, 3])
def test_entries_of_a_state_dict_are_found_by_address(stage: int) -> None:
    model = sharded(stage)  # type: ignore[arg-type]
    with unnoticed():
        state = {f"net.{key}": values_of(p) for key, p in model.net.named_parameters()}
        state["buffer"] = torch.zeros(3)
    places = places_of(state, model.units)
    assert {key: (flat.name, slot) for key, (flat, slot) in places.items()} == {
        f"net.{name}.{kind}": (f"{name}.weight", i)
        for name in ("first", "blocks.0", "blocks.1", "blocks.2")
        for i, kind in enumerate(("weight", "bias"))
    }


def test_operations_that_have_failed_are_not_waited_for(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 2)
    flat.start_gather()
    flat.update, flat.publish_due = UpdateState.UPDATED_EARLY, True
    flat.give_up()
    assert not flat.is_arriving
    assert flat.update is UpdateState.NONE
