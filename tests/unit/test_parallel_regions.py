"""Differentiable collectives: values, adjoints, and what is refused before anything is sent."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ls_strategy.distributed.axis import Axis, sum_in_order
from ls_strategy.errors import PlanError
from ls_strategy.parallel import regions
from tests.unit.thread_ranks import ThreadAxis, on_ranks

SIZE = 2


def local_input(rank: int) -> Tensor:
    return torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


INPUTS = [local_input(rank) for rank in range(SIZE)]
TOTAL = INPUTS[0] + INPUTS[1]

EXPECTED: dict[str, tuple[Callable[[Tensor, Axis], Tensor], Callable[[int], Tensor]]] = {
    "copy_to": (regions.copy_to, lambda r: INPUTS[r]),
    "reduce_from": (regions.reduce_from, lambda r: TOTAL),
    "gather_from": (regions.gather_from, lambda r: torch.cat(INPUTS, -1)),
    "scatter_to": (regions.scatter_to, lambda r: INPUTS[r].chunk(SIZE, -1)[r]),
    "gather_sequence": (regions.gather_sequence, lambda r: torch.cat(INPUTS, 1)),
    "scatter_sequence": (regions.scatter_sequence, lambda r: TOTAL.chunk(SIZE, 1)[r]),
    "exchange": (
        lambda x, axis: regions.exchange(x, axis, 2, 1),
        lambda r: torch.cat([x.chunk(SIZE, 2)[r] for x in INPUTS], 1),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_forward(name: str) -> None:
    region, expected = EXPECTED[name]
    for rank, result in enumerate(on_ranks(SIZE, lambda axis: region(INPUTS[axis.rank], axis))):
        assert torch.equal(result, expected(rank))


@pytest.mark.parametrize(("dtype", "big"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_16_bit_terms_are_summed_in_fp32_and_rounded_once(dtype: torch.dtype, big: float) -> None:
    """In 16 bits, each 1 would be rounded away."""
    terms = [torch.full((3,), value, dtype=dtype) for value in (big, 1.0, 1.0)]
    total = sum_in_order(terms)
    assert total.dtype == dtype
    assert total.tolist() == [big + 2] * 3
    assert terms[0].tolist() == [big] * 3


@pytest.mark.parametrize("name", ["gather_sequence", "scatter_sequence", "exchange"])
def test_backward_is_the_adjoint(name: str) -> None:
    """<forward(x), y> equals <x, backward(y)>, summed over the ranks, for maps whose outputs differ by rank."""

    def body(axis: ThreadAxis) -> tuple[Tensor, Tensor]:
        x = INPUTS[axis.rank].clone().requires_grad_()
        y = EXPECTED[name][0](x, axis)
        weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(7 + axis.rank))
        (grad,) = torch.autograd.grad(y, x, weight)
        return (y * weight).sum().detach(), (x * grad).sum().detach()

    pairs = on_ranks(SIZE, body)
    torch.testing.assert_close(sum(a for a, _ in pairs), sum(b for _, b in pairs), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("copy_to", lambda grads, r: grads[0] + grads[1]),
        ("reduce_from", lambda grads, r: grads[r]),
        ("gather_from", lambda grads, r: grads[r].chunk(SIZE, -1)[r]),
        ("scatter_to", lambda grads, r: torch.cat(grads, -1)),
    ],
)
def test_backward_of_replicated_tensors(name: str, expected: Callable[[list[Tensor], int], Tensor]) -> None:
    def body(axis: ThreadAxis) -> tuple[Tensor, Tensor]:
        x = INPUTS[axis.rank].clone().requires_grad_()
        y = EXPECTED[name][0](x, axis)
        weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(7 + axis.rank))
        return weight, torch.autograd.grad(y, x, weight)[0]

    results = on_ranks(SIZE, body)
    for rank, (_, grad) in enumerate(results):
        assert torch.equal(grad, expected([weight for weight, _ in results], rank))


def test_a_second_derivative() -> None:
    def body(axis: ThreadAxis) -> Tensor:
        x = INPUTS[axis.rank].clone().requires_grad_()
        (grad,) = torch.autograd.grad((regions.copy_to(x, axis) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    for second in on_ranks(SIZE, body):
        torch.testing.assert_close(second, 6 * TOTAL, rtol=1e-12, atol=1e-12)


def test_one_rank_returns_the_tensor_itself() -> None:
    x = torch.randn(2, 3)
    assert regions.gather_from(x, Axis("tensor")) is x


@pytest.mark.parametrize("region", [regions.scatter_to, regions.scatter_sequence])
def test_lengths_that_are_not_divisible_are_refused_before_anything_is_sent(region: Callable[..., Tensor]) -> None:
    def body(axis: ThreadAxis) -> list[str]:
        with pytest.raises(PlanError, match=r"but 3 is not divisible by 2. Pad it to a multiple of 2"):
            region(torch.randn(2, 3, 3), axis)
        return axis.calls

    assert on_ranks(SIZE, body) == [[], []]


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_copies_are_summed_among_adjacent_ranks(copies: int, dtype: torch.dtype) -> None:
    """7 elements are not divisible by the number of copies."""
    sums = on_ranks(4, lambda axis: regions.sum_copies(torch.full((7,), 2.0**axis.rank, dtype=dtype), axis, copies))
    expected = [3.0, 3.0, 12.0, 12.0] if copies == 2 else [15.0] * 4
    assert [s.tolist() for s in sums] == [[value] * 7 for value in expected]


# --- one copy for several layers --------------------------------------------------------------------------------------


def shared_copy() -> tuple[regions.SharedCopy, Tensor]:
    """A copy over two ranks; forward alone sends nothing, so that one of them is enough."""
    axis = Axis("tensor")
    axis.size = 2
    return regions.SharedCopy(axis), torch.randn(3, requires_grad=True) * 1


@pytest.mark.parametrize(
    ("other", "same"),
    [(lambda x: x, True), (lambda x: x * 1, False), (lambda x: x.add_(1), False)],
    ids=["the same input", "another input", "an input that was modified"],
)
def test_layers_share_the_copy_of(other: Callable[[Tensor], Tensor], same: bool) -> None:
    shared, x = shared_copy()
    before = shared(x)
    assert (shared(other(x)) is before) is same
    with torch.no_grad():
        assert shared(x) is x, "without gradients"


def test_the_copy_is_released_with_its_input() -> None:
    shared, x = shared_copy()
    shared(x)
    del x
    gc.collect()
    assert shared._copy is None
