"""Copies and pickles of modules in flat buffers: plain modules, or an error with the cure."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.errors import StateError
from ls_strategy.zero.user_code.copies import PlainCopies
from tests.unit.flat_buffers import Net, Sharded, sharded


def saved(module: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
}


def model_of(stage: int) -> Sharded:
    model = sharded(stage)  # type: ignore[arg-type]
    model.attach()
    model.copies = PlainCopies(model.net, model.flats)  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_copy_has_plain_parameters_of_the_same_values_and_no_hooks_of_ours(stage: int, way: str) -> None:
    model = model_of(stage)
    copied: Net = WAYS[way](model.net)
    for ours, theirs in zip(model.net.parameters(), copied.parameters(), strict=True):
        assert type(theirs) is nn.Parameter
        assert torch.equal(ours, theirs)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in copied.modules())


def test_a_copy_keeps_hooks_of_the_user() -> None:
    model = model_of(1)
    model.net.first.register_forward_pre_hook(user_hook)
    copied = copy.deepcopy(model.net)
    assert list(copied.first._forward_pre_hooks.values()) == [user_hook]


def user_hook(*_: Any) -> None:
    """Does nothing."""


def test_a_pickle_of_one_layer_is_no_larger_than_the_layer() -> None:
    model = model_of(1)
    plain = len(pickle.dumps(nn.Linear(3, 3)))
    assert len(pickle.dumps(model.net.first)) <= plain + 100


def test_a_deep_copy_of_a_sharded_module_gathers() -> None:
    model = model_of(3)
    copied = copy.deepcopy(model.net.blocks[0])
    assert torch.equal(copied.weight, model.net.blocks[0].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_pickle_of_a_sharded_module_is_an_error_with_the_cure(way: str) -> None:
    with pytest.raises(
        StateError, match=r"parameters are sharded \(stage 3\), so it cannot be pickled.*state_dict\(\)"
    ):
        WAYS[way](model_of(3).net)


def test_a_pickle_of_a_gathered_module_is_made() -> None:
    model = model_of(3)
    with model.on_demand.all_gathered(model.flats, model.comm, modify=False):
        copied = WAYS["pickle"](model.net)
    assert torch.equal(copied.first.weight, model.net.first.weight)


def test_a_pickle_waits_for_new_weights() -> None:
    model = model_of(1)
    flat = model.flats[0]
    flat.start_gather()
    WAYS["pickle"](model.net)
    assert flat.gathering is None


def test_a_shallow_copy_shares_parameters_and_hooks() -> None:
    model = model_of(3)
    copied = copy.copy(model.net.first)
    assert copied._parameters["weight"] is model.net.first._parameters["weight"]
    assert len(copied._forward_pre_hooks) == 1


def test_removed_copies_leave_the_methods_of_the_class() -> None:
    model = model_of(1)
    model.copies.remove()  # type: ignore[attr-defined]
    assert not any("__reduce_ex__" in vars(m) for m in model.net.modules())
