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


def test_the_first_positional_tensor_is_changed() -> None:
    assert change_first(("text", ONE, ONE), {"x": ONE}, double) == (("text", TWO, ONE), {"x": ONE})


def test_a_named_tensor_is_changed_without_a_positional_one() -> None:
    assert change_first((), {"mask": ONE, "x": ONE}, double) == ((), {"mask": ONE, "x": TWO})


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


def test_a_hook_before_changes_the_input() -> None:
    hooks, module = Hooks(), nn.Identity()
    hooks.before(module, lambda _m, args, kwargs: change_first(args, kwargs, double))
    assert module(ONE) == TWO


def test_a_hook_after_changes_the_output() -> None:
    hooks, module = Hooks(), nn.Identity()
    hooks.after(module, lambda _m, _args, output: double(output))
    assert module(ONE) == TWO


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


def test_removed_hooks_do_not_run() -> None:
    hooks, module = Hooks(), nn.Identity()
    hooks.before(module, lambda _m, args, kwargs: change_first(args, kwargs, double))
    hooks.after(module, lambda _m, _args, output: double(output))
    hooks.remove()
    assert module(ONE) == ONE


def test_what_is_registered_for_removal_runs_once() -> None:
    hooks, calls = Hooks(), []
    hooks.on_remove(lambda: calls.append(1))
    hooks.remove()
    hooks.remove()
    assert calls == [1]


# --- copies -----------------------------------------------------------------------------------------------------------


def sharded() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(NoPickle())
    return module


def test_a_sharded_model_cannot_be_pickled() -> None:
    with pytest.raises(StateError, match=r"cannot be pickled. Save its state with trainer.save_checkpoint"):
        pickle.dumps(sharded())


def test_a_sharded_model_can_be_copied_in_memory() -> None:
    module = sharded()
    assert torch.equal(copy.deepcopy(module)(torch.ones(2)), module(torch.ones(2)))


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
