"""What a module shows while its values are stored elsewhere."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras.inference.placeholder import (
    EntryTarget,
    FloatingTarget,
    Placeholder,
    StoredTensor,
    own_tensors,
    targets_of,
)

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("levels", torch.arange(3))
        self.register_buffer("table", torch.ones(2), persistent=False)


def target_of(module: Layer, kind: Any = FloatingTarget) -> Any:
    (target,) = (t for t in targets_of({"x": module}, CPU, set())[0] if isinstance(t, kind))
    return target


def test_a_hidden_parameter_keeps_its_identity_and_reads_as_nan_until_it_is_shown() -> None:
    module = Layer()
    weight, target = module.weight, target_of(module)
    target.hide()
    assert module.weight is weight
    assert weight.shape == (3,)
    assert weight.isnan().all()
    target.show(target.prepare(torch.tensor([1.0, 2.0, 3.0])))
    assert module.weight.tolist() == [1.0, 2.0, 3.0]
    assert not target.changed()


@pytest.mark.parametrize("change", [lambda w: w.add_(1), lambda w: setattr(w, "data", torch.zeros(3))])
def test_changes_of_a_parameter_are_noticed(change) -> None:
    module = Layer()
    target = target_of(module)
    target.show(torch.ones(3))
    with torch.no_grad():
        change(module.weight)
    assert target.changed()


def test_a_hidden_buffer_of_integers_raises_on_use() -> None:
    module = Layer()
    target_of(module, EntryTarget).hide()
    assert isinstance(module.levels, Placeholder)
    with pytest.raises(StateError, match=r"x\.levels is stored on a tier"):
        module.levels + 1


def test_a_replaced_buffer_is_noticed() -> None:
    module = Layer()
    target = target_of(module, EntryTarget)
    target.show(torch.arange(3))
    assert not target.changed()
    module.levels = torch.zeros(3, dtype=torch.int64)
    assert target.changed()


@pytest.mark.parametrize("use", [copy.deepcopy, pickle.dumps])
def test_a_placeholder_is_not_copied(use) -> None:
    with pytest.raises(StateError, match="x is stored on a tier"):
        use(Placeholder("x", torch.ones(2), CPU))


def test_a_stored_tensor_reads_its_elements_when_used() -> None:
    values = torch.arange(6.0)
    reads: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> torch.Tensor:
        reads.append((start, stop))
        return values[start:stop]

    stored = StoredTensor(torch.empty(2, 3, device="meta"), read)
    assert reads == []
    assert torch.equal(stored + 0, values.view(2, 3))
    assert reads != []
    assert torch.equal(pickle.loads(pickle.dumps(stored)), values.view(2, 3))


def test_a_tied_tensor_is_one_target_under_all_its_names() -> None:
    module = nn.Sequential(Layer(), Layer())
    module[1].weight = module[0].weight
    targets, _ = targets_of({"": module}, CPU, set())
    (tied,) = (t for t in targets if isinstance(t, FloatingTarget))
    assert [(owner(), key) for owner, key in tied.owners] == [(module[0], "weight"), (module[1], "weight")]


def test_buffers_that_are_not_saved_stay_and_shared_tensors_are_omitted() -> None:
    module = Layer()
    assert [name for name, *_ in own_tensors("x", module)] == ["x.weight", "x.levels"]
    assert [t.name for t in targets_of({"x": module}, CPU, {id(module.weight)})[0]] == ["x.levels"]


def test_sparse_tensors_are_refused() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(PlanError, match=r"x\.mask is a Tensor .* but only plain dense tensors"):
        targets_of({"x": module}, CPU, set())
