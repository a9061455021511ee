"""Hooks of a sharded model: what they change, when they run, and gradients that are summed once."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.errors import StateError
from ls_strategy.parallel.hooks import GradientSums, Hooks, NoPickle, Owned, change_first, change_output


def double(x: Tensor) -> Tensor:
    return 2 * x


ONE = torch.ones(1)
TWO = torch.full((1,), 2.0)


class Pair(NamedTuple):
    hidden: Tensor
    name: str


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((("text", ONE, ONE), {"x": ONE}), (("text", TWO, ONE), {"x": ONE})),
        (((), {"mask": ONE, "x": ONE}), ((), {"mask": ONE, "x": TWO})),
    ],
    ids=["positional", "named"],
)
def test_the_first_tensor_of_a_call_is_changed(call: Any, expected: Any) -> None:
    assert change_first(*call, double) == expected


def test_a_call_without_a_tensor_is_refused() -> None:
    with pytest.raises(StateError, match=r"without a tensor among its positional arguments or \['input', 'x'\]"):
        change_first((1,), {"mask": ONE}, double)


@pytest.mark.parametrize(
    ("output", "expected"),
    [(ONE, TWO), ((None, ONE, ONE), (None, TWO, ONE)), ([ONE], [TWO]), (Pair(ONE, "a"), Pair(TWO, "a"))],
    ids=["tensor", "tuple", "list", "named tuple"],
)
def test_the_first_tensor_of_an_output_is_changed(output: Any, expected: Any) -> None:
    changed = change_output(output, double)
    assert type(changed) is type(expected)
    assert changed == expected


def test_an_output_without_tensors_is_refused() -> None:
    with pytest.raises(StateError, match=r"returned dict. Return the hidden states"):
        change_output({"hidden": ONE}, double)


# --- hooks ------------------------------------------------------------------------------------------------------------


def doubling(module: nn.Module, *, before: bool = True, after: bool = True) -> Hooks:
    hooks = Hooks()
    if before:
        hooks.before(module, lambda _m, args, kwargs: change_first(args, kwargs, double))
    if after:
        hooks.after(module, lambda _m, _args, output: double(output))
    return hooks


@pytest.mark.parametrize("when", [{"before": False}, {"after": False}], ids=["output", "input"])
def test_a_hook_changes_the_input_or_the_output_until_it_is_removed(when: dict[str, bool]) -> None:
    module = nn.Identity()
    hooks = doubling(module, **when)
    assert module(ONE) == TWO
    hooks.remove()
    assert module(ONE) == ONE


@pytest.mark.parametrize(("always", "outputs"), [(True, [None]), (False, [])])
def test_only_an_unconditional_hook_runs_after_a_forward_that_raised(always: bool, outputs: list[None]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    seen: list[Any] = []
    hooks, module = Hooks(), Fails()
    hooks.after(module, lambda _m, _args, output: seen.append(output), always=always)
    with pytest.raises(RuntimeError, match="on purpose"):
        module(ONE)
    assert seen == outputs


def test_what_is_registered_for_removal_runs_once() -> None:
    hooks, calls = Hooks(), []
    hooks.on_remove(lambda: calls.append(1))
    hooks.remove()
    hooks.remove()
    assert calls == [1]


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_sharded_model_can_be_copied_in_memory_but_not_pickled() -> None:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(NoPickle())
    assert torch.equal(copy.deepcopy(module)(torch.ones(2)), module(torch.ones(2)))
    with pytest.raises(StateError, match=r"cannot be pickled. Save its state with trainer.save_checkpoint"):
        pickle.dumps(module)


# --- gradients --------------------------------------------------------------------------------------------------------


def summed(module: nn.Linear) -> tuple[Hooks, list[Tensor]]:
    """Double the gradient of the weight, and record what is doubled."""
    seen: list[Tensor] = []

    def reduce(grad: Tensor) -> Tensor:
        seen.append(grad)
        return 2 * grad

    hooks = Hooks()
    sums = GradientSums(hooks)
    for _ in range(2):
        sums.add(Owned("weight", module, "weight"), reduce)
    return hooks, seen


def test_a_gradient_is_reduced_once_however_often_the_parameter_is_used() -> None:
    module = nn.Linear(1, 1, bias=False)
    _, seen = summed(module)
    (module(ONE) + module(ONE)).backward()
    assert len(seen) == 1
    assert module.weight.grad == torch.full((1, 1), 4.0)


def test_a_frozen_parameter_stays_frozen_and_is_reduced_later() -> None:
    module = nn.Linear(1, 1, bias=False).requires_grad_(False)
    summed(module)
    assert not module.weight.requires_grad
    module.requires_grad_()
    module(ONE).backward()
    assert module.weight.grad == torch.full((1, 1), 2.0)


def test_a_parameter_on_meta_is_reduced_once_it_has_values() -> None:
    module = nn.Linear(1, 1, bias=False, device="meta")
    summed(module)
    module.to_empty(device="cpu")
    module(ONE).backward()
    assert module.weight.grad == torch.full((1, 1), 2.0)


def test_removed_sums_reduce_nothing() -> None:
    module = nn.Linear(1, 1, bias=False)
    hooks, seen = summed(module)
    hooks.remove()
    module(ONE).backward()
    assert not seen
