"""`ls_strategy.Muon`, `Lamb` and `Lars` in one process, against torch, the papers' formulas and counted FLOPs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from ls_strategy import SOAP, ConfigError, Lamb, Lars, Muon
from ls_strategy.optimizers.newton_schulz import multiplications, orthogonalized

SHAPES = [(8, 6), (6, 8), (5, 5), (12, 3)]


def parameters(shapes: Any, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]


def run(optimizer: Optimizer, params: list[nn.Parameter], steps: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_torchs(adjust: Any, nesterov: bool) -> None:
    theirs, ours = parameters(SHAPES), parameters(SHAPES)
    expected = run(torch.optim.Muon(theirs, lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust), theirs)
    found = run(Muon(ours, lr=0.02, nesterov=nesterov, adjust_lr=adjust), ours)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_groups_without_muon_are_adamw() -> None:
    theirs, ours = parameters([(5, 3), (7,)]), parameters([(5, 3), (7,)])
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    expected = run(torch.optim.AdamW(theirs, **settings), theirs)
    found = run(Muon([{"params": ours, "use_muon": False}], lr=0.01), ours)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_stack_is_stepped_matrix_by_matrix_and_a_kernel_as_a_matrix() -> None:
    stack, kernel = parameters([(3, 8, 6), (4, 3, 2, 2)])
    alone = [nn.Parameter(m.detach().clone()) for m in (*stack, kernel.view(4, 12))]
    found, optimizer = Muon([stack, kernel], lr=0.1), Muon(alone, lr=0.1)
    for _ in range(5):
        stack.grad, kernel.grad = torch.randn_like(stack), torch.randn_like(kernel)
        for p, g in zip(alone, (*stack.grad, kernel.grad.view(4, 12)), strict=True):
            p.grad = g
        found.step()
        optimizer.step()
    expected = torch.stack([p.detach() for p in alone[:3]])
    torch.testing.assert_close(stack.detach(), expected, rtol=1e-3, atol=1e-3)  # batched products round in another way
    torch.testing.assert_close(kernel.detach().view(4, 12), alone[3].detach())


def test_the_iteration_leaves_singular_values_near_one() -> None:
    for shape in ((40, 30), (30, 40), (2, 20, 30)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)).float())
        assert values.min() > 0.5
        assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(6, 8), (8, 6), (3, 8, 6)])
def test_multiplications_are_counted_ones(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalized(torch.randn(shape), steps=4)
    assert counter.get_total_flops() == 2 * multiplications(shape, 4)


def test_updates_are_as_large_as_adamws() -> None:
    p = nn.Parameter(torch.zeros(64, 32))
    p.grad = torch.randn(64, 32)
    Muon([p], lr=1.0, weight_decay=0.0).step()
    assert p.detach().square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


def test_vectors_in_a_group_of_muon_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(3,\).*use_muon=False"):
        Muon(parameters([(3, 3), (3,)]))
    optimizer = Muon(parameters([(3, 3)]))
    with pytest.raises(ConfigError, match="use_muon=False"):
        optimizer.add_param_group({"params": parameters([(3,)])})
    assert len(optimizer.param_groups) == 1


def test_lamb_is_the_papers() -> None:
    (p,) = parameters([(4, 3)], torch.float64)
    value, m, v = p.detach().clone(), torch.zeros(4, 3).double(), torch.zeros(4, 3).double()
    optimizer = Lamb([p], lr=0.1, weight_decay=0.2, max_ratio=2.0)
    for t in range(1, 6):
        p.grad = torch.randn(4, 3, dtype=torch.float64)
        m, v = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2
        r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.2 * value
        value = value - 0.1 * min(value.norm() / r.norm(), 2.0) * r
        optimizer.step()
        torch.testing.assert_close(p.detach(), value, rtol=1e-12, atol=1e-12)


def test_lars_is_the_papers() -> None:
    p, q = parameters([(4, 3), (3,)], torch.float64)
    value, plain, buffer = p.detach().clone(), q.detach().clone(), torch.zeros(4, 3).double()
    reference = torch.optim.SGD([nn.Parameter(plain)], lr=0.5, momentum=0.9)
    optimizer = Lars([{"params": [p]}, {"params": [q], "trust_coefficient": 0}], lr=0.5, weight_decay=0.1)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    for _ in range(5):
        p.grad, q.grad = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        rate = 0.5 * 1e-3 * value.norm() / (p.grad.norm() + 0.1 * value.norm())
        buffer = 0.9 * buffer + rate * (p.grad + 0.1 * value)
        value = value - buffer
        reference.param_groups[0]["params"][0].grad = q.grad.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(p.detach(), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.detach(), reference.param_groups[0]["params"][0].detach(), rtol=1e-12, atol=1e-12)


def test_soap_is_the_papers() -> None:
    """With a large eps: the first gradient is diagonal in its own basis, and beside the diagonal there is rounding."""
    (p,) = parameters([(4, 3)], torch.float64)
    value = p.detach().clone()
    optimizer = SOAP([p], lr=0.1, betas=(0.9, 0.8), weight_decay=0.2, eps=1e-2, frequency=2)
    first, second = torch.zeros(4, 3).double(), torch.zeros(4, 3).double()
    left = right = left_basis = right_basis = None
    for t in range(1, 7):
        g = torch.randn(4, 3, dtype=torch.float64)
        p.grad = g.clone()
        if left is None or right is None:
            left, right = g @ g.T, g.T @ g
            left_basis, right_basis = torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1]
        else:
            left, right = 0.8 * left + 0.2 * g @ g.T, 0.8 * right + 0.2 * g.T @ g
            if t in (3, 5):
                left_basis = torch.linalg.qr(left @ left_basis)[0]
                right_basis = torch.linalg.qr(right @ right_basis)[0]
        first = 0.9 * first + 0.1 * g
        second = 0.8 * second + 0.2 * (left_basis.T @ g @ right_basis) ** 2
        update = (left_basis.T @ first @ right_basis) / (1 - 0.9**t) / ((second / (1 - 0.8**t)).sqrt() + 1e-2)
        value = value - 0.1 * 0.2 * value - 0.1 * left_basis @ update @ right_basis.T
        optimizer.step()
        torch.testing.assert_close(p.detach(), value, rtol=1e-10, atol=1e-10)


def test_soap_without_rotations_is_adamw() -> None:
    theirs, ours = parameters([(5, 3), (7,), (2, 3, 4)]), parameters([(5, 3), (7,), (2, 3, 4)])
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    expected = run(torch.optim.AdamW(theirs, **settings), theirs)
    for a, b in zip(run(SOAP(ours, max_dim=1, **settings), ours), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [Lamb, Lars])
def test_a_tensor_of_zeros_moves(make: Any) -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    make([p]).step()
    assert (p != 0).all()
    assert math.isfinite(float(p.detach().sum()))


@pytest.mark.parametrize("make", [Muon, Lamb, Lars, SOAP])
def test_states_go_on_after_loading(make: Any) -> None:
    whole, first = parameters(SHAPES), parameters(SHAPES)
    optimizer = make(first)
    run(optimizer, first, 3)
    second = [nn.Parameter(p.detach().clone()) for p in first]
    loaded = make(second)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, run(loaded, second, 3), run(optimizer, first, 3)))
    assert not torch.equal(first[0], whole[0])
