"""The gatherer: which units are gathered, prefetched and released, and in which order."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import ResidentParameter, ShardedParameter
from ls_strategy.zero.flat.states import UpdateState
from tests.unit.flat_buffers import Sharded, sharded

BF16 = torch.bfloat16


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the units in the order in which their gathers start."""
    names: list[str] = []
    plain = FlatBuffer.start_gather

    def noted(self: FlatBuffer) -> None:
        names.append(self.name.removesuffix(".weight"))
        plain(self)

    monkeypatch.setattr(FlatBuffer, "start_gather", noted)
    return names


def gathered(model: Sharded) -> list[str]:
    return [unit.name for unit in model.units if unit.flats[0].is_gathered]


@pytest.mark.parametrize(("prefetch_units", "expected"), [(0, 1), (1, 2), (2, 3)])
def test_a_fetch_starts_the_next_units(started: list[str], prefetch_units: int, expected: int) -> None:
    model = sharded(3, blocks=4, prefetch_units=prefetch_units)
    model.gatherer.fetch(model.units[1])
    assert started == [f"blocks.{i}" for i in range(expected)]


@pytest.mark.parametrize("updated", [False, True])
def test_a_fetch_in_backward_starts_the_units_before_that_are_not_updated(started: list[str], updated: bool) -> None:
    model = sharded(3, blocks=4)
    if updated:
        model.flats[2].update = UpdateState.UPDATED_EARLY
    model.gatherer.fetch(model.units[3], backward=True)
    assert started == ["blocks.2", "blocks.1"][: 1 if updated else 2]


def test_only_the_fetched_unit_is_waited_for_and_gathered_once(started: list[str]) -> None:
    model = sharded(3)
    for _ in range(2):
        model.gatherer.fetch(model.units[1])
        assert gathered(model) == ["blocks.0"]
    assert started == ["blocks.0", "blocks.1"]


def test_the_order_of_the_last_forward_is_prefetched(started: list[str]) -> None:
    model = sharded(3)
    for i in (1, 3, 2):
        model.gatherer.fetch(model.units[i])
    model.gatherer.end_forward()
    model.gatherer.release_all()
    started.clear()
    model.gatherer.fetch(model.units[1])
    assert started == ["blocks.0", "blocks.2"]


def test_a_forward_of_some_units_changes_no_order() -> None:
    model = sharded(3)
    model.gatherer.fetch(model.units[3])
    model.gatherer.end_forward()
    assert model.gatherer.is_last(model.units[3])
    assert [unit.name for unit in model.gatherer.forward_order()] == ["first", "blocks.0", "blocks.1", "blocks.2"]


def test_the_root_unit_is_gathered_with_the_first_block_in_flight(started: list[str]) -> None:
    model = sharded(3)
    model.gatherer.fetch_root()
    assert started == ["first", "blocks.0"]
    assert gathered(model) == ["first"]


def test_a_pinned_unit_is_released_with_all_others_only() -> None:
    model = sharded(3)
    model.gatherer.fetch(model.units[1])
    model.units[1].pin()
    model.gatherer.release(model.units[1])
    assert gathered(model) == ["blocks.0"]
    model.gatherer.release_all()
    assert gathered(model) == []


@pytest.mark.parametrize(("stepped", "expected"), [(False, 2.0), (True, 1.0)])
def test_writes_count_unless_the_masters_are_newer(stepped: bool, expected: float) -> None:
    model = sharded(3)
    flat = model.flats[1]
    model.gatherer.fetch(model.units[1])
    with torch.no_grad():
        model.net.blocks[0].weight.fill_(2.0)  # type: ignore[union-attr,operator]
    if stepped:
        flat.master.fill_(1.0)
    model.gatherer.release(model.units[1], stepped=stepped)
    assert flat.master[0] == expected


def test_published_weights_hide_the_old_ones_until_they_are_used() -> None:
    model = sharded(2, dtype=BF16)
    flat = model.flats[1]
    flat.write_master(0, torch.full((9,), 3.0))
    model.gatherer.publish([flat])
    weight = model.net.blocks[0].weight
    assert type(weight) is ShardedParameter
    model.gatherer.fetch(model.units[1])
    assert type(weight) is ResidentParameter
    assert bool((weight == 3).all())  # type: ignore[operator]


def test_published_weights_are_waited_for_where_data_is_kept() -> None:
    model = sharded(2, dtype=BF16)
    kept = model.net.blocks[0].weight.data
    model.flats[1].write_master(0, torch.full((9,), 3.0))
    model.gatherer.publish(model.flats)
    assert bool((kept == 3).all())  # type: ignore[operator]


@pytest.mark.parametrize("all_at_once", [False, True])
def test_lazily_published_weights_are_sent_when_a_unit_runs(started: list[str], all_at_once: bool) -> None:
    model = sharded(2, dtype=BF16)
    model.gatherer.publish(model.flats, lazily=True)
    assert started == []
    if all_at_once:
        model.gatherer.finish_all()
        assert not any(flat.publish_due or flat.hidden or flat.is_arriving for flat in model.flats)
    else:
        model.gatherer.fetch(model.units[1])
        assert started == ["blocks.0", "blocks.1"]


def test_hooks_after_a_step_at_stage_3_find_released_parameters() -> None:
    model = sharded(3)
    model.gatherer.fetch(model.units[1])
    model.gatherer.outdate([model.flats[1]])
    assert gathered(model) == []


def test_hooks_after_a_step_of_one_rank_at_stage_0_find_the_new_parameters() -> None:
    model = sharded(0)
    model.gatherer.outdate(model.flats)
    assert not any(flat.publish_due or flat.hidden for flat in model.flats)
