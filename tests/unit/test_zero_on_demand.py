"""Gathering on demand: which buffers stay, who may use parameters, and what autograd saves of them."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import StateError
from ls_strategy.zero.user_code.on_demand import KEPT
from tests.unit.flat_buffers import Sharded, sharded


@pytest.fixture
def model() -> Sharded:
    return sharded(3, blocks=4)


def gathered(model: Sharded) -> list[str]:
    return [unit.name for unit in model.units if unit.flats[0].is_gathered]


def weight(model: Sharded, block: int) -> Tensor:
    return model.net.blocks[block].weight  # type: ignore[return-value]


@pytest.mark.parametrize(("used", "stay"), [((0, 1, 2, 3), (2, 3)), ((0, 1, 0, 2), (0, 2))])
def test_only_the_buffers_that_were_used_last_stay_gathered(
    model: Sharded, used: tuple[int, ...], stay: tuple[int, ...]
) -> None:
    for block in used:
        weight(model, block).sum()
    assert gathered(model) == [f"blocks.{block}" for block in stay]
    assert len(gathered(model)) == KEPT


def test_one_operation_may_use_more_buffers_than_stay(model: Sharded) -> None:
    total = torch.stack([weight(model, block) for block in range(4)]).sum()
    expected = sum(flat.master[:9].sum() for flat in model.flats[1:])
    assert torch.allclose(total, torch.as_tensor(expected))
    assert len(gathered(model)) == KEPT


def test_idle_buffers_are_released_and_if_nothing_views_them_freed(model: Sharded) -> None:
    weight(model, 0).sum()
    model.on_demand.release_idle()
    assert gathered(model) == []
    assert model.flats[1].full.untyped_storage().size() == 0


def test_a_buffer_that_its_module_has_gathered_since_stays(model: Sharded) -> None:
    weight(model, 0).sum()
    model.gatherer.fetch(model.units[1])
    model.on_demand.release_idle()
    assert "blocks.0" in gathered(model)


def test_another_thread_is_refused_while_one_trains(model: Sharded) -> None:
    model.on_demand.thread = threading.get_ident()
    errors: list[Exception] = []

    def use() -> None:
        try:
            weight(model, 0).sum()
        except StateError as error:
            errors.append(error)

    thread = threading.Thread(target=use, name="logger")
    thread.start()
    thread.join()
    assert "used by the thread 'logger' while another thread trains" in str(errors[0])
    assert gathered(model) == []


def test_what_autograd_saves_is_gathered_again_in_backward(model: Sharded) -> None:
    x = torch.ones(3, requires_grad=True)
    y = (weight(model, 0) @ x).sum()
    model.on_demand.release_idle()
    assert gathered(model) == []
    y.backward()
    expected = model.flats[1].master[:9].view(3, 3).sum(0)
    assert torch.allclose(x.grad, expected)  # type: ignore[arg-type]


def test_all_gathered_keeps_every_buffer(model: Sharded) -> None:
    with model.on_demand.all_gathered(model.flats, model.comm, modify=False):
        for block in range(4):
            weight(model, block).sum()
        assert len(gathered(model)) == 5
    assert gathered(model) == []


def test_writes_inside_all_gathered_count_with_modify(model: Sharded) -> None:
    with model.on_demand.all_gathered(model.flats, model.comm, modify=True), torch.no_grad():
        weight(model, 0).fill_(2.0)
    assert bool((model.flats[1].master[:9] == 2).all())


def test_writes_inside_all_gathered_are_an_error_without_modify(model: Sharded) -> None:
    with (
        pytest.raises(StateError, match=r"opened for reading. Open it with modify=True"),
        model.on_demand.all_gathered(model.flats, model.comm, modify=False),
        torch.no_grad(),
    ):
        weight(model, 0).fill_(2.0)


def test_a_state_dict_that_hooks_collect_gathers_nothing(model: Sharded) -> None:
    model.on_demand.collects(sys._getframe())
    model.net.state_dict()
    assert gathered(model) == []


def test_a_state_dict_of_user_code_gathers(model: Sharded) -> None:
    model.on_demand.collects(sys._getframe())
    model.on_demand.collects(None)
    model.net.state_dict()
    assert gathered(model) == ["blocks.2", "blocks.3"]


def test_a_collection_that_ended_with_an_exception_is_over(model: Sharded) -> None:
    def collect() -> None:
        model.on_demand.collects(sys._getframe())
        raise KeyError

    with pytest.raises(KeyError):
        collect()
    assert not model.on_demand.is_collecting()


def test_without_sharding_a_use_waits_for_new_values() -> None:
    model = sharded(2, dtype=torch.bfloat16)
    flat = model.flats[1]
    flat.write_master(0, torch.full((9,), 3.0))
    flat.require_refresh()
    flat.publish_due = True
    flat.hide()
    assert bool((weight(model, 0) == 3).all())
    assert not flat.hidden
