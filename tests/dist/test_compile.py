"""``torch.compile`` of single blocks: the losses of the plain model. ``aot_eager`` traces everything, no C++."""

from __future__ import annotations

import pytest
import torch

from tests.dist.ranks import Net, assert_close, fit, on_ranks, weights

pytestmark = pytest.mark.wide


class CompiledInPlace(Net):
    """``block.compile()`` keeps the module."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class CompiledWrapper(Net):
    """``torch.compile(block)`` is a module around the module."""

    def build(self) -> None:
        super().build()
        self.blocks = torch.nn.ModuleList(torch.compile(block, backend="aot_eager") for block in self.blocks)


@pytest.mark.parametrize("make", [pytest.param(CompiledInPlace, marks=pytest.mark.slow), CompiledWrapper])
@on_ranks(2, timeout_s=120)
def test_compiled_blocks(rank: int, world_size: int, make: type[Net]) -> None:
    plain = Net()
    fit("ddp", plain)
    for stage in (1, 3):
        module = make()
        fit(stage, module)
        assert_close(module.losses, plain.losses, f"stage {stage}")
        actual = {name.replace("_orig_mod.", ""): value for name, value in weights(module).items()}
        assert_close(actual, weights(plain), f"stage {stage}")
