"""What torch does with a sharded gradient: which operations ask for its elements, and which do without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import StateError
from ls_strategy.zero.user_code.sharded_gradient import (
    ShardedGradient,
    as_plain,
    forget,
    give_elements,
    new_gradient,
    take_elements,
)

SHAPE = torch.Size((2, 3))
NOTHING = torch.full((1,), float("nan"))


class Source:
    """Has the elements, and notes what it is asked for."""

    def __init__(self) -> None:
        self.values = torch.arange(-2.0, 4.0).view(SHAPE)
        self.log: list[Any] = []
        self.gradient = new_gradient(SHAPE, NOTHING, self)

    def gather(self) -> None:
        self.log.append("gather")
        give_elements(self.gradient, self.values)

    def used(self) -> None:
        self.log.append("used")

    def norm(self, order: float) -> Tensor:
        self.log.append(order)
        return torch.linalg.vector_norm(self.values, order)

    def edit(self, change: Callable[[Tensor], Any], *, linear: bool) -> None:
        self.log.append("linear" if linear else "edit")
        change(self.values)


@pytest.fixture
def source() -> Source:
    return Source()


NORMS: dict[str, Callable[[Tensor], Any]] = {
    "vector_norm": lambda g: torch.linalg.vector_norm(g, 2.0),
    "vector_norm of another dtype": lambda g: torch.linalg.vector_norm(g, 3, dtype=torch.float64),
    "norm": lambda g: g.norm(),
    "norm of data": lambda g: g.data.norm(float("inf")),
    "norm of detached": lambda g: g.detach().norm(p=1),
    "torch.norm": lambda g: torch.norm(g, 2),
    "linalg.norm": lambda g: torch.linalg.norm(g),
    "foreach": lambda g: torch._foreach_norm([g, torch.ones(2)], 2.0)[0],
    "total": lambda g: torch.nn.utils.get_total_norm([g, torch.ones(2)], 2.0),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_take_no_elements(source: Source, name: str) -> None:
    expected = NORMS[name](source.values)
    found = NORMS[name](source.gradient)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)
    assert type(source.gradient) is ShardedGradient
    assert source.log
    assert "gather" not in source.log


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda g: g.mul_(0.5),
    "mul_ by a tensor": lambda g: g.mul_(torch.tensor(0.5)),
    "data": lambda g: g.data.div_(3),
    "clamp_": lambda g: g.clamp_(-1, 1.5),
    "clamp_ by name": lambda g: g.clamp_(max=0.5),
    "neg_": lambda g: g.neg_(),
    "zero_": lambda g: g.zero_(),
    "nan_to_num_": lambda g: g.nan_to_num_(0.0, posinf=1.0),
    "foreach": lambda g: torch._foreach_mul_([g], 2.0),
    "foreach by a tensor": lambda g: torch._foreach_mul_([g, torch.ones(2)], torch.tensor(2.0)),
    "foreach of several numbers": lambda g: torch._foreach_mul_([g, torch.ones(2)], [2.0, 3.0]),
    "foreach clamp": lambda g: torch._foreach_clamp_min_([g], -0.5),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_a_number_does_is_done_shard_by_shard(source: Source, name: str) -> None:
    expected = source.values.clone()
    EDITS[name](expected)
    EDITS[name](source.gradient)
    assert torch.equal(source.values, expected)
    assert type(source.gradient) is ShardedGradient
    assert source.log in (["linear"], ["edit"])
    assert (source.log == ["linear"]) == ("clamp" not in name and "nan" not in name)


def test_assignments_by_operators(source: Source) -> None:
    gradient, expected = source.gradient, source.values.clone()
    gradient *= 2
    gradient /= 4
    assert gradient is source.gradient
    assert torch.equal(source.values, expected / 2)
    assert source.log == ["linear", "linear"]


ELEMENTS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda g: g.sum(),
    "other operand": lambda g: torch.ones(SHAPE) + g,
    "in a list": lambda g: torch.cat([g, g]),
    "element": lambda g: g[0, 1].item(),
    "list": lambda g: g.tolist(),
    "matrix norm": lambda g: torch.linalg.norm(g, ord="nuc"),
    "norm of rows": lambda g: g.norm(dim=1),
    "mul_ by elements": lambda g: g.mul_(torch.full(SHAPE, 2.0)),
    "rounded division": lambda g: g.div_(2, rounding_mode="floor"),
    "add_": lambda g: g.add_(1),
    "clone": lambda g: g.clone(),
    "deepcopy": lambda g: copy.deepcopy(g),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "text": lambda g: repr(g),
    "is finite": lambda g: g.isfinite().all(),
    "contiguous": lambda g: g.is_contiguous(),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_anything_else_gathers(source: Source, name: str) -> None:
    expected = ELEMENTS[name](source.values.clone())
    found = ELEMENTS[name](source.gradient)
    assert "gather" in source.log
    assert source.log.count("gather") == source.log.count("used")
    assert type(source.gradient) is Tensor
    assert not vars(source.gradient)
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_questions_need_no_elements(source: Source) -> None:
    g = source.gradient
    assert (g.shape, g.dtype, g.device.type, g.numel(), g.dim(), g.is_sparse) == (
        SHAPE,
        torch.float32,
        "cpu",
        6,
        2,
        False,
    )
    assert isinstance(g, Tensor)
    assert not g.requires_grad
    assert torch.zeros_like(g).shape == SHAPE
    assert source.log == []


def test_it_can_be_sharded_and_gathered_many_times(source: Source) -> None:
    for i in range(3):
        assert source.gradient.sum() == 3 + 6 * i
        source.gradient.add_(1)
        take_elements(source.gradient, SHAPE, NOTHING, source)
        assert type(source.gradient) is ShardedGradient


def test_a_dropped_one_says_so(source: Source) -> None:
    forget(source.gradient)
    with pytest.raises(StateError, match=r"shape \(2, 3\) was used after zero_grad.*Keep p\.grad\.clone\(\)"):
        source.gradient.sum()
    with pytest.raises(StateError, match="was used after"):
        source.gradient.norm()
    assert source.gradient.shape == SHAPE


def test_a_dropped_one_keeps_the_elements_it_has(source: Source) -> None:
    plain = as_plain(source.gradient)
    assert plain is source.gradient
    forget(plain)
    assert plain.sum() == 3


def test_it_does_not_keep_its_source_alive() -> None:
    gradient = Source().gradient
    with pytest.raises(StateError, match="was used after"):
        gradient.sum()
