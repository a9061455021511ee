"""Full state dicts out of flat buffers and back, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.checkpoint.full import full_state_dict, load_full_state_dict, masters_from_state_dict
from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.engine import Engine
from ls_strategy.errors import StateError
from ls_strategy.precision import resolve_precision


class Net(nn.Module):
    """A tied weight, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("seen", torch.tensor(5.0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def before(model: Net) -> dict[str, Tensor]:
    """The weights before the engine takes them."""
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def engine(model: Net, before: dict[str, Tensor]) -> Engine:
    return Engine(
        model,
        [torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)],
        config=ZeROConfig(),
        precision=resolve_precision("bf16-true"),
        mesh=Mesh.data_only(Comm(None, None)),
        device=torch.device("cpu"),
    )


def collected(engine: Engine, **options: Any) -> dict[str, Any]:
    return full_state_dict(engine.model.state_dict(), engine.units, engine.mesh, **options)


def same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether these are the values; a frozen parameter has no master weights."""
    expected = {**expected, "frozen": expected["frozen"].bfloat16()}
    return all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in expected.items())


def test_the_values_are_those_of_the_model(engine: Engine, before: dict[str, Tensor]) -> None:
    assert same(collected(engine), before)


def test_trained_weights_have_the_full_precision(engine: Engine) -> None:
    assert collected(engine)["first.weight"].dtype == torch.float32


def test_without_masters_the_forwards_dtype_is_saved(engine: Engine, before: dict[str, Tensor]) -> None:
    state = collected(engine, master=False)
    assert torch.equal(state["first.weight"], before["first.weight"].to(torch.bfloat16))


def test_keys_are_those_of_the_module(engine: Engine, before: dict[str, Tensor]) -> None:
    assert list(collected(engine)) == list(before)


def test_tied_weights_stay_one_tensor(engine: Engine) -> None:
    state = collected(engine)
    assert state["first.weight"] is state["last.weight"]


def test_the_copy_does_not_follow_the_weights(engine: Engine, before: dict[str, Tensor]) -> None:
    state = collected(engine)
    load_full_state_dict(engine.model, {**before, "first.bias": torch.ones(4)}, engine.units)
    assert torch.equal(state["first.bias"], before["first.bias"])


def test_loaded_weights_come_back(engine: Engine, before: dict[str, Tensor]) -> None:
    other = {name: torch.randn_like(value) for name, value in before.items()}
    other["last.weight"] = other["first.weight"]
    load_full_state_dict(engine.model, other, engine.units)
    assert same(collected(engine), other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first.bias": None}, "missing keys: first.bias"),
        ({"surplus": torch.ones(1)}, "unexpected keys: surplus"),
        ({"first.bias": torch.ones(9)}, r"first.bias has shape \(9,\), the model has \(4,\)"),
        ({"scratch": torch.ones(1)}, "unexpected keys: scratch"),
    ],
    ids=["missing", "unexpected", "shape", "a buffer that is not saved"],
)
def test_a_state_that_does_not_fit_is_refused(
    engine: Engine, before: dict[str, Tensor], change: dict[str, Tensor | None], message: str
) -> None:
    state = {name: value for name, value in {**before, **change}.items() if value is not None}
    with pytest.raises(StateError, match=message):
        load_full_state_dict(engine.model, state, engine.units)


def test_nothing_is_changed_by_a_state_that_does_not_fit(engine: Engine, before: dict[str, Tensor]) -> None:
    changed = {**before, "first.weight": torch.zeros(4, 3), "first.bias": torch.ones(9)}
    with pytest.raises(StateError):
        load_full_state_dict(engine.model, changed, engine.units)
    assert torch.equal(collected(engine)["first.weight"], before["first.weight"])


@pytest.mark.parametrize("options", [{"strict": False}, {"may_lack": ["first.bias"]}])
def test_missing_keys_can_be_allowed(engine: Engine, before: dict[str, Tensor], options: dict[str, Any]) -> None:
    del before["first.bias"]
    load_full_state_dict(engine.model, before, engine.units, **options)


def test_a_wrong_shape_is_refused_without_strict(engine: Engine, before: dict[str, Tensor]) -> None:
    before["first.bias"] = torch.ones(9)
    with pytest.raises(StateError, match="shape"):
        load_full_state_dict(engine.model, before, engine.units, strict=False)


def test_masters_from_full_tensors(engine: Engine, before: dict[str, Tensor]) -> None:
    flats = [flat for unit in engine.units for flat in unit.trainable_flats]
    masters = [torch.zeros_like(flat.master) for flat in flats]
    masters_from_state_dict(engine.model, before, flats, masters)
    for flat, master in zip(flats, masters, strict=True):
        for piece in flat.pieces:
            assert torch.equal(master[piece.start : piece.stop], flat.master[piece.start : piece.stop])
