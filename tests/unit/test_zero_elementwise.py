"""What probes find in optimizers of other packages: large tensors, tiny updates, projections, collectives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy import PlanError
from ls_strategy.zero.step.elementwise import is_elementwise, require_one_pass
from ls_strategy.zero.step.owner.full_tensor_groups import check_full_tensor_groups, full_tensor_groups


class Stepwise(Optimizer):
    """SGD on one tensor after another, each with a direction."""

    def __init__(self, params: Any, lr: Any = 0.1, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, p.grad, self.state[p]))

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        return grad


class ByBlocks(Stepwise):
    """Divides by the maximum of each block of 256, as 8-bit states do: of tensors of 4096 elements and more."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        if grad.numel() < 4096 or grad.numel() % 256:
            return grad
        blocks = grad.reshape(-1, 256)
        return (blocks / blocks.abs().amax(1, keepdim=True)).view_as(grad)


class ByRowsIfWide(Stepwise):
    """Factors what has two dimensions of 128, as Adafactor of optax does."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        factored = grad.dim() > 1 and min(grad.shape[-2:]) >= 128
        return grad / grad.square().mean(-1, keepdim=True).sqrt() if factored else grad


class Projected(Stepwise):
    """SGDP (Heo et al., arXiv:2006.08217): takes the radial part from the momentum where gradients have none."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(grad)).mul_(0.9).add_(grad)
        if grad.dim() == 1:
            return momentum
        weights, rows = param.view(len(param), -1), grad.reshape(len(param), -1)
        if torch.cosine_similarity(weights, rows).abs().max() >= 0.1 / rows.shape[1] ** 0.5:
            return momentum
        unit = weights / weights.norm(dim=1, keepdim=True)
        return momentum - ((momentum.view_as(unit) * unit).sum(1, keepdim=True) * unit).view_as(grad)


class TinyNorm(Stepwise):
    """Its first updates are below the rounding of fp32, and differ with the norm."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        return 1e-7 * grad / grad.norm()


class LateNorm(Stepwise):
    """Divides by a sum over the tensor from a limit on that probes do not reach, as Apollo does."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        state["curvature"] = state.get("curvature", torch.zeros_like(grad)) + 1e-6 * grad.square().sum()
        return grad / state["curvature"].clamp(min=1)


class Nested(Stepwise):
    """Momentum in a dictionary of a dictionary, as heavyball has it."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        inner = state.setdefault(0, {"momentum": torch.zeros_like(grad)})
        return inner["momentum"].mul_(0.9).add_(grad)


class Pairs(Stepwise):
    """Steps tensors in pairs, and a single one never."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        for a, b in zip(params[::2], params[1::2], strict=False):
            a.sub_(a.grad)
            b.sub_(b.grad)


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6, 6))]


@pytest.mark.parametrize("kind", [ByBlocks, ByRowsIfWide, Projected, TinyNorm, LateNorm, Nested])
def test_what_only_some_tensors_show_is_found(kind: type[Optimizer]) -> None:
    optimizer = kind(matrices())  # type: ignore[call-arg]
    assert full_tensor_groups(optimizer) == (True,)
    check_full_tensor_groups(optimizer, {}, {})


class SlowRate(Stepwise):
    """A common rate that is far too small at first, and a sum over all tensors from which it will grow (Prodigy)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, rate=1e-12, total=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["total"] += sum(float(p.grad.sum()) for p in group["params"])
        for p in group["params"]:
            p.sub_(group["rate"] * p.grad)


@pytest.mark.parametrize("kind", [SlowRate, Pairs])
def test_tensors_that_depend_on_each_other_are_found_before_it_counts(kind: type[Optimizer]) -> None:
    words = rf"{kind.__name__}.*steps a tensor differently if it has a second one.*stage 0"
    with pytest.raises(PlanError, match=words):
        check_full_tensor_groups(kind(matrices()), {}, {})  # type: ignore[call-arg]


class Averaging(Stepwise):
    """Averages gradients by itself."""

    sent = 0

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        dist.all_reduce(grad)
        Averaging.sent += 1
        return grad / dist.get_world_size()


def test_a_collective_in_step_is_refused_above_stage_0_and_never_probed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    optimizer = Averaging(matrices())
    with pytest.raises(PlanError, match=r"Averaging.step\(\) calls allreduce\(\).*for one device.*stage 0"):
        check_full_tensor_groups(optimizer, {}, {})
    assert not is_elementwise(optimizer)
    require_one_pass(optimizer)
    assert not Averaging.sent


class Fixed32(Stepwise):
    """Has a kernel for fp32 only."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        assert grad.dtype == torch.float32
        return grad


class TensorRate(Stepwise):
    """Refuses a rate that is no tensor, as torchao's optimizers do."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        assert isinstance(self.param_groups[0]["lr"], Tensor)
        return grad


class InTrainMode(Stepwise):
    """Steps after `train` only, as schedule-free optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, ready=False)

    def train(self) -> None:
        for group in self.param_groups:
            group["ready"] = True

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        assert self.param_groups[0]["ready"]
        return grad


class Counts(Stepwise):
    """Notes how many elements it steps, as heavyball does."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        self.param_groups[0]["numel"] = grad.numel()
        return grad


@pytest.mark.parametrize("make", [Fixed32, lambda p: TensorRate(p, torch.tensor(0.1)), InTrainMode, Counts])
def test_probes_meet_what_a_step_requires(make: Any) -> None:
    optimizer = make(matrices())
    before = repr(optimizer.state_dict())
    require_one_pass(optimizer)
    assert is_elementwise(optimizer)
    check_full_tensor_groups(optimizer, {}, {})
    assert repr(optimizer.state_dict()) == before


class Draws(Stepwise):
    """Adds noise from generators of the process."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        return grad + random.random() + np.random.rand() + torch.rand(())


def test_probes_leave_the_random_numbers_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all devices: a seed for the CPU alone would not show in dropout on a GPU."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    optimizer = Draws(matrices())
    assert not is_elementwise(optimizer)
    require_one_pass(optimizer)
    with pytest.raises(PlanError, match=r"Draws.*random numbers.*stage 0"):
        check_full_tensor_groups(optimizer, {}, {})
    assert repr((random.getstate(), np.random.get_state(legacy=True))) == repr(before[:2])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert not seeded


class CountsSteps(ByRowsIfWide):
    steps = 0

    def direction(self, param: Tensor, grad: Tensor, state: dict[Any, Any]) -> Tensor:
        CountsSteps.steps += 1
        return super().direction(param, grad, state)


def test_groups_that_differ_by_their_rate_are_tested_once() -> None:
    """A rate per layer makes hundreds of groups."""
    taken = []
    for count in (1, 40):
        CountsSteps.steps = 0
        groups = [{"params": [nn.Parameter(torch.ones(4, 4))], "lr": 0.1 / (1 + i)} for i in range(count)]
        optimizer = CountsSteps(groups)
        require_one_pass(optimizer)
        assert not is_elementwise(optimizer)
        assert full_tensor_groups(optimizer) == (True,) * count
        check_full_tensor_groups(optimizer, {}, {})
        taken.append(CountsSteps.steps)
    assert taken[0] == taken[1]
