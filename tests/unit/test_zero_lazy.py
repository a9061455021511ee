"""Lazy tensors: what is read when, and what stays in memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.meta_init import lazy
from ls_strategy.meta_init.lazy import LazyTensor, parts_of

VALUES = torch.arange(12.0).view(3, 4)


class Stored(LazyTensor):
    """Notes which ranges are read."""

    reads: list[tuple[int, int]]

    @staticmethod
    def __new__(cls: Any) -> Stored:
        self = Tensor._make_wrapper_subclass(cls, VALUES.shape, dtype=VALUES.dtype)  # type: ignore[attr-defined]
        self.reads = []
        return self

    def load(self, start: int, stop: int) -> Tensor:
        self.reads.append((start, stop))
        return VALUES.reshape(-1)[start:stop].clone()


@pytest.fixture
def stored() -> Stored:
    return Stored()


def test_shape_and_dtype_read_nothing_and_an_operation_the_full_tensor_every_time(stored: Stored) -> None:
    assert (stored.shape, stored.dtype, stored.reads) == (VALUES.shape, VALUES.dtype, [])
    for _ in range(2):
        assert torch.equal(stored + 1, VALUES + 1)
    assert stored.reads == [(0, 12), (0, 12)]


def test_a_range_reads_the_range_and_a_box_is_a_rectangular_part(stored: Stored) -> None:
    assert stored.range(2, 5).tolist() == [2.0, 3.0, 4.0]
    assert stored.reads == [(2, 5)]
    assert torch.equal(stored.box((1, 2), (2, 2)), VALUES[1:, 2:])


def test_a_change_in_place_or_through_a_view_stays(stored: Stored) -> None:
    stored.mul_(2)
    assert torch.equal(stored.range(0, 12), VALUES.reshape(-1) * 2)
    assert torch.equal(stored.box((0, 0), (1, 4)), VALUES[:1] * 2)
    stored[0].zero_()
    assert not stored.materialize()[0].any()
    assert torch.equal(stored.materialize()[1:], VALUES[1:] * 2)


def test_a_deep_copy_is_an_ordinary_tensor_and_lists_and_arrays_have_all_elements(stored: Stored) -> None:
    copied = copy.deepcopy(stored)
    assert type(copied) is Tensor
    assert torch.equal(copied, VALUES)
    assert stored.tolist() == VALUES.tolist()
    assert (stored.numpy() == VALUES.numpy()).all()


def test_a_lazy_tensor_is_read_in_portions(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "READ_CHUNK", 5)
    found = list(parts_of(stored, 1, 12))
    assert [(at, part.numel()) for at, part in found] == [(1, 5), (6, 5), (11, 1)]
    assert torch.cat([part for _, part in found]).tolist() == list(map(float, range(1, 12)))


def test_an_ordinary_tensor_is_one_portion() -> None:
    ((at, part),) = parts_of(VALUES, 3, 9)
    assert (at, part.data_ptr()) == (3, VALUES.reshape(-1)[3:].data_ptr())
