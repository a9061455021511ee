"""User code's writes to parameters: which elements of the masters change, and which writes are errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.states import UpdateState
from ls_strategy.zero.flat.writes import bits, take_elements
from tests.unit.flat_buffers import Sharded, flat_of, sharded

BF16 = torch.bfloat16


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def master_of(flat: FlatBuffer, index: int) -> Tensor:
    slot = flat.layout.slots[index]
    return flat.master[slot.offset : slot.end].view(slot.shape)


@pytest.mark.parametrize("way", ["", "in place", "data"])
def test_written_elements_reach_the_masters_and_others_keep_theirs(layer: nn.Linear, way: str) -> None:
    """Also where versions do not count the write, as through ``data``."""
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    before = flat.master.clone()
    if way:
        (layer.weight.data if way == "data" else layer.weight.detach())[0, 0] = 7.0
    assert flat.writes.take() == bool(way)
    assert flat.writes.detected == (way == "in place")
    assert (flat.master != before).nonzero().flatten().tolist() == [0] * bool(way)
    assert not way or flat.master[0] == 7.0


def test_data_set_to_another_tensor_is_copied_into_the_slot_and_the_tensor_before_keeps_its_values(
    layer: nn.Linear,
) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    old = layer.weight.data
    before = old.clone()
    layer.weight.data = torch.ones(2, 3, dtype=BF16)
    flat.writes.take()
    assert bool((master_of(flat, 0) == 1).all())
    assert layer.weight.data_ptr() == flat.views[0].data_ptr()
    assert torch.equal(old, before)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.ones(3, 2, dtype=BF16), r"layer\.weight\.data was set to .*shape \(3, 2\).*it stays .*\(2, 3\)"),
        (torch.ones(2, 3), r"set to a torch.float32 tensor.*stays torch.bfloat16"),
    ],
    ids=["shape", "dtype"],
)
def test_data_of_another_shape_or_dtype_is_an_error(layer: nn.Linear, data: Tensor, words: str) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    layer.weight.data = data
    with pytest.raises(StateError, match=words):
        flat.writes.take()


def test_a_write_after_an_early_update_is_an_error(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    flat.update = UpdateState.UPDATED_EARLY
    with torch.no_grad():
        layer.bias.zero_()
    with pytest.raises(StateError, match=r"buffer of 'layer.weight' was written to after its update had begun"):
        flat.writes.take()


def test_a_view_that_is_kept_can_be_written_to_again(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    view = layer.bias.data
    for value in (2.0, 3.0):
        view.fill_(value)
        flat.writes.take()
        assert master_of(flat, 1).tolist() == [value, value]


def test_a_nan_is_no_difference(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1)
    values = torch.tensor([float("nan"), 1.0])
    assert not take_elements(flat, 0, values, values.clone())


def test_the_sign_of_zero_is_a_difference() -> None:
    assert not torch.equal(bits(torch.tensor([0.0])), bits(torch.tensor([-0.0])))


# --- views of released buffers, stage 3 -------------------------------------------------------------------------------


def viewed() -> tuple[Sharded, FlatBuffer, Tensor]:
    """A model, a released buffer of it, and a view of its memory that user code has made on demand."""
    model = sharded(3, dtype=BF16)
    view = model.net.blocks[0].bias.data  # type: ignore[union-attr]
    model.on_demand.release_idle()
    return model, model.units[1].flats[0], view


def test_a_write_to_a_view_of_a_released_buffer_is_taken() -> None:
    _model, flat, view = viewed()
    assert not flat.is_gathered
    view.fill_(5.0)
    assert flat.writes.take()
    assert bool((master_of(flat, 1) == 5).all())


def test_a_view_of_a_released_buffer_shows_nan_after_a_step_and_a_write_to_it_is_an_error() -> None:
    _model, flat, view = viewed()
    flat.writes.outdate_memory()
    assert bool(view.isnan().all())
    view.fill_(1.0)
    with pytest.raises(StateError, match=r"view \(p\.data, p\.detach\(\)\) of a parameter in .* kept through a step"):
        flat.writes.take()


@pytest.mark.parametrize(("drop", "freed"), [(True, True), (False, False)])
def test_memory_is_freed_when_the_last_view_is(drop: bool, freed: bool) -> None:
    model, flat, view = viewed()
    if drop:
        del view
    model.on_demand.release_idle()
    assert (flat.full.untyped_storage().size() == 0) is freed


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda m: nn.init.ones_(m.weight),
    "data": lambda m: m.weight.data.fill_(1.0),
    "numpy": lambda m: m.weight.detach().numpy().fill(1.0),
    "another tensor": lambda m: setattr(m.weight, "data", torch.ones(3, 3)),
}


@pytest.mark.parametrize("way", CHANGES)
def test_every_way_to_write_reaches_the_masters_at_stage_3(way: str) -> None:
    model = sharded(3)
    block = model.net.blocks[1]
    assert isinstance(block, nn.Linear)
    CHANGES[way](block)
    model.on_demand.write_back()
    assert bool((master_of(model.units[2].flats[0], 0) == 1).all())
