"""Which optimizers get a fused update, and with which hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ls_strategy.ops.lion import Lion
from ls_strategy.zero.step.fused_optimizers import FUSED_NAMES, Kernel, kernel_for


class Subclass(torch.optim.AdamW):
    """May do anything in its step."""


def kernel_of(make: Callable[..., Optimizer], **settings: Any) -> Kernel | None:
    return kernel_for(make([nn.Parameter(torch.zeros(2))], **settings))


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (torch.optim.AdamW, "adamw_"),
        (torch.optim.Adam, "adamw_"),
        (torch.optim.SGD, "sgd_"),
        (torch.optim.Adagrad, "adagrad_"),
        (Lion, "lion_"),
    ],
)
def test_classes_with_a_fused_update(make: type[Optimizer], operation: str) -> None:
    kernel = kernel_of(make)
    assert kernel is not None
    assert kernel.operation == operation
    assert make.__name__ in FUSED_NAMES


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Subclass, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": False}),
        (torch.optim.SGD, {"differentiable": True}),
    ],
)
def test_optimizers_that_keep_their_own_step(make: type[Optimizer], settings: dict[str, Any]) -> None:
    assert kernel_of(make, **settings) is None


def test_one_group_with_an_option_of_its_own_decides_for_all() -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    assert kernel_for(torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:], "amsgrad": True}])) is None


def test_settings_are_those_of_the_group_now() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5), betas=(0.8, 0.9))
    kernel = kernel_for(optimizer)
    assert kernel is not None
    (group,) = optimizer.param_groups
    assert kernel.settings(group) == {
        "lr": 0.5, "eps": 1e-8, "weight_decay": 0.0, "maximize": False, "beta1": 0.8, "beta2": 0.9, "decoupled": False,
    }  # fmt: skip
    group["lr"] = 0.25
    assert kernel.settings(group)["lr"] == 0.25


@pytest.mark.parametrize(("momentum", "names"), [(0.0, []), (0.9, ["momentum_buffer"])])
def test_sgd_has_a_state_with_momentum_only(momentum: float, names: list[str]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0, momentum=momentum)
    kernel = kernel_for(optimizer)
    assert kernel is not None
    assert list(kernel.moments(optimizer.param_groups[0])) == names
