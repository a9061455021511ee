"""What blocks take and return, how often they run, and recomputing them: equal to one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, Block, Net, Sgd, compare, train_all
from tests.dist.trusted import once

# --- blocks -----------------------------------------------------------------------------------------------------------


class Twice(Sgd):
    """Every block runs twice in a row, and the first one once more at the end."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(block(h))
        return self.last(self.blocks[0](h))


@dataclass
class Output:
    """What a block of transformers might return."""

    hidden: Tensor
    extra: Any = None


class Returning(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor | dict | tuple | Output) -> Any:
        x = x["h"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else getattr(x, "hidden", x)
        h = super().forward(x)
        return {
            "dict": {"h": h, "none": None, "name": "h"},
            "tuple": (h, None, [h.detach(), 3]),
            "dataclass": Output(h, "extra"),
            "object": Opaque(h),
        }[self.kind]


class Opaque:
    """Holds a tensor where nobody looks for it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Returns(Sgd):
    """Each block returns something else than the one before, and takes what that one returned."""

    kinds = ("dict", "tuple", "dict")

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([Returning(kind) for kind in self.kinds])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h["h"] if isinstance(h, dict) else h[0] if isinstance(h, tuple) else h.hidden)


class ReturnsDataclass(Returns):
    kinds = ("dataclass", "dataclass", "dataclass")


class ReturnsOpaque(Returns):
    kinds = ("object", "object", "object")


class ReturnsNone(Sgd):
    """A block that returns nothing, and one whose result is thrown away."""

    def build(self) -> None:
        super().build()
        self.blocks.append(Silent())

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        box: list[Tensor] = []
        for block in self.blocks[:3]:
            h = block(h)
        assert self.blocks[3](h, box) is None
        self.blocks[0](h)
        return self.last(box[0])


class Silent(Block):
    def forward(self, x: Tensor, box: list[Tensor]) -> None:  # type: ignore[override]
        box.append(super().forward(x))


class NoInputGradient(Sgd):
    """The blocks come first: the inputs of the first one need no gradient; two such calls in one forward."""

    def build(self) -> None:
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x) + self.blocks[0](-x)
        return self.blocks[2](self.blocks[1](h))


class InPlace(Sgd):
    """Outputs are changed in place after the block."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
            h += 0.1
            h.mul_(0.9)
        return self.last(h)


class Views(Sgd):
    """Inputs by keyword, outputs cut into views."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            a, b = block(x=h).chunk(2, dim=-1)
            h = torch.cat([b, a], dim=-1)
        return self.last(h)


class Adapter(nn.Module):
    """LoRA: a frozen matrix and a trainable low-rank one; backward reads the frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Lora(Sgd):
    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Adapter() for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


# --- recompute --------------------------------------------------------------------------------------------------------


class Recompute(Sgd):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


class RecomputeReentrant(Recompute):
    reentrant = True


class RecomputeTwice(Recompute):
    """Gradients of one block arrive in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


class RecomputeTwiceReentrant(RecomputeTwice):
    reentrant = True


class RecomputeTiedReentrant(RecomputeReentrant):
    """The tied weight's gradient comes once from inside a recomputed region and once from outside."""

    def build(self) -> None:
        super().build()
        self.blocks[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last.weight = self.blocks[2][0].weight


class RecomputeGroup(Sgd):
    """One recomputed region over two blocks, another over the last block and the root's head."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = checkpoint(lambda t: self.blocks[1](self.blocks[0](t)), h, use_reentrant=self.reentrant)
        return checkpoint(lambda t: self.last(self.blocks[2](t)), h, use_reentrant=self.reentrant)


class RecomputeGroupReentrant(RecomputeGroup):
    reentrant = True


class RecomputeInside(Sgd):
    """Recompute within a block."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([Thrifty() for _ in range(3)])


class Thrifty(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda t: self.narrow(torch.tanh(self.wide(self.norm(t)))), x, use_reentrant=False)


class RecomputeLora(Lora):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.last(h)


GROUPS: dict[str, list[type[Net]]] = {
    "calls": [Twice, NoInputGradient, Lora],
    "results": [Returns, ReturnsDataclass],
    "hidden_results": [ReturnsOpaque, ReturnsNone],
    "views": [InPlace, Views],
    "recompute": [Recompute, RecomputeReentrant, RecomputeInside, RecomputeLora],
    "recompute_twice": [RecomputeTwice, RecomputeTwiceReentrant, RecomputeTiedReentrant],
    "recompute_group": [RecomputeGroup, RecomputeGroupReentrant],
}


# Of every group some, each at a stage or two.
FEW: dict[tuple[int, ...], list[type[Net]]] = {
    (3,): [Twice, Returns, ReturnsOpaque, RecomputeReentrant, RecomputeTwice],
    (1,): [Lora],
}


@pytest.mark.parametrize("stages", FEW)
def test_few_equal_one_process(stages: tuple[int, ...]) -> None:
    """Trusted run: Lightning's plain single-device strategy."""
    trusted = once(train_all, 1, [case for cases in FEW.values() for case in cases])[0]
    spawn(compare, 2, FEW[stages], trusted, stages, init_process_group=False)


@pytest.mark.wide
@pytest.mark.parametrize("group", GROUPS)
def test_equals_one_process(group: str) -> None:
    trusted = once(train_all, 1, GROUPS[group])[0]
    spawn(compare, 2, GROUPS[group], trusted, init_process_group=False)
