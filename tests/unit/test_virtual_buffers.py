"""Buffers of virtual ranks of one process, as each of their steps leaves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ls_strategy.lightning.virtual.step import Buffers


def test_a_buffer_that_a_step_drops_or_makes_is_that_of_its_virtual_rank() -> None:
    module: Any = nn.Module()
    module.register_buffer("cache", None)
    module.register_buffer("count", torch.zeros(()))
    buffers = Buffers(module, 0)
    for number in range(3):
        buffers.begin()
        for rank in (0, 1):
            buffers.show(rank)
            assert module.count == number * (1 + rank)
            assert (module.cache is None) == (number == 0 or rank == 0)
            module.count += 1 + rank
            module.cache = None if rank == 0 else torch.full((2,), float(number))
            buffers.keep(rank)
        buffers.end(forget=False)
        assert module.cache is None
        assert module.count == number + 1
