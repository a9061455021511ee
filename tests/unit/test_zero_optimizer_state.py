"""Optimizer states by parameter: full, by name, and from an earlier engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy._torch import OptimizerHooks
from ls_strategy.errors import StateError
from ls_strategy.layout import Piece
from ls_strategy.zero.step.optimizer_state import OptimizerStates
from tests.unit.one_rank import ShelfTier, adamw, engine_on, network, steps


def plain(count: int = 2) -> dict[str, Any]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number in range(count):
        model(torch.randn(4, 24, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state_dict()


def trained(offload: str | None = "cpu", count: int = 2) -> tuple[OptimizerStates, nn.Module]:
    model = network()
    engine = engine_on(model, [adamw(model.parameters())], stage=3, offload=offload)
    if count:
        steps(engine, count)
    return engine.optimizers[0].sharded.states, model


def near(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor):
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-8)
    return found == expected


@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
def test_the_full_state_is_the_plain_optimizers(offload: str | None, shelves: list[ShelfTier]) -> None:
    states, _model = trained(offload)
    expected, found = plain(), states.full_state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert found["state"][index].keys() == state.keys()
        assert all(near(found["state"][index][k], v) for k, v in state.items()), index
    assert [g["params"] for g in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]


def test_a_plain_optimizer_loads_the_full_state() -> None:
    states, _model = trained()
    optimizer = adamw(network().parameters())
    optimizer.load_state_dict(states.full_state_dict())
    assert {s["step"].item() for s in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
def test_a_full_state_that_is_loaded_is_given_again(offload: str | None, shelves: list[ShelfTier]) -> None:
    states, _model = trained(offload, count=0)
    expected = plain()
    expected["param_groups"][0]["lr"] = 0.125
    states.load_full_state_dict(expected)
    found = states.full_state_dict()
    assert all(torch.equal(found["state"][i][k], v) for i, s in expected["state"].items() for k, v in s.items())
    assert found["param_groups"][0]["lr"] == 0.125


def test_a_state_is_kept_where_it_is_stepped() -> None:
    """A rank whose shard has nothing of a parameter would save it outdated, after the next step."""
    states, _model = trained(count=0)
    flat = states.flats[0]
    flat.pieces, flat.owned = (Piece(0, 0, 0), *flat.pieces[1:]), (flat.layout.slots[1].offset, flat.owned[1])
    states.load_full_state_dict(plain())
    assert states.entries.keys() == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_moments_that_a_loaded_state_does_not_have_begin_with_zeros(offload: str, shelves: list[ShelfTier]) -> None:
    states, _model = trained(offload)
    flat, store = states.flats[0], states.store[0]
    piece = flat.pieces[0]
    assert store.read("exp_avg", torch.float32)[piece.start : piece.stop].any()
    loaded = plain()
    del loaded["state"][0]
    states.load_full_state_dict(loaded)
    values = store.read("exp_avg", torch.float32)
    assert not values[piece.start : piece.stop].any()
    assert values[flat.pieces[1].start : flat.pieces[1].stop].any()


def test_a_state_with_other_groups_is_refused() -> None:
    states, _model = trained()
    state = plain()
    state["param_groups"][0]["params"].pop()
    with pytest.raises(StateError, match=r"groups of sizes \[5\], but this run's AdamW has 1 of sizes \[6\]"):
        states.load_full_state_dict(state)


def test_states_by_name_are_ranges_of_the_full_ones() -> None:
    states, model = trained()
    full = states.full_state_dict()["state"]
    named = states.named_state(lambda flat, i, read, dtype: read(flat.pieces[i].start, flat.pieces[i].stop))
    assert list(named["param_groups"][0]["params"]) == [n for n, _ in model.named_parameters()]
    for index, (name, _) in enumerate(model.named_parameters()):
        assert torch.equal(named["state"][name]["exp_avg"], full[index]["exp_avg"].flatten())
        assert named["state"][name]["step"].item() == 2.0


@pytest.mark.parametrize("same", [True, False])
def test_settings_are_loaded_where_the_groups_have_the_same_members(same: bool) -> None:
    states, model = trained()
    by_index = plain()["state"]
    names = [n for n, _ in model.named_parameters()]
    groups = [{"params": names if same else names[:-1], "lr": 0.5}]
    assert states.load_named_state({n: by_index[i] for i, n in enumerate(names)}, groups) is same
    assert states.full_state_dict()["param_groups"][0]["lr"] == (0.5 if same else 1e-2)


def test_a_later_engine_has_the_states_of_the_earlier_one() -> None:
    states, model = trained()
    before = states.full_state_dict()
    optimizer = states._optimizer
    later = engine_on(model, [optimizer], stage=1, offload="cpu").optimizers[0].sharded.states
    found = later.full_state_dict()
    assert all(torch.equal(found["state"][i][k], v) for i, s in before["state"].items() for k, v in s.items())


def test_hooks_of_saving_and_loading_run_in_the_order_of_torch() -> None:
    optimizer, calls = adamw(network().parameters()), []
    for number in range(3):
        for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            register = getattr(optimizer, f"register_{kind}_hook")
            register(lambda *_, call=(kind, number): calls.append(call))
    optimizer.load_state_dict(optimizer.state_dict())
    expected = list(calls)
    calls.clear()
    hooks = OptimizerHooks(optimizer)
    hooks.around_load(hooks.around_save({"state": {}, "param_groups": []}), lambda _: None)
    assert calls == expected
    assert len(calls) == 12
