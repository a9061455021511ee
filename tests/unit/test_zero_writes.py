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


def test_without_a_write_nothing_is_taken(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    before = flat.master.clone()
    assert not flat.writes.take()
    assert torch.equal(flat.master, before)


def test_elements_that_were_not_written_keep_their_fp32_masters(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    before = flat.master.clone()
    with torch.no_grad():
        layer.weight[0, 0] = 7.0
    assert flat.writes.take()
    changed = (flat.master != before).nonzero().flatten().tolist()
    assert changed == [0]
    assert flat.master[0] == 7.0


def test_a_write_through_data_counts_though_versions_miss_it(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    layer.bias.data.fill_(2.0)
    flat.writes.take()
    assert master_of(flat, 1).tolist() == [2.0, 2.0]
    assert not flat.writes.detected


def test_a_write_that_versions_count_is_detected(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    with torch.no_grad():
        layer.bias.fill_(2.0)
    flat.writes.take()
    assert flat.writes.detected


def test_data_set_to_another_tensor_is_copied_into_the_slot(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    layer.weight.data = torch.ones(2, 3, dtype=BF16)
    flat.writes.take()
    assert bool((master_of(flat, 0) == 1).all())
    assert layer.weight.data_ptr() == flat.views[0].data_ptr()


def test_what_data_returned_before_it_was_set_keeps_the_old_values(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    old = layer.weight.data
    before = old.clone()
    layer.weight.data = torch.ones(2, 3, dtype=BF16)
    flat.writes.take()
    assert torch.equal(old, before)


def test_data_of_another_shape_is_an_error(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1)
    layer.weight.data = torch.ones(3, 2)
    with pytest.raises(StateError, match=r"layer\.weight\.data was set to .*shape \(3, 2\).*it stays .*\(2, 3\)"):
        flat.writes.take()


def test_data_of_another_dtype_is_an_error(layer: nn.Linear) -> None:
    flat = flat_of(layer, "layer", 1, dtype=BF16)
    layer.weight.data = torch.ones(2, 3)
    with pytest.raises(StateError, match=r"set to a torch.float32 tensor.*stays torch.bfloat16"):
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


def test_a_view_of_a_released_buffer_shows_nan_after_a_step() -> None:
    _model, flat, view = viewed()
    flat.writes.outdate_memory()
    assert bool(view.isnan().all())


def test_a_write_to_an_outdated_view_is_an_error() -> None:
    _model, flat, view = viewed()
    flat.writes.outdate_memory()
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
