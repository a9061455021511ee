"""Averaged gradients: accumulation, loss scales, precision, and what an update takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.distributed.comm import PendingReduce
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from tests.unit.flat_buffers import flat_of

BF16 = torch.bfloat16


def flat(stage: int = 2, dtype: torch.dtype = torch.float32) -> FlatBuffer:
    return flat_of(nn.Linear(3, 2), "layer", stage, dtype=dtype)  # type: ignore[arg-type]


def land(buffer: FlatBuffer, value: float, *, scale: float = 1.0, exact_16_bit: bool = False) -> None:
    """Average gradients that are all of one value."""
    buffer.local.scale = scale
    buffer.local.allocate(buffer.full.dtype)
    assert buffer.local.buffer is not None
    buffer.local.buffer.fill_(value)
    buffer.averages.land(buffer.comm.reduce_scatter(buffer.local.buffer), exact_16_bit=exact_16_bit)


def values(buffer: FlatBuffer) -> set[float]:
    return set(buffer.averages.tensor().tolist())


@pytest.mark.parametrize(
    ("dtype", "second", "stays_in_16_bit"),
    [(torch.float32, 2.0, False), (BF16, 1 / 256, False), (BF16, 1 / 256, True)],
    ids=["fp32", "bf16", "bf16, the first one for a fused update"],
)
def test_micro_batches_are_added_in_fp32(dtype: torch.dtype, second: float, stays_in_16_bit: bool) -> None:
    buffer = flat(dtype=dtype)
    buffer.averages.folds_factors = stays_in_16_bit
    land(buffer, 1.0, exact_16_bit=stays_in_16_bit)
    assert buffer.averages.tensor().dtype == (BF16 if stays_in_16_bit else torch.float32)
    land(buffer, second, exact_16_bit=stays_in_16_bit)
    assert values(buffer) == {1 + second}


def test_forgotten_averages_are_overwritten() -> None:
    buffer = flat()
    land(buffer, 2.0)
    buffer.averages.forget()
    land(buffer, 3.0)
    assert values(buffer) == {3.0}


def test_averages_take_on_the_scale_of_the_next_gradients() -> None:
    buffer = flat()
    land(buffer, 2.0, scale=2.0)
    land(buffer, 8.0, scale=8.0)
    assert values(buffer) == {16.0}
    assert buffer.averages.unscale == 1 / 8


@pytest.mark.parametrize("stage", [0, 2])
def test_an_undone_scale_is_divided_out_once(stage: int) -> None:
    buffer = flat(stage)
    if stage:
        land(buffer, 8.0, scale=4.0)
    else:
        buffer.averages.tensor().fill_(8.0)
        buffer.local.scale = 4.0
    for _ in range(2):
        buffer.averages.undo_scale()
    assert values(buffer) == {2.0}
    assert buffer.averages.scale == 1.0


def test_an_average_over_several_ranks_is_in_fp32() -> None:
    """One of bf16 terms is no bf16 number in general."""
    buffer = flat(dtype=BF16)
    buffer.averages.folds_factors = True
    buffer.comm.world_size = 2
    buffer.local.allocate(BF16)
    terms = [torch.full((buffer.layout.shard,), value, dtype=BF16) for value in (1.0, 1 / 256)]
    buffer.averages.land(PendingReduce((), terms, (), buffer.comm), exact_16_bit=True)
    assert values(buffer) == {(1 + 1 / 256) / 2}


def test_a_second_micro_batch_is_added_in_fp64_for_fp64() -> None:
    buffer = flat(dtype=torch.float64)
    land(buffer, 1.0)
    land(buffer, 2**-40)
    assert values(buffer) == {1 + 2**-40}


def test_sums_are_of_unscaled_values() -> None:
    buffer = flat()
    land(buffer, 6.0, scale=2.0)
    squares, bad = buffer.averages.sums().tolist()
    assert squares == 9.0 * buffer.stepped_numel
    assert bad == 0


def test_sums_count_values_that_are_not_finite() -> None:
    buffer = flat()
    land(buffer, 1.0)
    buffer.averages.tensor()[:2] = torch.tensor([float("inf"), float("nan")])
    assert buffer.averages.sums()[1] == 2


def test_without_gradients_sums_and_gathered_averages_are_zero() -> None:
    buffer = flat()
    land(buffer, 1.0)
    buffer.averages.forget()
    assert buffer.averages.sums().tolist() == [0.0, 0.0]
    assert not buffer.averages.gather().any()


def test_a_range_is_set_to_zero() -> None:
    buffer = flat()
    land(buffer, 1.0)
    buffer.averages.zero(0, 6)
    assert buffer.averages.tensor()[:7].tolist() == [0.0] * 6 + [1.0]


def test_changes_count_generations() -> None:
    buffer = flat()
    land(buffer, 1.0)
    before = buffer.averages.generation
    buffer.averages.change(lambda grads: grads.mul_(2))
    assert values(buffer) == {2.0}
    assert buffer.averages.generation == before + 1


def test_averages_in_an_update_cannot_be_read() -> None:
    buffer = flat()
    land(buffer, 1.0)
    buffer.averages.hand_to_update()
    with pytest.raises(StateError, match=r"buffer of 'layer.weight' were freed.*overlap_step=False"):
        buffer.averages.sums()


def test_the_next_backward_does_not_overwrite_averages_in_an_update() -> None:
    buffer = flat()
    land(buffer, 1.0)
    taken = buffer.averages.tensor()
    buffer.averages.hand_to_update()
    buffer.averages.forget()
    land(buffer, 2.0)
    assert set(taken.tolist()) == {1.0}
    assert values(buffer) == {2.0}


def test_stage_0_averages_are_the_local_gradients() -> None:
    buffer = flat(0)
    found: Tensor = buffer.averages.tensor()
    assert found is buffer.local.buffer
