"""Bytes of model states, measured on the tensors of flat buffers."""

from __future__ import annotations

import torch

from ls_strategy.zero.memory import memory_bytes
from tests.unit.flat_buffers import sharded


def test_shared_memory_counts_once() -> None:
    model = sharded(1)
    found = memory_bytes(model.flats, [], [])
    assert found["parameters"] == sum(4 * flat.layout.numel for flat in model.flats)
    assert found["masters"] == 0


def test_masters_of_16_bit_parameters_count() -> None:
    model = sharded(1, dtype=torch.bfloat16)
    found = memory_bytes(model.flats, [], [])
    assert found["masters"] == 2 * found["parameters"]


def test_released_parameters_take_no_memory() -> None:
    assert memory_bytes(sharded(3).flats, [], [])["parameters"] == 0


def test_gradient_buffers_count() -> None:
    model = sharded(1)
    for flat in model.flats:
        flat.local.allocate(torch.float32)
    assert memory_bytes(model.flats, [], [])["gradients"] == sum(4 * flat.layout.numel for flat in model.flats)
