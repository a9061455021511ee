"""Parameters that gather their values when they are used, and what does not use their values."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.errors import StateError
from ls_strategy.zero.flat.parameters import (
    ResidentParameter,
    ShardedParameter,
    grad_of,
    home_of,
    set_grad,
    unbind_home,
    unnoticed,
)
from tests.unit.flat_buffers import Sharded, flat_of, sharded


@pytest.fixture
def model() -> Sharded:
    return sharded(3)


def weight_of(model: Sharded, block: int = 0) -> nn.Parameter:
    return model.net.blocks[block].weight  # type: ignore[return-value]


def is_gathered(model: Sharded, block: int = 0) -> bool:
    return model.units[1 + block].flats[0].is_gathered


NO_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda p: p.shape,
    "numel": lambda p: p.numel(),
    "len": len,
    "dtype": lambda p: p.dtype,
    "requires_grad": lambda p: p.requires_grad_(False),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda p: p.new_zeros(2),
    "equal of another shape": lambda p: torch.equal(p, torch.zeros(1)),
    "hash": hash,
}

VALUES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda p: p.sum(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: p.detach().numpy(),
    "repr": repr,
    "equal": lambda p: torch.equal(p, torch.zeros(3, 3)),
    "in a list": lambda p: torch.stack([p, p]),
    "index": lambda p: p[0],
}


@pytest.mark.parametrize(("name", "gathers"), [*((n, False) for n in NO_VALUES), *((n, True) for n in VALUES)])
def test_only_what_needs_values_gathers_them(model: Sharded, name: str, gathers: bool) -> None:
    (VALUES if gathers else NO_VALUES)[name](weight_of(model))
    assert is_gathered(model) is gathers


def test_an_operation_gathers_the_masters_of_only_the_parameters_that_it_uses(model: Sharded) -> None:
    assert torch.equal(weight_of(model, 1).sum(), model.units[2].flats[0].master[:9].sum())
    assert [is_gathered(model, block) for block in range(3)] == [False, True, False]


def test_unnoticed_nothing_is_gathered(model: Sharded) -> None:
    with unnoticed():
        assert bool(weight_of(model).isnan().all())
    assert not is_gathered(model)


@pytest.mark.parametrize(("stage", "way"), [(3, copy.deepcopy), (1, lambda p: pickle.loads(pickle.dumps(p)))])
def test_a_deep_copy_or_a_pickle_is_a_plain_parameter(stage: Any, way: Callable[[Any], Any]) -> None:
    model = sharded(stage)
    assert type(weight_of(model)) is (ResidentParameter if stage == 1 else ShardedParameter)
    copied = way(weight_of(model))
    assert type(copied) is nn.Parameter
    assert torch.equal(copied, weight_of(model))
    assert copied.data_ptr() != weight_of(model).data_ptr()


def test_a_parameter_class_of_another_library_is_left_alone() -> None:
    class Quantized(nn.Parameter):
        pass

    net = nn.Module()
    net.weight = Quantized(torch.ones(2))
    flat_of(net, "net", 1)
    assert type(net.weight) is Quantized
    assert home_of(net.weight) is None


def test_unbound_a_parameter_is_an_ordinary_one() -> None:
    weight = weight_of(sharded(1))
    unbind_home(weight)
    assert (type(weight), home_of(weight)) == (nn.Parameter, None)


def test_without_its_engine_an_absent_parameter_is_an_error_with_the_cure() -> None:
    net = sharded(3).net
    gc.collect()
    weight = net.blocks[0].weight
    assert type(weight) is ShardedParameter
    with pytest.raises(StateError, match=r"shape \(3, 3\) was used after .* were freed\. Keep the model"):
        weight.sum()


def test_access_to_data_is_recorded(model: Sharded) -> None:
    assert not model.units[1].flats[0].writes.possible
    _ = weight_of(model).data
    assert model.units[1].flats[0].writes.possible


def test_a_forward_records_no_access() -> None:
    model = sharded(1)
    model.net(torch.ones(2, 3)).sum().backward()
    assert not any(flat.writes.possible for flat in model.flats)


def test_data_set_to_another_parameters_memory_becomes_a_copy() -> None:
    model = sharded(1)
    first, second = (weight_of(model, i) for i in range(2))
    first.data = second.data
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


def test_without_an_engine_that_averages_grad_is_that_of_autograd() -> None:
    weight = weight_of(sharded(1))
    grad = torch.ones(3, 3)
    weight.grad = grad
    assert grad_of(weight) is grad
    del weight.grad
    assert grad_of(weight) is None


def test_grad_is_asked_of_what_provides_it(model: Sharded) -> None:
    asked: list[int] = []

    class Provider:
        def read(self, flat: object, index: int) -> Tensor:
            asked.append(index)
            return torch.ones(())

        def write(self, flat: object, index: int, value: object) -> None:
            asked.append(-index)

    model.units[1].flats[0].gradients = Provider()  # type: ignore[assignment]
    bias = model.net.blocks[0].bias
    set_grad(bias, torch.zeros(3))  # type: ignore[arg-type]
    assert bias.grad == 1
    bias.grad = None  # type: ignore[assignment]
    assert asked == [1, -1]
    assert grad_of(bias) is not None  # type: ignore[arg-type]
